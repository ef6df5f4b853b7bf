"""Which plans are tried, and races of candidates whose times are written down."""

import itertools
from types import SimpleNamespace

from made_graphs import GB, layers, request_of

from harness.domain.cluster import Cluster
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.portfolio import search_portfolio
from harness.plan.search.objective import Candidate
from harness.workloads.search.trials import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Place,
    Tried,
    places,
    race,
    trial_doubts,
    trial_ratios,
    trial_title,
    unlike_first,
    worth_trying,
)


def never_late():
    return False


def racing(*rounds):
    """Times each racer by its own cycle of seconds."""
    times = [itertools.cycle(own) for own in rounds]
    return lambda k: next(times[k])


def test_who_is_slower_in_all_first_rounds_leaves_and_the_last_one_need_not_run():
    found = race(racing([1.0], [2.0], [3.0]), 3, never_late)
    assert [len(own) for own in found] == [LEAST_ROUNDS] * 3


def test_those_near_each_other_go_on_without_the_slow():
    # The first two change places, the first is a tenth faster in four rounds of five.
    near = [1.0, 1.2, 1.0, 1.0, 1.0], [1.1] * 5
    found = race(racing(*near, [2.0]), 3, never_late)
    n_near, again, n_slow = map(len, found)
    assert n_near == again > n_slow == LEAST_ROUNDS
    assert n_near < MOST_ROUNDS
    assert [place.index for place in places(found)] == [0, 1, 2]


def test_equal_ones_end_with_the_rounds():
    found = race(racing([1.0, 1.1], [1.1, 1.0]), 2, never_late)
    assert [len(own) for own in found] == [MOST_ROUNDS] * 2


def test_it_ends_when_it_is_late_after_the_first_rounds():
    asked = []

    def is_late():
        asked.append(1)
        return len(asked) == 2

    found = race(racing([1.0, 1.1], [1.1, 1.0]), 2, is_late)
    assert [len(own) for own in found] == [LEAST_ROUNDS + 1] * 2


def test_the_best_of_each_schedule_and_sharded_state_is_tried_before_second_bests():
    def plan(method, schedule, n_stages, n_devices=4, shard_state="none"):
        strategy = Strategy(
            name="searched", batch=8, operators={"a": OperatorPlan({}, list(range(n_devices)))},
            n_microbatches=2, schedule=schedule, stages=[Stage()] * n_stages,
            shard_state=shard_state,
        )  # fmt: skip
        return Candidate(method, 1.0, strategy)

    ranked = [
        plan("whole", "gpipe", 0), plan("MCMC", "gpipe", 1), plan("dp", "1f1b", 2),
        plan("dp of 4", "1f1b", 4), plan("by hand", "interleaved", 4), plan("gpipe", "gpipe", 2),
        plan("single", "gpipe", 1, n_devices=1),
        plan("sharded", "gpipe", 1, shard_state="optimizer"),
    ]  # fmt: skip
    found = [candidate.method for candidate in unlike_first(ranked)]
    assert found == ["whole", "dp", "by hand", "gpipe", "single", "sharded", "MCMC", "dp of 4"]


def test_the_title_names_what_was_measured():
    candidate = Candidate("MCMC", 0.005, Strategy(name="searched", batch=8, operators={}))
    tried = [
        Tried(candidate, Place(index=k, duration_s=0.01 * (k + 1), n_rounds=4)) for k in range(2)
    ]
    title = "fastest of 2 plans that were tried: 10 ms per step, predicted 5 ms"
    assert (trial_title(tried), trial_title([])) == (title, "")


def named(method, step_s, n_devices=4, n_stages=1):
    operators = {"a": OperatorPlan({}, list(range(n_devices)))}
    stages = [Stage()] * n_stages
    strategy = Strategy(name="searched", batch=8, operators=operators, stages=stages)
    return Candidate(method, step_s, strategy)


def test_only_plans_that_were_tried_are_compared_by_measured_steps():
    result = SimpleNamespace(speedup_over_single=3.0, speedup_over_ddp=0.81)
    fastest = Tried(named("gpipe", 0.065, n_stages=2), Place(index=0, duration_s=0.014, n_rounds=4))
    ddp = Tried(named("ddp", 0.053), Place(index=1, duration_s=0.028, n_rounds=4))
    single = "predicted 3.00 times as fast as one device (not tried), "
    untried = "predicted 0.81 times as fast as data parallel (not tried)"
    assert trial_ratios([fastest], result) == single + untried
    compared = "measured 2.00 times as fast as data parallel"
    assert trial_ratios([fastest, ddp], result) == single + compared
    itself = "it is data parallel"
    assert trial_ratios([ddp, fastest], result) == single + itself
    assert trial_ratios([], result) == ""


def test_a_plan_that_was_not_tried_is_named_if_predictions_are_further_off_than_its_gap():
    ddp, gpipe, like = named("ddp", 0.06), named("gpipe", 0.05, n_stages=2), named("dp", 0.05)
    off = Tried(gpipe, Place(index=0, duration_s=0.025, n_rounds=4))
    near = Tried(gpipe, Place(index=0, duration_s=0.049, n_rounds=4))
    (line,) = trial_doubts([off], [gpipe, ddp])
    assert line == (
        "warning: predictions of the tried plans are up to 2 times off; ddp, which was not tried "
        "and is predicted to take 1.20 times as long, may be faster: run profile and links again "
        "on idle devices, or train it, too"
    )
    assert trial_doubts([near], [gpipe, ddp]) == []
    other, tried = named("tensor parallel", 0.06), [off, Tried(like, off.place)]
    assert trial_doubts(tried, [gpipe, like, other]) == []
    assert trial_doubts(tried, [gpipe, like, other, ddp]) == [line]
    assert trial_doubts([], [gpipe, ddp]) == []


def test_the_state_of_all_tried_plans_fits_beside_the_activations_of_each():
    graph, profile = layers(4, batch=1024, parameters=10)  # 120 B of state, 128 KiB of outputs
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=GB)
    found = search_portfolio(request_of(graph, profile, cluster))
    peaks = [
        float(found.simulator.simulate(found.strategy(plan)).outcome.memory_bytes.max())
        for plan in worth_trying(found, 3)
    ]
    assert sum(peaks) > max(peaks) + 1000
    for spare, n in ((1000, 3), (0, 1)):
        request = request_of(graph, profile, cluster, memory_bytes=round(max(peaks)) + spare)
        assert len(worth_trying(search_portfolio(request), 3)) == n
