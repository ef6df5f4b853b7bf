"""The state of a training in files, and how it goes on when a rank, or the whole launch, was lost.

    run A  step 0 ... 16 | rank 3 dies           state/survivors-17, state/step-10, without-3.json
    run B                  step 17 ... on the other ranks, by the plan without rank 3
    run C                  step 67 ... on all ranks, with --rejoin 50       (run B: state/step-67)

The state is that of the last step which the survivors hold together, else the last one that was
saved on a schedule.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.domain.prediction import STRATEGY_FILE
from harness.domain.run import RunHeader
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, PeerError, ResultsError, StrategyError
from harness.inputs import find_int, read_file
from harness.measure.derive.settings import STRATEGY_FLAGS
from harness.measure.store import read_header
from harness.plan.formats.detect import read_strategy_file
from harness.runtime.agent import GRACE_S
from harness.runtime.ranks.failures import has_lost_peer, has_timed_out
from harness.runtime.ranks.gather import barrier
from harness.runtime.ranks.sharing import Fetch, fetch_nothing
from harness.runtime.ranks.world import Context
from harness.workloads.common.contract import Continuation, config_json
from harness.workloads.train.checks import check_case
from harness.workloads.train.config import STRATEGIES, TrainCase, is_file, parse_change

if TYPE_CHECKING:
    from harness.runtime.executor.engine import ExecutorEngine
    from harness.runtime.executor.state.survivor import Survivor
    from harness.workloads.train.saves import BackgroundSaves
    from harness.workloads.train.setup import Training

_log = logging.getLogger(__name__)


class StateKeeper:
    """Saves one rank's part of the state; steps are the measured ones, warm-up below 0. All ranks
    must make one."""

    def __init__(self, case: TrainCase, context: Context) -> None:
        self._case, self._context = case, context
        self._engine: ExecutorEngine | None = None
        self._survivor: Survivor | None = None
        self._saves: BackgroundSaves | None = None
        self._step = 0
        if case.save_every or case.until is not None:
            from harness.workloads.train.saves import BackgroundSaves

            self._saves = BackgroundSaves(context.world, context.recorder)

    def begin_step(self, step: int, training: Training) -> None:
        """Remember the state before a step, in case that another rank dies in it."""
        self._step = step
        if not self._case.survive:
            return
        engine = training.executor  # others were refused
        if self._survivor is None or engine is not self._engine:
            from harness.runtime.executor.state.survivor import Survivor

            self._engine, self._survivor = engine, Survivor(engine, self._context.world)
        self._survivor.begin_step()

    def is_due(self, step: int) -> bool:
        """Whether the state after a step is saved."""
        every, after = self._case.save_every, step + 1
        is_scheduled = bool(every) and after > 0 and after % (every or 1) == 0
        return is_scheduled or after == self._case.until

    def end_step(self, step: int, training: Training) -> None:
        """Begin to save the state after a step if it is time; all ranks must call it."""
        if self._saves is None or not self.is_due(step):
            return
        every, after = self._case.save_every, step + 1
        if self._context.world.size > 1:
            barrier()  # a rank without work would be many saves ahead, and delete those of others
        start_s = time.perf_counter()
        shard = training.executor.shard(self._context.run_dir.name)  # others were refused
        outdated = self._directory(SCHEDULED, after - N_KEPT * every) if every else None
        self._saves.start(shard, self._directory(SCHEDULED, after), outdated)
        saved_s = time.perf_counter() - start_s
        self._context.recorder.sample("save_s", saved_s, step=step)  # also after an evaluation

    def close(self) -> None:
        """Wait until the last state is written; all ranks must call it after the last step."""
        if self._saves is not None:
            self._saves.wait()

    def _directory(self, kind: str, step: int) -> Path:
        """That of the state before a measured step."""
        return self._context.run_dir / STATE_DIRECTORY / f"{kind}-{step}"

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Save this rank's state if the enclosed steps, or what follows them, end because another
        rank died."""
        try:
            yield
        except (PeerError, RuntimeError) as error:
            is_peers = isinstance(error, PeerError) or has_lost_peer(error) or has_timed_out(error)
            if self._survivor is not None and is_peers:
                self._save(self._survivor)
            raise

    def _save(self, survivor: Survivor) -> None:
        try:
            after = self._step + survivor.n_more_steps()
            if after > 0:  # else the next run begins again, with its warm-up
                survivor.save(self._directory(SURVIVORS, after), self._context.run_dir.name)
        except HarnessError as error:
            _log.warning("this rank's state is not saved: %s", error)


def grace_s(case: TrainCase) -> float:
    """Seconds in which a survivor saves its state."""
    return 30.0 if case.survive else GRACE_S


STATE_DIRECTORY = "state"
# Kinds of state; their directories end with the first measured step that they lack.
SCHEDULED, SURVIVORS = "step", "survivors"
# Saves on a schedule that are kept: ranks may be a save apart, so the last may be incomplete.
N_KEPT = 3


def plan_without(run_dir: Path, rank: int) -> Path:
    """The strategy that was searched ahead for the loss of a rank."""
    return run_dir / f"without-{rank}.json"


def find_state(run_dir: Path, fetch: Fetch) -> tuple[int, Path] | None:
    """The last whole state of a run: its first step and its directory; None if there is none.

    Args:
        fetch: copies the files of a directory from other hosts to this one.
    """
    from harness.runtime.executor.state.files import check_sharded

    found: list[tuple[int, str, Path]] = []
    fetch(run_dir / STATE_DIRECTORY)
    for path in (run_dir / STATE_DIRECTORY).glob("*-*"):
        kind, _, text = path.name.partition("-")
        step = find_int(text)
        if kind in (SCHEDULED, SURVIVORS) and step is not None:
            found.append((step, kind, path))
    problems = []
    for step, _, path in sorted(found, reverse=True):
        try:
            fetch(path)
            check_sharded(path)
            return step, path
        except ResultsError as error:
            problems.append(error)
    if problems:
        _log.warning(
            "no state of %s is whole, so its steps are trained again: %s", run_dir.name, problems[0]
        )
    return None


def find_continuation(
    case: TrainCase, run_dir: Path, lost: Sequence[int], fetch: Fetch = fetch_nothing
) -> Continuation | None:
    """How the ranks that are left go on, or all ranks where none is left; rank 0 only.

    Args:
        case: of the run that lost ranks, of a launch with --resume, or of the run that a lost rank
            joins again.
        run_dir: of the last run.
        lost: its lost ranks; empty: the whole launch was lost, or a rank joins again.
        fetch: copies the files of a directory from other hosts to this one.

    Returns:
        None if the run keeps no state, or if nobody is left to go on.
    """
    if lost and not case.survive:
        return None
    runs = list(_with_continued(run_dir))
    step, directory = next(filter(None, (find_state(path, fetch) for path, _ in runs)), (0, None))
    is_left = len(lost) < case.n_ranks
    if directory is None and not (lost and is_left):
        return None
    if not is_left and (case.rejoin is None or step <= case.first_step):
        return None
    lost = lost if is_left else ()
    changed, strategy = _last_change(case, runs, step)
    if lost:
        strategy = _without(case, runs[0][0], lost)
    return Continuation(
        run_id=runs[0][1].run_id,
        step=step,
        state="" if directory is None else str(directory),
        strategy=strategy,
        strategy_digest=digest_of(strategy),
        change=() if lost else tuple(_to_come(case, changed)),
        until=_end_of(case, step, has_lost=bool(lost)),
    )


def _end_of(case: TrainCase, step: int, *, has_lost: bool) -> int | None:
    """The step before which the next run ends for a rank to join again; None: the last one."""
    ends = [case.until] if case.until is not None else []
    if has_lost and case.rejoin is not None:
        ends.append(step + case.rejoin)
    n_steps = math.inf if case.epochs else case.steps
    return min((end for end in ends if end < n_steps), default=None)


def _with_continued(run_dir: Path) -> Iterator[tuple[Path, RunHeader]]:
    """A run and those that it continues, the last first."""
    seen: set[Path] = set()
    while run_dir not in seen:  # a damaged file may name itself
        seen.add(run_dir)
        header = read_header(run_dir)
        yield run_dir, header
        earlier = Path(str(header.config.get("continues", ""))).name
        if not earlier or not (run_dir.parent / earlier).is_dir():
            return
        run_dir = run_dir.parent / earlier


def _without(case: TrainCase, run_dir: Path, lost: Sequence[int]) -> str:
    """A strategy's file, or the name of one that any number of ranks can build; empty: as it is."""
    ahead = plan_without(run_dir, lost[0])
    if len(lost) == 1 and ahead.exists():
        return str(ahead)
    if case.strategy not in STRATEGIES["executor"] or case.strategy == "searched":
        return "ddp"
    try:
        n_left = case.n_ranks - len(lost)
        check_case(replace(case, n_ranks=n_left, shard_state=TrainCase.shard_state))
    except HarnessError:  # fewer ranks than --stages, say
        return "ddp"
    return ""


def _last_change(
    case: TrainCase, runs: Sequence[tuple[Path, RunHeader]], last: int
) -> tuple[int, str]:
    """Step and file of the last change of as many ranks' strategy, up to a step; 0 if none."""
    found = {
        find_int(path.stem.partition("-")[2]): str(path)
        for run_dir in reversed(_alike(case, runs))
        for path in run_dir.glob("strategy-*.json")
    }
    return max(((n, path) for n, path in found.items() if n and n <= last), default=(0, ""))


def _alike(case: TrainCase, runs: Iterable[tuple[Path, RunHeader]]) -> list[Path]:
    """The runs of as many ranks that were asked for the same strategy."""
    asked = config_json(case)
    return [
        run_dir
        for run_dir, header in runs
        if len(header.ranks) == case.n_ranks
        and not differing(asked, header.config) & STRATEGY_FLAGS
    ]


def first_strategy(case: TrainCase, run_dir: Path) -> Path | None:
    """File of the strategy with which a training began on as many ranks; None if this run began it.

    Args:
        run_dir: of the run that trains now.
    """
    path = _alike(case, _with_continued(run_dir))[-1] / STRATEGY_FILE
    return path if path.parent != run_dir and path.exists() else None


def _to_come(case: TrainCase, after: int) -> Iterator[str]:
    """Planned changes later than a step, but those to strategies of more ranks."""
    for text in case.change:
        step, file = parse_change(text)
        strategy = read_strategy_file(file).content
        n_ranks = strategy.n_devices if isinstance(strategy, Strategy) else 0
        if step > after and n_ranks <= case.n_ranks:
            yield text


def digest_of(strategy: str) -> str:
    """Hash a strategy's file, because runs by other contents are no repeats; empty without one."""
    if not is_file(strategy) or not Path(strategy).is_file():
        return ""
    data = read_file(Path(strategy), "strategy file", StrategyError)
    return hashlib.sha256(data).hexdigest()[:12]


def go_on(case: TrainCase, found: Continuation, n_ranks: int) -> TrainCase:
    """The case by which so many ranks go on."""
    strategy = found.strategy or case.strategy
    return replace(
        case,
        n_ranks=n_ranks,
        strategy=strategy,
        asked_strategy=case.asked_strategy or case.strategy,
        strategy_digest=found.strategy_digest or case.strategy_digest,
        change=found.change,
        until=found.until,
        load_state=Path(found.state) if found.state else case.load_state,
        first_step=found.step,
        continues=found.run_id,
        sync_every=case.sync_every if n_ranks > 1 else 1,
    )


# Flags that may differ between a run and the one that continues it, without a word.
_MAY_DIFFER = {
    "n_ranks", "strategy_digest", "asked_strategy", "continues", "first_step", "save_every",
    "save_model", "save_sharded", "evaluate", "evaluate_every", "held_out_dir", "survive",
    "rejoin", "n_workers", "change",
}  # fmt: skip


def differing(config: dict[str, Any], first: dict[str, Any]) -> frozenset[str]:
    """Names of the flags by which two configurations train unlike, on any number of ranks."""
    names = {field.name for field in fields(TrainCase)} - _MAY_DIFFER
    if config.get("continues") or first.get("continues"):
        names.discard("load_state")  # which is the state of the continued run
    if 1 in (config.get("n_ranks"), first.get("n_ranks")):
        names.discard("sync_every")  # one rank has no replicas to average
    one, other = _as_asked(config), _as_asked(first)
    return frozenset(name for name in names if one.get(name) != other.get(name))


def _as_asked(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "strategy": config.get("asked_strategy") or config.get("strategy")}
