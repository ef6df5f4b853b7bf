"""Assumptions of the simulator about the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.profile import OPTIMIZER_STEPS, Profile
from harness.domain.routes import BUCKET_BYTES
from harness.errors import PlanError

AllReduce = Literal["ring", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class SimulatorOptions:
    """Assumptions; the defaults are those of PyTorch's DistributedDataParallel and plain SGD.

    Attributes:
        overlap: gradients are synchronised during the backward pass; else after it.
        bucket_bytes: gradients of one group of devices are all-reduced in buckets of this size;
            the first bucket has `first_bucket_bytes`.
        optimizer: one of OPTIMIZER_STEPS, for people; the next two are its state and time.
        n_optimizer_states: tensors per parameter that the optimizer keeps (momentum 1, Adam 2).
        optimizer_s_per_byte: seconds per parameter byte of an optimizer step, on a device of
            speed 1 or by device: about 3 / memory bandwidth for SGD (read two, write one).
        stream_s_per_byte: seconds per byte of memory traffic, on a device of speed 1 or by device:
            the cost of accumulating gradients of microbatches, and of copying those that several
            devices hold into buckets.
        reduce_bytes_per_gradient_byte: 0.5 where FP32 gradients are summed over devices as bf16.
        sync_every: steps between two averages of a parameter of replicas (`averaging`); 1: their
            gradients are summed.
        wire_bytes_per_fp32_byte: bytes sent within a microbatch per FP32 byte of a value that
            depends on weights; below 1 under autocast, whose dtype is smaller.
        batch_norm: `local` normalises each block by its statistics, as DDP does; `global` by those
            of the whole microbatch, with two small all-reduces forward and one backward.
        activation_share: share of an output, and of its gradient, that a device sends to another
            stage: 1 / tp where each device of a tensor-parallel group sends its part, as by
            DeepSpeed. The mean where both differ.
        reserved_bytes: memory of a device that holds no tensor: the driver's context, workspaces of
            libraries, and what the allocator cannot use.
        all_reduce: `ring` passes all devices of a group in turn; `hierarchical` adds up within each
            node, then between nodes by as many rings as a node has devices, and gathers within.
        recomputes_ahead: a stage that recomputes runs forward again while it waits for its
            gradient, as the executor does; else layer by layer within backward, as Megatron-LM.
        updates_each_microbatch: a weight pass after each microbatch's backward all-reduces the
            gradients, updates the weights and copies them for later microbatches, as asynchronous
            training does (see `unflushed`).
        frozen: names of operators that are not trained: no gradients, no optimizer state, and no
            backward pass before the first trained operator (see `block_times`).
        skipped: those of them whose outputs each reader has in a cache, so that they take no time.
    """

    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    optimizer: str = "momentum"
    n_optimizer_states: int = 1
    optimizer_s_per_byte: float | tuple[float, ...] = 0.0
    stream_s_per_byte: float | tuple[float, ...] = 0.0
    reduce_bytes_per_gradient_byte: float = 1.0
    sync_every: int = 1
    wire_bytes_per_fp32_byte: float = 1.0
    batch_norm: Literal["local", "global"] = "local"
    activation_share: float = 1.0
    reserved_bytes: int = 0
    all_reduce: AllReduce = "ring"
    recomputes_ahead: bool = True
    updates_each_microbatch: bool = False
    frozen: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        rates = np.asarray(self.optimizer_s_per_byte)
        least = min(self.n_optimizer_states, self.reserved_bytes, float(rates.min()))
        if self.bucket_bytes < 1 or not least >= 0:
            raise PlanError(
                f"bucket of {self.bucket_bytes} B, {self.n_optimizer_states} optimizer states, "
                f"{self.optimizer_s_per_byte} s/B, {self.reserved_bytes} B reserved: a bucket "
                "needs a byte, the others must be >= 0"
            )
        for share in (self.wire_bytes_per_fp32_byte, self.reduce_bytes_per_gradient_byte):
            if not 0 < share <= 1:
                raise PlanError(f"a byte of fp32 travels as {share} B: that must be > 0 and <= 1")
        if not np.all(np.asarray(self.stream_s_per_byte) >= 0):
            raise PlanError(f"a byte of memory takes {self.stream_s_per_byte} s: that must be >= 0")

    @property
    def sent_bytes_per_gradient_byte(self) -> float:
        """Bytes of gradients, or of averages, that devices sum per byte of gradients."""
        return self.reduce_bytes_per_gradient_byte / self.sync_every

    @property
    def n_states(self) -> float:
        """Tensors per parameter that last a step: the optimizer's, and two of the part of which
        the step sums the changes."""
        return self.n_optimizer_states + (2 / self.sync_every if self.sync_every > 1 else 0)

    def averaging(self, sync_every: int) -> SimulatorOptions:
        """Of replicas of which a step sums the changes of one of so many parts, instead of all
        gradients, and which keep the average beside the optimizer's state."""
        return replace(
            self,
            sync_every=sync_every,
            n_optimizer_states=self.n_optimizer_states + (sync_every > 1),
        )

    def with_optimizer(
        self, name: str, profile: Profile, cluster: Cluster, *, is_averaging: bool = False
    ) -> SimulatorOptions:
        """With the state of one of OPTIMIZER_STEPS, and its speed on each device, measured or by
        the memory traffic of another one; where it is averaging, a moving average of each parameter
        is kept and updated too."""
        n_states, n_accesses, *_ = OPTIMIZER_STEPS[name]
        streams = [_stream_s_per_byte(profile, one.kind, name) for one in cluster.devices]
        rates = [profile.optimizer_s_per_byte(one.kind, name) for one in cluster.devices]
        longer = 1 + (3 / n_accesses if is_averaging else 0)  # two reads and a write
        return replace(
            self,
            optimizer=name,
            n_optimizer_states=n_states + is_averaging,
            optimizer_s_per_byte=tuple(
                longer * (n_accesses * stream if rate is None else rate)
                for rate, stream in zip(rates, streams, strict=True)
            ),
            stream_s_per_byte=tuple(streams),
        )


def _stream_s_per_byte(profile: Profile, device_kind: str, optimizer: str) -> float:
    """Seconds per byte of memory traffic, by plain SGD's step, whose accesses no fusion saves; else
    by the optimizer's own, else by that of any other; 0 where none is known."""
    rates = {
        time.optimizer: time.s_per_byte / OPTIMIZER_STEPS[time.optimizer].n_accesses
        for time in profile.optimizers
        if time.device_kind == device_kind and time.optimizer in OPTIMIZER_STEPS
    }
    known = [rates[name] for name in ("sgd", optimizer) if name in rates]
    return next(iter([*known, *rates.values()]), 0.0)
