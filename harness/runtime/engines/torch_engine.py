"""Train by plain PyTorch: on one device, or data parallel by DistributedDataParallel or by
replicas that are averaged every few steps (`local_sgd`).

    data | host_to_device | forward | backward .......| communication | backward | optimizer
                                       bucket0 |----|   exposed part    finish
                                            bucket1 |-----------------|

Gradients are summed over ranks and the loss is divided by the global batch, so that uneven shares
give the same gradient as one device.

DDP inspects a hook's annotations as objects, so this module must not postpone them.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from harness.domain.routes import BUCKET_BYTES
from harness.domain.shard_state import averaged_replicas
from harness.measure.recorder import Recorder
from harness.runtime.capture.meta_copy import fake, fake_copy, forgotten_stand_ins
from harness.runtime.data.batch import Batch
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.devices.compiling import compiled_by_torch
from harness.runtime.devices.precision import Precision, reduced
from harness.runtime.engines.engine import Clip, EngineOptions, Share, TimedSums, fetch_batch
from harness.runtime.engines.local_sgd import ReplicaAverage
from harness.runtime.engines.optimizers import average_of, make_optimizer
from harness.runtime.engines.phases import Phases
from harness.runtime.engines.replicas import verify_replicas
from harness.runtime.engines.standstill import without_updates
from harness.runtime.models.task import Task
from harness.runtime.ranks.world import World
from harness.runtime.tracing.patches import without_values

_N_SAMPLES = 2  # by which parameters without a gradient are found


def unread_parameters(task: Task) -> tuple[str, ...]:
    """Names of the trained parameters that the loss of a batch has no gradient of, for which
    DistributedDataParallel would wait.

    Forward and backward run on tensors without data. Empty for a model that reads their values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = next(task.model.parameters()).device
    batch = draw_batch(task, _N_SAMPLES, 0, device)
    with forgotten_stand_ins(task.model), without_values():
        try:
            model = fake_copy(task.model, mode)
            inputs = [fake(x, mode) for x in batch.inputs]
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            with mode:
                loss = task.sum_loss(model(*inputs), fake(batch.targets, mode))
                found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        except Exception:  # of any operator that asks for a value
            return ()
    pairs = zip(trained, found, strict=True)
    return tuple(name for name, gradient in pairs if gradient is None)


def without_buffer_sync() -> dict[str, Any]:
    """DDP's argument that disables the broadcast of buffers, under its name in this torch version.

    DDP would broadcast running statistics before every forward, although training does not use
    them and the final model has rank 0's in either case.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


class BucketTimer:
    """DDP's communication hook: all-reduces each bucket and records a span for it."""

    def __init__(self, recorder: Recorder, sums: TimedSums, reduce_dtype: str) -> None:
        self._clock, self._sums = recorder.clock, sums
        self._reduce_dtype = reduce_dtype
        self.n_buckets = 0
        self.last_ready: Any = None

    def all_reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """All-reduce a bucket; DDP calls it when the bucket's gradients are computed."""
        buffer = bucket.buffer()
        sent = reduced(buffer, self._reduce_dtype)
        self.last_ready = self._clock.mark()
        self.n_buckets += 1
        done = self._sums.all_reduce(sent, f"bucket{bucket.index()}", self._reduce_dtype)
        return done if sent is buffer else done.then(lambda future: buffer.copy_(future.value()))


def _distribute(
    model: nn.Module,
    device: torch.device,
    options: EngineOptions,
    timer: BucketTimer,
    group: dist.ProcessGroup | None,
) -> DistributedDataParallel:
    bucket_bytes = options.bucket_bytes
    leave_out: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    leave_out(model, options.unread)
    ddp = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        # DDP makes its first bucket small only with its default size.
        bucket_cap_mb=None if bucket_bytes == BUCKET_BYTES else bucket_bytes / (1 << 20),
        gradient_as_bucket_view=True,
        process_group=group,
        **without_buffer_sync(),
    )
    ddp.register_comm_hook(None, timer.all_reduce)
    return ddp


class TorchEngine:
    """The whole model on each rank; a single rank does not communicate.

    Gradients are summed over all ranks, or, of replicas that are averaged, over those of a host.

    Attributes:
        replica: see `Engine`.
    """

    samples = None

    def __init__(
        self, task: Task, world: World, recorder: Recorder, options: EngineOptions
    ) -> None:
        self._task, self._world = task, world
        self._phases = Phases(recorder)
        self._precision = Precision(options.dtype, world.device)
        self._timer: BucketTimer | None = None
        self._average: ReplicaAverage | None = None
        self._forward_model: Callable[..., Any] = task.model
        self._sum_loss: Callable[..., Any] = task.sum_loss
        group, self.replica = None, tuple(range(world.size))
        if world.size > 1 and options.outer is not None:
            named, sums = dict(task.model.named_parameters()), TimedSums(world, recorder)
            self._average = ReplicaAverage(
                named, options.outer, sums.all_reduce, options.reduce_dtype
            )
            replicas = averaged_replicas(self.replica, world.hostnames)
            group, _ = dist.new_subgroups_by_enumeration(list(map(list, replicas)))
            self.replica = next(ranks for ranks in replicas if world.rank in ranks)
        self._sums = TimedSums(world, recorder, group)
        if len(self.replica) > 1:
            self._timer = BucketTimer(recorder, self._sums, options.reduce_dtype)
            self._forward_model = _distribute(task.model, world.device, options, self._timer, group)
        self._replica = self._forward_model
        if options.is_compiled:
            # Dynamo splits the graph of DistributedDataParallel at its buckets, so that they
            # overlap with backward.
            self._forward_model = compiled_by_torch(self._forward_model, world.device)
            self._sum_loss = compiled_by_torch(self._sum_loss, world.device)
        self.optimizer = make_optimizer(
            task.model.named_parameters(), options.optimizer, world.device
        )
        self.clip = Clip(options.optimizer.max_grad_norm)

    @property
    def model(self) -> nn.Module:
        return self._task.model

    @property
    def n_synchronisations(self) -> int:
        n_buckets = self._timer.n_buckets if self._timer else 0
        return n_buckets + (self._average is not None)

    @property
    def can_be_muted(self) -> bool:
        return self._world.size > 1

    def step(self, fetch: Callable[[], Batch], share: Share, *, is_muted: bool = False) -> Tensor:
        phases, timer = self._phases, self._timer
        batch = fetch_batch(fetch, phases, self._world.device)
        phases.begin("forward")
        average = None if is_muted else self._average
        if average is not None:
            average.begin(share.n_local / share.n_global)
        with self._synchronising(is_muted=is_muted):
            loss = self._forward(batch, share)
            if timer:
                timer.n_buckets = 0
            phases.begin("backward")
            self._precision.scaler.scale(loss * share.replica_factor).backward()
        if timer and timer.n_buckets:
            # Between the last bucket that is ready and its sum is exposed communication.
            phases.end(timer.last_ready)
            phases.begin("backward", self._sums.last_done, name="finish")
        phases.begin("optimizer")
        self._update()
        if average is not None:
            phases.end()
            average.wait()
            phases.begin("optimizer", name="average")
            average.update()
        phases.end()
        return loss.detach()

    @contextlib.contextmanager
    def without_updates(self) -> Iterator[None]:
        scaler = self._precision.scaler
        scale = scaler.state_dict()
        with without_updates(self.optimizer, self.clip, self.model.buffers()):
            yield
        scaler.load_state_dict(scale)

    def _synchronising(self, *, is_muted: bool) -> contextlib.AbstractContextManager[Any]:
        if is_muted and isinstance(self._replica, DistributedDataParallel):
            return self._replica.no_sync()
        return contextlib.nullcontext()

    def _forward(self, batch: Batch, share: Share) -> Tensor:
        with self._precision.autocast():
            outputs = self._forward_model(*batch.inputs)
            loss: Tensor = self._sum_loss(outputs, batch.targets) * share.weight
            return loss

    def _update(self) -> None:
        scaler, clip = self._precision.scaler, self.clip
        if clip.most is not None:
            scaler.unscale_(self.optimizer)
            clip.norm = nn.utils.clip_grad_norm_(self._task.model.parameters(), clip.most)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def model_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._task.model.state_dict()
        if self._average is None:
            return state
        outer = self._average.whole()
        named = self._task.model.named_parameters(remove_duplicate=False)
        return state | {name: outer[p] for name, p in named if p in outer}

    def averaged_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        named = self._task.model.named_parameters(remove_duplicate=False)
        return self.model_state() | {n: average_of(self.optimizer, p) for n, p in named}

    def verify(self) -> str:
        model = self._task.model if self._average is None else self._average.outer
        return verify_replicas(model, self._world)
