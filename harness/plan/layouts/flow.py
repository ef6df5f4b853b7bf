"""When each stage of a pipeline ends its step of 1F1B, on equal replicas.

A stage sends a microbatch to the stages that read its outputs when its forward ends, and gradients
to those whose outputs it has read when its backward ends. Both occupy the sender's and the
receiver's NIC, where the stages are on different nodes. A stage waits only for the stages that it
reads:

    stage 0   | dense layers |----> stage 2
    stage 1   | tables       |----> stage 2, beside stage 0

Import this module lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.plan.compiled import compiled, inlined


@inlined
def _next_end(
    stage: Any,
    n_done: Any,
    missing: Any,
    there_s: Any,
    now_s: Any,
    forward_s: Any,
    again_s: Any,
    backward_s: Any,
) -> Any:
    """The end of a stage's next pass; infinite as long as something that it waits for is on no way,
    and after its last one."""
    n, n_microbatches = there_s.shape[1], there_s.shape[2]
    k, m = n_done[0, stage], n_done[1, stage]
    if k < n_microbatches and k - m < n - stage:
        if missing[0, stage, k]:
            return np.inf
        return max(now_s[stage], there_s[0, stage, k]) + forward_s[stage]
    if m == n_microbatches or missing[1, stage, m]:
        return np.inf
    return max(now_s[stage] + again_s[stage], there_s[1, stage, m]) + backward_s[stage]


@compiled
def last_backwards(
    n_microbatches: int,
    forward_s: Any,  # by stage
    again_s: Any,  # forward again, before it waits for the gradient
    backward_s: Any,
    pairs: Any,  # (2, pairs) stages of which the second reads outputs of the first
    is_sent: Any,  # (2, pairs) whether these, and their gradients, are sent
    sent_s: Any,  # (2, pairs) that they occupy a link
    latency_s: Any,  # (pairs,) of that link
    queues: Any,  # (2, pairs, 2) numbers of the links and NICs that they occupy
    begin_s: Any,  # by stage
) -> Any:
    """(stages,) end of each one's last backward. Passes run in the order in which they end, so that
    transfers are served in theirs."""
    n = len(forward_s)
    now, ends_s = begin_s.copy(), np.full(n, np.inf)  # of each stage: last pass, and next one
    n_done = np.zeros((2, n), np.int64)
    missing = np.zeros((2, n, n_microbatches), np.int64)  # transfers that a pass waits for
    there_s = np.zeros((2, n, n_microbatches))  # arrival of the last one
    for stage in range(n):
        there_s[:, stage] = begin_s[stage]
    for pair in range(pairs.shape[1]):
        for way in range(2):
            missing[way, pairs[1 - way, pair]] += is_sent[way, pair]
    free_s = np.zeros(queues.max() + 1 if queues.size else 0)
    for one in range(n):
        ends_s[one] = _next_end(one, n_done, missing, there_s, now, forward_s, again_s, backward_s)
    for _ in range(2 * n * n_microbatches):
        s = ends_s.argmin()
        now[s] = ends_s[s]
        k = n_done[0, s]
        way = 0 if k < n_microbatches and k - n_done[1, s] < n - s else 1
        m = n_done[way, s]
        n_done[way, s] += 1
        for pair in range(pairs.shape[1]):
            if pairs[way, pair] != s or not is_sent[way, pair]:
                continue
            to, seconds = pairs[1 - way, pair], sent_s[way, pair]
            arrived_s = max(now[s], begin_s[to])
            if seconds > 0:
                out, into = queues[way, pair]
                arrived_s = max(arrived_s, free_s[out], free_s[into]) + seconds
                free_s[out] = free_s[into] = arrived_s
                arrived_s += latency_s[pair]
            missing[way, to, m] -= 1
            there_s[way, to, m] = max(there_s[way, to, m], arrived_s)
            ends_s[to] = _next_end(
                to, n_done, missing, there_s, now, forward_s, again_s, backward_s
            )
        ends_s[s] = _next_end(s, n_done, missing, there_s, now, forward_s, again_s, backward_s)
    return now
