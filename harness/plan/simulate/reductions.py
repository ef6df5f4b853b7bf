"""All-reduces of a strategy as arrays: partial sums, statistics of batch norms, gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.plan.simulate.network import Network
from harness.plan.simulate.transfers import Floats, Ints, Sum


@dataclass(frozen=True)
class Reductions:
    """Prices of all-reduces, concatenated, and the resources that they occupy.

    Attributes:
        host_bytes: bytes that each device of the group sends and receives.
    """

    seconds: Floats
    ptr: Ints
    resource: Ints
    occupied: Floats
    host_bytes: Floats
    group_ptr: Ints
    group: Ints


def price_reductions(
    network: Network,
    sums: Sequence[Sum],
    buckets: Iterable[tuple[tuple[int, ...], int, float]],
    mean_size: float = 1.0,
) -> Reductions:
    """Price the forward passes of all sums, their backward passes, and buckets (group, bytes,
    share of an all-reduce).

    Args:
        mean_size: size of the mean microbatch over the largest, for which sums count bytes.
    """
    wanted: list[tuple[tuple[int, ...], int, float]] = [
        (
            one.group,
            round(one.n_bytes[way] * (1.0 if one.is_norm else mean_size)),
            one.n_rounds[way],
        )
        for way in (0, 1)
        for one in sums
    ] + list(buckets)
    priced = [(network.all_reduce(g, n), n_rounds) for g, n, n_rounds in wanted]
    pairs = [
        (resource, n_rounds * seconds)
        for collective, n_rounds in priced
        for resource, seconds in collective.occupied
    ]
    return Reductions(
        seconds=np.array([one.duration_s * n_rounds for one, n_rounds in priced]),
        ptr=_ends(len(one.occupied) for one, _ in priced),
        resource=np.array([resource for resource, _ in pairs], dtype=np.int64),
        occupied=np.array([seconds for _, seconds in pairs]),
        host_bytes=np.array([_host_bytes(g, n) * n_rounds for g, n, n_rounds in wanted]),
        group_ptr=_ends(len(group) for group, _, _ in wanted),
        group=np.array([device for group, _, _ in wanted for device in group], dtype=np.int64),
    )


def _host_bytes(group: tuple[int, ...], n_bytes: int) -> float:
    """Bytes of one device: a ring sends 2 (n - 1) / n of the bytes and receives as many."""
    return 4 * (len(group) - 1) / len(group) * n_bytes


def _ends(counts: Iterable[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(list(counts))]).astype(np.int64)
