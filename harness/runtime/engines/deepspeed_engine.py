"""Train by DeepSpeed (ZeRO stages 0 to 3) with the same model, data and optimizer.

The time between the collectives that a rank waits for is compute:

    backward ---| communication |--- backward --| communication |-- optimizer --| communication |--

ZeRO-3 starts to gather parameters ahead, so only its wait for them is not compute.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.domain.record import SpanKind
from harness.errors import ConfigError
from harness.measure.recorder import Recorder
from harness.runtime.capture.saved import tensors_within
from harness.runtime.data.batch import Batch
from harness.runtime.devices.precision import NARROW_DTYPES
from harness.runtime.engines.engine import Clip, EngineOptions, Share, fetch_batch
from harness.runtime.engines.optimizers import make_optimizer
from harness.runtime.engines.phases import Phases
from harness.runtime.engines.replicas import verify_replicas
from harness.runtime.models.task import Task
from harness.runtime.ranks.world import World

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_to_all_single",
)  # fmt: skip


class TimedBackend:
    """Wraps DeepSpeed's backend and records a span for each collective."""

    def __init__(self, backend: Any, recorder: Recorder) -> None:
        self._backend = backend
        self._recorder = recorder
        self.intervals: list[tuple[Any, Any]] = []
        self.n_collectives = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in _COLLECTIVES:
            return found

        def timed(*arguments: Any, **named: Any) -> Any:
            start = self._recorder.clock.mark()
            result = found(*arguments, **named)
            self.n_collectives += 1
            n_bytes = max((t.nbytes for t in tensors_within((arguments, named))), default=0)

            def end(waits_since: Any) -> None:
                now = self._recorder.clock.mark()
                self.intervals.append((waits_since, now))
                self._recorder.add_marks("communication", start, now, name=name, n_bytes=n_bytes)

            if named.get("async_op"):
                return _TimedWork(result, self._recorder.clock.mark, end)
            end(start)
            return result

        return timed

    def add_compute(self, kind: SpanKind, start: Any, end: Any) -> None:
        """Record spans from `start` to `end`, except for the collectives since the last call."""
        for collective_start, collective_end in self.intervals:
            self._recorder.add_marks(kind, start, collective_start)
            start = collective_end
        self._recorder.add_marks(kind, start, end)
        self.intervals.clear()


class _TimedWork:
    """Wraps the handle of a collective that its rank waits for later.

    Args:
        end: called with the time at which the wait began, when it has ended.
    """

    def __init__(self, work: Any, mark: Callable[[], Any], end: Callable[[Any], None]) -> None:
        self._work, self._mark, self._end = work, mark, end

    def wait(self) -> None:
        start = self._mark()
        self._work.wait()
        self._end(start)


def _import_deepspeed(world: World) -> Any:
    """Import DeepSpeed quietly, without its just-in-time compiler and its launcher detection."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    # DeepSpeed uses the device of this number and refuses a launcher's if it differs; changing the
    # environment is safe, because the process serves one run only.
    os.environ["LOCAL_RANK"] = str(world.device.index or 0)
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Of names that torch has changed since.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise ConfigError(f"--engine deepspeed: {error}; run setup/install.sh") from error
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # On CPUs DeepSpeed would compile a shared-memory all-reduce for a minute; gloo needs none.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(options: EngineOptions) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": options.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": options.bucket_bytes // 4,
            "allgather_bucket_size": options.bucket_bytes // 4,
        },
        # Its default, 1, would train differently from other engines.
        "gradient_clipping": options.optimizer.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if options.reduce_dtype != "fp32":
        settings["communication_data_type"] = options.reduce_dtype
    if options.dtype in NARROW_DTYPES:
        settings[options.dtype] = {"enabled": True}
    return settings


def _match_running_statistics(model: nn.Module) -> None:
    """Cast running statistics to the dtype of their layer's weight.

    DeepSpeed casts parameters only, and a batch normalisation of narrow weights refuses others.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(module.weight.dtype))


class DeepSpeedEngine:
    """ZeRO by DeepSpeed; bf16 and fp16 use DeepSpeed's mixed precision, not autocast."""

    samples = None

    def __init__(
        self, task: Task, world: World, recorder: Recorder, options: EngineOptions
    ) -> None:
        if options.dtype == "fp16" and world.device.type == "cpu":
            raise ConfigError("--engine deepspeed has no fp16 on CPUs: use --dtype bf16 or fp32")
        deepspeed = _import_deepspeed(world)
        deepspeed.init_distributed(
            dist_backend=world.backend, auto_mpi_discovery=False, verbose=False
        )
        self._task = task
        self._world, self.replica = world, tuple(range(world.size))
        self._recorder, self._phases = recorder, Phases(recorder)
        self._input_dtype = NARROW_DTYPES.get(options.dtype)
        self._is_whole = options.zero_stage < 3  # between two steps
        optimizer = make_optimizer(task.model.named_parameters(), options.optimizer, world.device)
        self._engine, *_ = deepspeed.initialize(
            model=task.model, optimizer=optimizer, config=_settings(options)
        )
        _match_running_statistics(self.model)
        self._plain_backend, self._comm = deepspeed.comm.comm.cdb, deepspeed.comm.comm
        self.clip = Clip(options.optimizer.max_grad_norm)
        self._timer = TimedBackend(self._plain_backend, recorder)
        self._comm.cdb = self._timer

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """The model with all parameters, which ZeRO-3 gathers for so long; all ranks must call
        it."""
        from deepspeed.runtime.zero import GatheredParameters

        timed, self._comm.cdb = self._comm.cdb, self._plain_backend
        try:
            with GatheredParameters(self.model.parameters(), enabled=not self._is_whole):
                yield self.model
        finally:
            self._comm.cdb = timed

    @property
    def optimizer(self) -> Any:
        return self._engine.optimizer

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self._engine.module
        return model

    @property
    def n_synchronisations(self) -> int:
        return self._timer.n_collectives

    @property
    def can_be_muted(self) -> bool:
        """False, because ZeRO cannot step without reducing gradients."""
        return False

    def step(self, fetch: Callable[[], Batch], share: Share, *, is_muted: bool = False) -> Tensor:
        self._timer.n_collectives = 0
        self._timer.intervals.clear()
        mark, begin = self._recorder.clock.mark, self._recorder.reached.begin
        batch, at_copy = fetch_batch(fetch, self._phases, self._world.device), mark()
        self._phases.end(at_copy)
        begin("forward")
        loss = self._forward(batch, share)
        at_forward = mark()
        self._timer.add_compute("forward", at_copy, at_forward)
        begin("backward")
        # DeepSpeed averages gradients over ranks, but the loss needs their sum.
        self._engine.backward(loss * self._world.size)
        at_backward = mark()
        self._timer.add_compute("backward", at_forward, at_backward)
        begin("optimizer")
        self._engine.step()
        self._timer.add_compute("optimizer", at_backward, mark())
        return loss.detach()

    def _forward(self, batch: Batch, share: Share) -> Tensor:
        inputs = [
            t.to(self._input_dtype) if self._input_dtype and t.is_floating_point() else t
            for t in batch.inputs
        ]
        return self._task.sum_loss(self._engine(*inputs), batch.targets) * share.weight

    def model_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        with self.whole_model() as model:
            state: dict[str, Tensor] = model.state_dict()
            if self._is_whole:
                return state
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def averaged_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        raise ConfigError("DeepSpeed keeps no averages by parameter: use another engine")

    def verify(self) -> str:
        with self.whole_model() as model:
            return verify_replicas(model, self._world)
