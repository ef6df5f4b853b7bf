"""Predictions at the pace that the devices have while strategies train in turn.

A prediction is made minutes before its strategy is measured, and the machine drifts meanwhile. Here
the plain step, by which `profile` brings its operators to the pace of the devices, is timed in turn
with the strategies, on all devices at once, and every strategy is predicted anew by it. What is
left of an error is the prediction's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch.distributed as dist

from harness.domain.prediction import STRATEGY_FILE
from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.devices.cuda_clock import clock_for
from harness.runtime.models import build_task
from harness.runtime.ranks.agreement import gather_bytes
from harness.runtime.ranks.broadcast import broadcast_result
from harness.runtime.ranks.world import World
from harness.workloads.planning.inputs import Inputs, read_inputs
from harness.workloads.planning.predict import predict
from harness.workloads.profile.measure import DTYPE_NAMES
from harness.workloads.profile.step import StepSampler, gather_steps
from harness.workloads.profile.store import with_whole_steps
from harness.workloads.train.config import TrainCase
from harness.workloads.train.question import question_of


class AtThePace(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 finds.

    Attributes:
        paces: as in `Prediction.paces`, of the plain steps that were taken in turn.
        predicted_s: seconds of a step by them, by name of the run.
    """

    paces: dict[str, float]
    predicted_s: dict[str, float]


class PlainStep:
    """The model's step on each device by itself; all ranks call it alike."""

    def __init__(self, case: TrainCase, world: World) -> None:
        config = question_of(case).profile_config()
        task = build_task(config.model, config.model_options())
        task.model.to(world.device)
        self._world = world
        self._recorder = Recorder(clock_for(world.device))
        self._steps = StepSampler(
            task, config.batch_size, config.dtype, world.device, self._recorder
        )
        self._steps.take()
        self._steps.restart()

    def take(self) -> None:
        """Time it once, on all devices at the same time."""
        dist.barrier()
        self._steps.take()
        self._recorder.discard()

    def predict(self, runs: Mapping[Path, TrainCase]) -> AtThePace:
        """Predict the strategies of runs that are side by side, at the median pace that was taken.

        Raises:
            HarnessError: what a run was predicted by is not there any more.
        """
        world = self._world
        kinds = [kind.decode() for kind in gather_bytes(world.device_kind.encode(), world)]
        seconds = gather_steps(self._steps.seconds, kinds, world)
        shares = gather_steps(self._steps.forward_shares, kinds, world)
        whole = next(path for path, case in runs.items() if case.n_ranks == world.size)
        question = question_of(runs[whole])

        def simulate() -> AtThePace:
            known = read_inputs(question, whole)
            dtype = DTYPE_NAMES[question.dtype]
            profile = with_whole_steps(known.profile, known.graph, dtype, seconds, shares)
            inputs = Inputs(graph=known.graph, cluster=known.cluster, profile=profile)
            predicted_s = {}
            for path, case in runs.items():
                device = world.device if case.engine == "executor" else None
                simulator = inputs.simulator(question_of(case), device)
                strategy = Strategy.load(path / STRATEGY_FILE)
                predicted_s[path.name] = predict(simulator, strategy, method="").step_s
            paces = profile.paces(inputs.graph.content_hash())
            return AtThePace(paces=paces, predicted_s=predicted_s)

        return broadcast_result(simulate, AtThePace, world)
