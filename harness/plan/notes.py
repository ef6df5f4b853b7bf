"""What the numbers of a plan rest on that a reader could miss, one line each."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.schedule import SCHEDULES
from harness.domain.sharding import has_tasks
from harness.domain.strategy import Strategy
from harness.plan.builders import unlike_ties
from harness.plan.estimates import FROM_FLOPS, ROOFLINE
from harness.plan.fit import OperatorTimes
from harness.plan.simulate.block_times import is_product

# Fits are warned of if those off by more than half take more than a tenth of a device's time.
_BAD_FIT, _LEAST_SHARE = 0.5, 0.1
_MOST_NAMED = 3


def notes_of(
    graph: Graph, profile: Profile, cluster: Cluster, strategy: Strategy, *, is_searched: bool
) -> Iterator[str]:
    """Of a strategy by the simulator.

    Args:
        is_searched: it was compared with those of other schedules.
    """
    kinds = list(dict.fromkeys(device.kind for device in cluster.devices))
    yield from untimed_optimizer(profile, kinds)
    splits = SCHEDULES[strategy.schedule].splits_backward or is_searched
    if splits and len(strategy.stages) > 1:
        yield from whole_backward(graph)
    yield from bad_fits(graph, profile, kinds)
    for names in unlike_ties(graph, strategy.operators):
        yield (
            f"warning: {' and '.join(names)} share a weight and do not cut it alike: each task of "
            "one that cuts it computes all of it for its samples, which this prediction does not "
            "know: cut them alike, or by samples"
        )


def print_notes(notes: Iterable[str]) -> None:
    """On stderr, because --json prints one object."""
    for note in notes:
        print(note, file=sys.stderr)


def untimed_optimizer(profile: Profile, kinds: Iterable[str]) -> Iterator[str]:
    """Kinds of devices whose optimizer step takes 0 s, because nothing says how long."""
    known = {time.device_kind for time in profile.optimizers}
    if missing := [kind for kind in kinds if kind not in known]:
        yield (
            f"assumed: the optimizer takes no time on {' and '.join(missing)}: `./entry.sh "
            "profile` measures it, and --rates or `import --memory-bandwidth` estimates it"
        )


def whole_backward(graph: Graph) -> Iterator[str]:
    """A graph whose backward passes zero_bubble cannot split."""
    if not any(map(is_product, graph.operators)):
        yield (
            "assumed: backward is not split into inputs and weights, because no operator is known "
            "to be a product by weights, so zero_bubble gains nothing"
        )


def bad_fits(graph: Graph, profile: Profile, kinds: Iterable[str]) -> Iterator[str]:
    """Kinds of devices on which fits between measured shapes are far off, with the operators that
    matter most."""
    if profile.provenance.get("source") in (ROOFLINE, FROM_FLOPS):
        return
    times = OperatorTimes(profile)
    operators = {one.profile_key: one for one in filter(has_tasks, graph.operators)}
    n_uses = Counter(one.profile_key for one in filter(has_tasks, graph.operators))
    for kind in kinds:
        errors = {key: times.relative_error(one, kind) or 0.0 for key, one in operators.items()}
        seconds = {
            key: n_uses[key] * times.lookup(one, kind).total_s for key, one in operators.items()
        }
        bad = [key for key, error in errors.items() if error > _BAD_FIT]
        share = sum(seconds[key] for key in bad) / max(sum(seconds.values()), 1e-30)
        if share > _LEAST_SHARE:
            bad.sort(key=lambda key: -seconds[key] * errors[key])
            worst = ", ".join(
                f"{operators[key].name} ({errors[key]:.0%})" for key in bad[:_MOST_NAMED]
            )
            yield (
                f"warning: between measured shapes the profile's times are off by more than "
                f"{_BAD_FIT:.0%} for {share:.0%} of a step on {kind}, above all {worst}: profile "
                "again on idle devices"
            )
