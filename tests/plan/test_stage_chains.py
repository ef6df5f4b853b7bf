"""The program for pipelines on unlike devices, beside the enumeration of all pipelines."""

import itertools
import math
from functools import partial

import numpy as np
import pytest

from harness.plan.search.pipelines import MOST_SEGMENTS, merge_operators
from harness.plan.search.stage_chains import (
    Links,
    Pipeline,
    StageCosts,
    best_pipelines,
    chains_along,
    chains_of_classes,
    n_moves,
)

N_SEGMENTS, N_MICROBATCHES = 6, 4


def random_case(seed, chains, n_devices):
    """Costs of segments that add up, and links, all drawn at random."""
    draw = np.random.default_rng(seed)
    own_s = draw.uniform(1, 4, N_SEGMENTS) / draw.uniform(0.3, 1, (n_devices, 1))
    of_device = np.insert(own_s.cumsum(axis=1), 0, 0, axis=1)
    between = of_device[:, None, :] - of_device[:, :, None]
    with np.errstate(divide="ignore"):
        stage_s = np.stack([1 / (1 / between[list(g)]).sum(axis=0) for g in chains.groups])
    weights = np.insert(draw.uniform(0, 4, N_SEGMENTS).cumsum(), 0, 0)
    several = np.array([len(g) > 1 for g in chains.groups])
    sync_s = several[:, None, None] * (weights - weights[:, None])
    sent, returned = draw.uniform(0, 2, (2, N_SEGMENTS + 1, N_SEGMENTS + 1))
    links = Links(*draw.uniform(0.1, 1.0, (3, n_devices, n_devices)), np.arange(n_devices) // 2)
    return StageCosts(stage_s, sync_s, sent, returned), links


def bound_s(pipeline, chains, costs, links):
    """The estimate of a step, stage by stage."""
    m, reached, bound, start, before = N_MICROBATCHES, 0.0, 0.0, 0, None
    of_stage, sent_in, returned_in, earlier = 0, 0.0, 0.0, None
    for end, group in zip(pipeline.ends, pipeline.groups, strict=True):
        there = back = 0.0
        if before is not None:
            lanes = min(len(before), len(group))
            sent, returned = (a[of_stage, start] / lanes for a in (costs.sent, costs.returned))
            pairs = list(itertools.product(before, group))
            there = min(links.latency_s[p, q] + sent / links.rate[p, q] for p, q in pairs)
            back = min(links.latency_s[q, p] + returned / links.rate[q, p] for p, q in pairs)
            nodes, next_nodes = (len(set(links.node_of[list(g)])) for g in (before, group))
            sent, returned = (a[of_stage, start] for a in (costs.sent, costs.returned))
            bound = max(bound, m * min(
                max(
                    (returned_in * links.nic_s[p, o] + sent * links.nic_s[p, q]) / nodes,
                    (sent_in * links.nic_s[p, o] + returned * links.nic_s[p, q]) / nodes,
                    sent * links.nic_s[q, p] / next_nodes,
                )
                for p, q in pairs
                for o in earlier or before
            ))  # fmt: skip
            sent_in, returned_in = sent, returned
        bound = max(bound, reached + m * max(there, back))
        reached += there + back
        own = costs.stage_s[chains.groups.index(group), start, end]
        sync = costs.sync_s[chains.groups.index(group), start, end]
        bound = max(bound, m * own + max(reached, reached / 3 + sync - 2 / 3 * own))
        reached += own
        of_stage, start, earlier, before = start, end, before, group
    return bound


def every_pipeline(groups):
    """All cuts into stages, and all ordered choices of disjoint groups."""
    for n_stages in range(1, N_SEGMENTS + 1):
        for chosen in itertools.permutations(groups, n_stages):
            if len(set().union(*chosen)) == sum(map(len, chosen)):
                for cuts in itertools.combinations(range(1, N_SEGMENTS), n_stages - 1):
                    yield Pipeline(0.0, (*cuts, N_SEGMENTS), chosen)


@pytest.mark.parametrize("seed", range(6))
def test_the_program_finds_the_pipeline_with_the_least_bound(seed):
    chains = chains_of_classes(((0,), (1,), (2,)), 3)
    costs, links = random_case(seed, chains, 3)
    best = partial(
        best_pipelines, chains, costs, links, n_microbatches=N_MICROBATCHES, n_each=2,
        is_over=lambda: False,
    )  # fmt: skip
    found = best(limit_s=math.inf)
    for pipeline in found:
        assert pipeline.bound_s == pytest.approx(bound_s(pipeline, chains, costs, links))
    least = min(bound_s(p, chains, costs, links) for p in every_pipeline(chains.groups))
    assert min(p.bound_s for p in found) == pytest.approx(least)
    limit_s = 1.1 * least
    again = best(limit_s=limit_s)
    assert min(p.bound_s for p in again) == pytest.approx(least)
    assert all(p.bound_s <= limit_s for p in again)


def walks(chains, state=0, before=()):
    """All sequences of groups that the moves allow."""
    for source, target in chains.moves.tolist():
        if source == state:
            walk = (*before, chains.groups[chains.last[target]])
            yield walk
            yield from walks(chains, target, walk)


def test_sequences_are_all_ordered_choices_of_disjoint_groups():
    classes = ((0,), (1,), (2,))
    chains = chains_of_classes(classes, 2)
    wanted = {p.groups for p in every_pipeline(chains.groups)}
    found = list(walks(chains))
    assert max(map(len, chains.groups)) == 2
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert len(chains.moves) <= n_moves(classes)


def test_of_interchangeable_devices_the_first_ones_are_used_first():
    chains = chains_of_classes(((0, 2), (1,)), 3)
    firsts = [[d for group in walk for d in group if d != 1] for walk in walks(chains)]
    assert all(first in ([], [0], [0, 2]) for first in firsts)
    assert len(set(walks(chains))) == 15


def test_along_an_order_groups_are_neighbours():
    chains = chains_along((2, 0, 1), 2)
    assert {(2,), (0, 2)} == {walk[0] for walk in walks(chains)}
    assert {((2,), (0, 1)), ((2,), (0,), (1,)), ((0, 2), (1,))} < set(walks(chains))


def test_many_operators_become_runs_of_about_equal_time():
    placed, seconds = list(range(10, 110)), np.array([20.0, *[1.0] * 99])
    runs = merge_operators(placed, seconds)
    assert list(itertools.chain(*runs)) == placed
    assert len(runs) == MOST_SEGMENTS
    ends = np.cumsum([len(run) for run in runs])
    # Behind the long operator, runs of one operator catch up with an equal share for each.
    reached = seconds.cumsum()[ends - 1]
    assert reached[9:] == pytest.approx(119 * np.arange(10, 41) / MOST_SEGMENTS, abs=1.0)
