"""The interface of an engine, which trains a model by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from harness.domain.routes import BUCKET_BYTES
from harness.measure.recorder import Recorder
from harness.runtime.data.batch import Batch
from harness.runtime.devices.precision import sent_bytes
from harness.runtime.engines.optimizers import OptimizerOptions, OuterOptions
from harness.runtime.engines.phases import Phases
from harness.runtime.ranks.quantized_sums import start_all_reduce
from harness.runtime.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of one global batch, in samples.

    Attributes:
        n_local: the rank's samples; 0 if its batch is a dummy that must not count.
        n_global: samples of the global batch.
        counts: targets that count for the loss, of each sample of the global batch in order;
            empty: one each.
        n_replica: samples of the ranks that train one replica together; None: those of all ranks.
    """

    n_local: int
    n_global: int
    counts: tuple[int, ...] = ()
    n_replica: int | None = None

    def n_targets(self, start: int = 0, stop: int | None = None) -> int:
        """Number of targets of samples `start` to `stop` of the global batch that count."""
        stop = self.n_global if stop is None else stop
        return sum(self.counts[start:stop]) if self.counts else stop - start

    @property
    def weight(self) -> float:
        """Factor of the rank's summed loss, such that the sum over ranks is the global mean."""
        return 1.0 / max(1, self.n_targets()) if self.n_local else 0.0

    @property
    def replica_factor(self) -> float:
        """Makes the sum of the replica's gradients that of the mean over its samples."""
        return 1.0 if self.n_replica is None else self.n_global / max(1, self.n_replica)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every engine.

    Attributes:
        dtype: fp32, tf32, bf16 or fp16.
        bucket_bytes: size of a bucket of gradients.
        reduce_dtype: bf16 and int8 round fp32 gradients for their sum over ranks; fp32 does not.
        zero_stage: 0: ZeRO partitions nothing; 1: optimizer state; 2: gradients; 3: parameters.
        batch: largest number of samples of this rank in a step.
        unread: parameters without a gradient, which DistributedDataParallel leaves out.
        is_compiled: forward and backward are compiled by torch.compile.
        outer: replicas are averaged so, by the torch engine; None: gradients are summed.
    """

    dtype: str
    optimizer: OptimizerOptions
    bucket_bytes: int = BUCKET_BYTES
    reduce_dtype: str = "fp32"
    zero_stage: int = 0
    batch: int = 1
    unread: tuple[str, ...] = ()
    is_compiled: bool = False
    outer: OuterOptions | None = None


@dataclass
class Clip:
    """Scales all gradients of a step, or a replica's, down to a norm, as torch's clip_grad_norm_.

    Attributes:
        most: the largest norm; infinite: gradients stay, None: their norm is not computed either.
        norm: of the last step's gradients before they were scaled, on the device; None before the
            first, and of DeepSpeed.
    """

    most: float | None
    norm: Tensor | None = None


class Engine(Protocol):
    """Trains a model step by step; all ranks of the run call the same methods in the same order.

    The phases of a step are recorded as adjacent spans, so their durations sum to the step.
    """

    def step(self, fetch: Callable[[], Batch], share: Share, *, is_muted: bool = False) -> Tensor:
        """Run one optimizer step.

        Args:
            fetch: returns this rank's next batch, on the host.
            is_muted: skip communication, to measure its cost; the model's parameters are
                meaningless afterwards.

        Returns:
            This rank's part of the global batch's mean loss, detached, on the device; the sum
            over ranks is the mean.
        """
        ...

    def without_updates(self) -> AbstractContextManager[None]:
        """Let the steps within, which are not muted, compute gradients and `Clip.norm` alone, such
        that training goes on as if they had not run; DeepSpeed cannot."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """Of this rank's parameters."""
        ...

    @property
    def clip(self) -> Clip:
        """Of each step's gradients."""
        ...

    @property
    def samples(self) -> Sequence[int] | None:
        """Positions in the global batch that this rank is fed, in order; None if every rank gets a
        share of each batch instead."""
        ...

    @property
    def replica(self) -> Sequence[int]:
        """The ranks that train one replica with this one: all, unless replicas are averaged."""
        ...

    @property
    def n_synchronisations(self) -> int:
        """Number of sums of gradients over ranks in the last step that was not muted."""
        ...

    @property
    def can_be_muted(self) -> bool:
        """Whether `step` supports `is_muted=True`."""
        ...

    def model_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        """The whole model's state, as on one device; all ranks must call it.

        Args:
            is_for_first: the others need not have it in memory.
        """
        ...

    def averaged_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        """The same with the averages of the trained parameters."""
        ...

    def verify(self) -> str:
        """Check that replicas are equal, and return a digest of the parameters, equal for equal
        training by the same strategy; all ranks must call it.

        Raises:
            VerificationError: replicas differ.
        """
        ...


def fetch_batch(fetch: Callable[[], Batch], phases: Phases, device: torch.device) -> Batch:
    """Begin a step by its phases of data; returns the batch on the device."""
    phases.begin("data")
    batch = fetch()
    phases.note(n_bytes=batch.n_bytes)
    phases.begin("host_to_device", n_bytes=batch.n_bytes)
    return batch.to(device)


# NCCL uses PyTorch's pool of normal-priority streams, gloo that of high-priority streams.
_PRIORITY = {"nccl": -1, "gloo": 0}


class CollectiveSpans:
    """Records a span for each collective of one process group.

    On a GPU a stream of its own marks the end of a collective. It comes from the pool that the
    backend does not use, because a group on the same stream would wait for the other group's.

    Attributes:
        last_done: mark of the end of the last one that has ended.
    """

    def __init__(self, world: World, recorder: Recorder) -> None:
        self._recorder, self._is_nccl = recorder, world.backend == "nccl"
        self._stream: torch.cuda.Stream | None = None
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device, priority=_PRIORITY[world.backend])
        self.last_done: Any = None

    def start(self, begin: Callable[[], Any], name: str, n_bytes: int) -> Any:
        """Call `begin`, which starts a collective; return the work to wait for, if any."""
        start, work = self._recorder.clock.mark(), begin()
        if work is None:
            return None

        def finish(future: Any = None) -> Any:
            self._end(work, start, name, n_bytes)
            return future and future.value()

        if self._is_nccl:  # its callback would run at once, on a stream that one of its groups uses
            finish()
            return work
        return work.get_future().then(finish)

    def _end(self, work: Any, start: Any, name: str, n_bytes: int) -> None:
        """Mark the end of work that is queued (NCCL) or complete (gloo); never blocks."""
        if self._stream is None:
            end = self._recorder.clock.mark()
        else:
            with torch.cuda.stream(self._stream):
                work.synchronize()  # the stream waits, not the host
                end = self._recorder.clock.mark()
        self.last_done = end
        self._recorder.add_marks("communication", start, end, name=name, n_bytes=n_bytes)


class TimedSums(CollectiveSpans):
    """Starts all-reduces over the ranks of a group, by default all."""

    def __init__(
        self, world: World, recorder: Recorder, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(world, recorder)
        self._group = group

    def all_reduce(
        self, tensor: Tensor, name: str, reduce_dtype: str = "fp32"
    ) -> torch.futures.Future[Tensor]:
        """Begin to sum a flat tensor in place; the future holds it.

        Args:
            reduce_dtype: see `start_all_reduce`.
        """
        start, n_bytes = self._recorder.clock.mark(), sent_bytes(tensor, reduce_dtype)
        work: Any = start_all_reduce(tensor, reduce_dtype, self._group)

        def finish(_: object) -> Tensor:
            # Runs after the all-reduce: in gloo's thread, or on a stream that waits for NCCL.
            self._end(work, start, name, n_bytes)
            return tensor

        done: torch.futures.Future[Tensor] = work.get_future().then(finish)
        return done
