"""Where devices wait for each other, and by how much what they compute until then deviates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness.plan.simulate.fans import Floats, Ints, Sum
from harness.plan.simulate.jitter import Jitter
from harness.plan.simulate.tables import Buckets, Edges


def transfer_jitter(
    jitter: Jitter,
    computing_s: Floats,
    edges: Edges,
    returns: npt.NDArray[np.bool_],
    stages: Ints,
) -> tuple[Floats, Floats]:
    """Devices meet where a task of one waits for the other, either way; those of two stages once
    in each pass, however many values one sends the other."""
    n = len(computing_s)
    meetings = np.zeros((n, n), dtype=np.int64)
    if not jitter.is_measured:
        return np.zeros((n, n)), np.zeros(n)
    for sender, waiting, moves in (
        (edges.source, edges.target, edges.goes),
        (edges.target, edges.source, returns),
    ):
        here, there = stages[waiting // n], stages[sender // n]
        of_stages = (len(stages) + here * len(stages) + there) * n + waiting % n
        meeting = np.where(here == there, waiting, of_stages)
        once = np.unique((meeting * n + sender % n)[moves])
        np.add.at(meetings, (once % n, once // n % n), 1)
    return jitter.transfers(computing_s, meetings)


def group_jitter(
    jitter: Jitter, sums: Sequence[Sum], buckets: Buckets, computing_s: Floats, n_microbatches: int
) -> Floats:
    """In the order of prices: forward sums, backward sums, buckets."""
    n_prices = 2 * len(sums) + len(buckets.groups)
    if not jitter.is_measured:
        return np.zeros(n_prices)
    meetings = Counter(one.group for one in sums for n_rounds in one.n_rounds if n_rounds > 0)
    sum_s = {group: jitter.group(group, computing_s / n) for group, n in meetings.items()}
    step_s = n_microbatches * computing_s
    bucket_s = {
        group: jitter.group(group, step_s / n) for group, n in Counter(buckets.groups).items()
    }
    in_microbatch = [sum_s.get(one.group, 0.0) for one in sums]
    return np.array(
        [*in_microbatch, *in_microbatch, *(bucket_s[group] for group in buckets.groups)]
    )
