"""When each stage of a pipeline ends its step of 1F1B, on equal replicas.

A stage sends a microbatch to the next one when its forward ends, and a gradient to the one before
when its backward ends. Both occupy the sender's and the receiver's NIC, where the stages are on
different nodes. Import this module lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.plan.compiled import compiled


@compiled
def last_backwards(
    n_microbatches: int,
    forward_s: Any,  # by stage
    again_s: Any,  # forward again, before it waits for the gradient
    backward_s: Any,
    sent_s: Any,  # (2, stages) of the link to the stage before: its input, and its gradient
    latency_s: Any,  # (stages,) of that link
    queues: Any,  # (2, stages, 2) numbers of the links and NICs that they occupy
    begin_s: Any,  # by stage
) -> Any:
    """(stages,) end of each one's last backward. Passes run in the order in which they end, so that
    transfers are served in theirs."""
    n = len(forward_s)
    now, ends_s = begin_s.copy(), np.full(n, np.inf)  # of each stage: last pass, and next one
    n_forward, n_backward = np.zeros(n, np.int64), np.zeros(n, np.int64)
    there_s = np.full((n, n_microbatches), np.inf)  # arrivals
    back_s = np.full((n, n_microbatches), np.inf)
    there_s[0], back_s[-1] = begin_s[0], begin_s[-1]
    free_s = np.zeros(queues.max() + 1)
    ends_s[0] = begin_s[0] + forward_s[0]
    for _ in range(2 * n * n_microbatches):
        s = ends_s.argmin()
        now[s] = ends_s[s]
        is_forward = n_forward[s] < n_microbatches and n_forward[s] - n_backward[s] < n - s
        to, link, way = (s + 1, s + 1, 0) if is_forward else (s - 1, s, 1)
        m = n_forward[s] if is_forward else n_backward[s]
        if is_forward:
            n_forward[s] += 1
        else:
            n_backward[s] += 1
        if 0 <= to < n:
            seconds = sent_s[way, link]
            arrived_s = max(now[s], begin_s[to])
            if seconds > 0:
                out, into = queues[way, link]
                arrived_s = max(arrived_s, free_s[out], free_s[into]) + seconds
                free_s[out] = free_s[into] = arrived_s
                arrived_s += latency_s[link]
            (there_s if is_forward else back_s)[to, m] = arrived_s
        for one in (s, to):
            if 0 <= one < n:
                k, m = n_forward[one], n_backward[one]
                if k < n_microbatches and k - m < n - one:
                    ends_s[one] = max(now[one], there_s[one, k]) + forward_s[one]
                elif m < n_microbatches:
                    ends_s[one] = max(now[one] + again_s[one], back_s[one, m]) + backward_s[one]
                else:
                    ends_s[one] = np.inf
    return now
