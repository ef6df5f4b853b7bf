"""All-reduce DDP's gradient buckets and record the time of each.

DDP inspects a hook's annotations as objects, so this module must not postpone them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure.recorder import Recorder
from harness.runtime.engines.completion_stream import CompletionStream
from harness.runtime.ranks.world import World


class BucketTimer:
    """DDP's communication hook: all-reduces each bucket and records a span for it."""

    def __init__(self, recorder: Recorder, world: World) -> None:
        self._recorder, self._completion = recorder, CompletionStream(world)
        self.n_buckets = 0
        self.last_ready: Any = None
        self.last_done: Any = None

    def start_step(self) -> None:
        """Reset the number of buckets."""
        self.n_buckets = 0

    def all_reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """All-reduce a bucket; DDP calls it when the bucket's gradients are computed."""
        clock = self._recorder.clock
        start = self.last_ready = clock.mark()
        self.n_buckets += 1
        buffer = bucket.buffer()
        name, n_bytes = f"bucket{bucket.index()}", buffer.numel() * buffer.element_size()
        work: Any = dist.all_reduce(buffer, async_op=True)

        def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            # Runs after the all-reduce: in gloo's thread, or on a stream that waits for NCCL.
            end = self.last_done = self._completion.mark(work, clock)
            self._recorder.add_marks("communication", start, end, name=name, n_bytes=n_bytes)
            return future.value()[0]

        done: torch.futures.Future[Tensor] = work.get_future().then(finish)
        return done
