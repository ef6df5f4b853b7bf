"""What ranks of a test run; importable by name, for spawned processes."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.profile import Profile, WholeStep
from harness.domain.record import Record, Sample
from harness.errors import HarnessError, StrategyError
from harness.measure.derive.spans import samples_of, spans_of
from harness.measure.rank_records import read_records
from harness.measure.store import read_header, write_header
from harness.plan.again import FoundAgain, SearchAgain, search_again
from harness.runtime.devices.random_sources import RandomSources
from harness.runtime.engines.torch_engine import TorchEngine
from harness.runtime.executor import engine
from harness.runtime.executor.state.files import load_sharded
from harness.runtime.ranks.world import Context
from harness.workloads.common.contract import config_json
from harness.workloads.planning.config import SearchConfig
from harness.workloads.planning.inputs import capture_graph
from harness.workloads.search.workload import run_search
from harness.workloads.train import replanning
from harness.workloads.train.config import TrainCase, parse_change
from harness.workloads.train.next_plan import BesideSearch
from harness.workloads.train.plan import plan_training, search_config_of
from harness.workloads.train.replanning import MeanComputeTime
from harness.workloads.train.requests import read_answer, write_request
from harness.workloads.train.setup import prepare
from harness.workloads.train.workload import TrainLoop, run_train


def tiny_mlp(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """A factory as a user would write it."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(n_channels * image_size**2, 16), nn.Tanh(), nn.Linear(16, n_classes)
    )


def tiny_norm(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """The same with batch normalisation."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(n_channels * image_size**2, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, n_classes),
    )


def tiny_random(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """The same, and dropout before."""
    return nn.Sequential(nn.Dropout(0.2), tiny_norm(n_classes, n_channels, image_size))


class Counting(nn.Module):
    """Something that has no shape before it is computed."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nonzero(x).isfinite().all()


def tiny_uncapturable(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """The same, but no plan can be made of it."""
    return nn.Sequential(tiny_mlp(n_classes, n_channels, image_size), Counting())


class Clamping(nn.Linear):
    """Changes labels by numpy, which no call of torch shows."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        logits, loss = super().forward(x), None
        if labels is not None:
            known = labels.clone()
            known.numpy().clip(max=1, out=known.numpy())
            loss = F.cross_entropy(logits, known)
        return {"loss": loss, "logits": logits}


def tiny_clamping() -> tuple[nn.Module, dict[str, Tensor]]:
    return Clamping(4, 6), {"x": torch.rand(3, 4), "labels": torch.tensor([1, 2, 5])}


def search_whose_best_is_refused(search_config: SearchConfig, context: Context) -> Any:
    """A search on a backend that cannot carry out the first plan that is tried."""

    class Refusing(engine.ExecutorEngine):
        n_made = 0

        def __init__(self, *arguments: Any) -> None:
            Refusing.n_made += 1
            if Refusing.n_made == 1:
                raise StrategyError("too many process groups")
            super().__init__(*arguments)

    engine.ExecutorEngine = Refusing  # type: ignore[misc]
    return run_search(search_config, context)


def trained_parameters(case: TrainCase, context: Context) -> dict[str, Tensor]:
    """Train for the case's steps; the parameters, as they stand before the steps without sync."""
    training = prepare(case, context.world, context.recorder)
    loop = TrainLoop(training, context, case.warm_up)
    loop.measure(case.steps)
    losses = loop.record_losses()
    state = {n: p.detach().clone() for n, p in training.engine.model.named_parameters()}
    return {**state, "losses": torch.tensor(losses)}


def trained_parameters_of(cases: dict[str, TrainCase], context: Context) -> dict[str, Any]:
    """Several trainings one after another: starting ranks costs more than they do."""
    return {name: trained_parameters(case, context) for name, case in cases.items()}


def model_states(cases: dict[str, TrainCase], context: Context) -> dict[str, dict[str, Tensor]]:
    """The model's state after each of several trainings, as the engine gives it back."""
    found = {}
    for name, case in cases.items():
        training = prepare(case, context.world, context.recorder)
        TrainLoop(training, context, case.warm_up).measure(case.steps)
        found[name] = training.engine.model_state()
    return found


def train_on_two_hosts(case: TrainCase, context: Context) -> dict[str, Any]:
    """As `run_train`, where the ranks are on two hosts, half of them on each."""
    n, rank = context.world.size, context.world.rank
    hostnames = ["left"] * (n // 2) + ["right"] * (n - n // 2)
    world = replace(context.world, hostname=hostnames[rank], hostnames=hostnames)
    return run_train(case, replace(context, world=world))


def refused_trainings(case: TrainCase, context: Context) -> tuple[str, str]:
    """What a training raised with one sample more on the last rank, and one whose last rank changes
    a parameter before the check."""
    is_last = context.world.rank == context.world.size - 1
    step = TorchEngine.step

    def changing(self: TorchEngine, *arguments: Any, **named: Any) -> Tensor:
        loss = step(self, *arguments, **named)
        if is_last:
            with torch.no_grad():
                next(self.model.parameters()).reshape(-1)[3] += 1e-7
        return loss

    other_data = error_of(replace(case, n_samples=case.n_samples + is_last), context)
    TorchEngine.step = changing  # type: ignore[method-assign]
    return other_data, error_of(case, context)


def error_of(case: TrainCase, context: Context) -> str:
    """What a training raised."""
    try:
        run_train(case, context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def planned_training(case: TrainCase, context: Context) -> dict[str, Any]:
    """Plan and train; losses, parameters as one device has them, and the run's summary."""
    if case.load_state is not None:
        case = replace(case, load_state=context.run_dir / case.load_state)
    summary = run_train(case, context)
    records = context.recorder.collect()
    losses = [record.value for record in samples_of(records, "loss")]
    squares = [record.value for record in samples_of(records, "gradient_square_norm")]
    path = context.run_dir / "model.safetensors"
    state = load_file(path) if context.world.is_first else {}
    found = {"summary": summary, "losses": losses, "state": state, "squares": squares}
    if case.save_sharded:
        dist.barrier()  # all ranks have written
        sharded = load_sharded(context.run_dir / "state")
        found["sharded"] = {**sharded, "loss_scale": str(sharded.get("loss_scale"))}
    return found


def search_before(case: TrainCase, context: Context) -> None:
    """Search what a case needs, as a run of its own beside the run of a test."""
    search_config = search_config_of(case)
    run_dir = context.run_dir.parent / "0-search-0"
    if context.world.is_first:
        told = {"workload": "search", "config": config_json(search_config), "run_id": run_dir.name}
        write_header(run_dir, msgspec.structs.replace(read_header(context.run_dir), **told))
    run_search(search_config, replace(context, run_dir=run_dir))


def planned_trainings(cases: dict[str, TrainCase], context: Context) -> dict[str, Any]:
    """Several, one after another, by name; what one raised instead of its results."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        if case.strategy == "searched":
            search_before(case, context)
        try:
            found[name] = planned_training(replace(case, save_model=True), context)
        except HarnessError as error:
            found[name] = f"{type(error).__name__}: {error}"
        if context.world.is_first and isinstance(found[name], dict):
            for file in (PREDICTION_FILE, STRATEGY_FILE):
                path = context.run_dir / file
                found[name][file] = path.read_text() if path.exists() else ""
                path.unlink(missing_ok=True)
    return found


class KeptPlan:
    """What an earlier run of a case has planned, beside the run of a test; rank 0's only."""

    def __init__(self, case: TrainCase, context: Context) -> None:
        self._context, self._search_config = context, search_config_of(case)
        search_config = self._search_config
        header = read_header(context.run_dir)
        is_search = case.strategy == "searched"
        name, config = ("search", config_json(search_config)) if is_search else ("train", {})
        self._path = context.run_dir.parent / f"0-{name}-0"
        self._profile = search_config.profile_config().path(context.run_dir.parent)
        self._is_mine = context.world.is_first
        if self._is_mine:
            told = {"workload": name, "config": config, "run_id": self._path.name}
            write_header(self._path, msgspec.structs.replace(header, **told))

    def planned(self, case: TrainCase, shares: Sequence[int] = ()) -> dict[str, bytes]:
        """The files of a plan that is made now."""
        plan_training(case, self._context, shares)
        files = (PREDICTION_FILE, STRATEGY_FILE) if self._is_mine else ()
        return {name: (self._context.run_dir / name).read_bytes() for name in files}

    def write(self, files: dict[str, bytes], **changes: float) -> None:
        """Its strategy and its prediction, changed."""
        if self._is_mine:
            prediction = Prediction.from_json(files[PREDICTION_FILE], source="a test")
            changed = msgspec.structs.replace(prediction, **changes)
            (self._path / STRATEGY_FILE).write_bytes(files[STRATEGY_FILE])
            (self._path / PREDICTION_FILE).write_bytes(changed.to_json())

    def calibrate(self, calibrations: dict[int, float]) -> None:
        """As a profile run does later, by samples of the step."""
        if self._is_mine:
            graph_hash = capture_graph(self._search_config).content_hash()
            steps = [
                WholeStep(
                    device_kind="test device", batch=samples, dtype="float32",
                    step_s=calibration, operators_s=1.0, graph_hash=graph_hash,
                )
                for samples, calibration in calibrations.items()
            ]  # fmt: skip
            changed = msgspec.structs.replace(Profile.load(self._profile), whole_steps=steps)
            self._profile.write_bytes(changed.to_json())


def plans_at_two_calibrations(case: TrainCase, context: Context) -> list[dict[str, bytes]]:
    """Files of a plan: made, found again (with a mark in it), and once devices are slower."""
    if case.strategy == "searched":
        search_before(case, context)
    kept = KeptPlan(case, context)
    found = [kept.planned(case)]
    kept.write(found[0], step_s=123.0, search_s=45.0)
    found.append(kept.planned(case))
    kept.calibrate({12: 3.0})
    return [*found, kept.planned(case)]


def plans_at_two_speeds(case: TrainCase, context: Context) -> list[bytes]:
    """Strategies of two repeats whose ranks were found to be of other speeds."""
    kept = KeptPlan(case, context)
    found = []
    for shares in ((8, 4), (4, 8)):
        files = kept.planned(case, shares)
        kept.write(files)
        found += [files[STRATEGY_FILE]] if files else []
    return found


poll_search = BesideSearch.poll


def waited_for_answer(search: BesideSearch) -> FoundAgain | None:
    """The answer of a search, at once."""
    while (found := poll_search(search)) is None and search.is_running:
        time.sleep(0.05)
    return found


def waited_for(planning: Future[Any]) -> bool:
    """The answer is there when it is first asked for, so that a short training changes."""
    wait([planning])
    return True


def is_faster(before_s: float, after_s: float, n_steps_left: int, cost_s: float) -> bool:
    """A short training never pays for a change."""
    return after_s < before_s


class Written:
    """What this rank records."""

    def __init__(self, context: Context) -> None:
        self._context, self._n_read = context, 0

    def since_last(self) -> list[Record]:
        """The records since the last call."""
        context = self._context
        context.flush()
        path = context.run_dir / f"rank{context.world.rank}.jsonl"
        every = list(read_records(path, context.world.size)[0])
        new, self._n_read = every[self._n_read :], len(every)
        return new


def changing_trainings(cases: dict[str, TrainCase], context: Context) -> dict[str, Any]:
    """Several trainings whose files of --change lie beside the run; records of the changes too.

    The case "controlled" finds a request for the file of its first --change.
    """
    found: dict[str, Any] = {}
    written = Written(context)
    for name, case in cases.items():
        parsed = [parse_change(text) for text in case.change]
        files = [(step, context.run_dir.parent / file) for step, file in parsed]
        if case.controlled and context.world.is_first:
            request = write_request(context.run_dir, files[0][1])
        change = () if case.controlled else tuple(f"{step}:{file}" for step, file in files)
        try:
            with (
                mock.patch.object(replanning, "is_worth", is_faster),
                mock.patch.object(Future, "done", waited_for),
                mock.patch.object(BesideSearch, "poll", waited_for_answer),
            ):
                summary = run_train(replace(case, change=change), context)
        except HarnessError as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        records = written.since_last()
        found[name] = {
            "samples": [
                (r.metric, r.step, r.value, r.labels)
                for r in records
                if isinstance(r, Sample) and r.metric.startswith(("change", "cache"))
            ],
            "digest": summary["parameters_digest"],
            "losses": [r.value for r in samples_of(records, "loss")],
            "spans": [r.name for r in spans_of(records) if r.kind == "change"],
            "random": RandomSources().digests(),
        }
        if case.controlled and context.world.is_first:
            found[name]["answer"] = msgspec.to_builtins(read_answer(context.run_dir, request))
    return found


def drifting_trainings(cases: dict[str, TrainCase], context: Context) -> dict[str, Any]:
    """Trainings whose last rank computes three times slower after 35 steps in the case "slowed", by
    invented times; training waits for a search, so that it ends while there are steps."""
    end = MeanComputeTime._end
    found: dict[str, Any] = {}
    written = Written(context)
    asked: list[SearchAgain] = []
    BesideSearch.warm_up = lambda self: None  # type: ignore[method-assign]
    BesideSearch.start = lambda self, request: asked.append(request)  # type: ignore[method-assign]
    BesideSearch.poll = lambda self: search_again(asked.pop())  # type: ignore[method-assign]
    for name, case in cases.items():
        counted = iter(range(case.steps + 1))

        def invented(self: MeanComputeTime, compute_s: float, counted=counted, name=name) -> None:
            is_slow = name == "slowed" and context.world.rank == context.world.size - 1
            end(self, 0.03 if next(counted) >= 35 and is_slow else 0.01)

        MeanComputeTime._end = invented  # type: ignore[method-assign]
        run_train(case, context)
        samples = [one for one in written.since_last() if isinstance(one, Sample)]
        found[name] = [(one.metric, one.step, one.value, one.labels) for one in samples]
    return found
