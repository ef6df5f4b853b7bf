"""The cache of activations of one run: recording, completion, and the decision whether it pays."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from harness.runtime.data.agreement import changed_columns
from harness.runtime.ranks.gather import (
    broadcast_result,
    gather_numbers,
    maximum_over_ranks,
    raise_on_all_ranks,
)
from harness.runtime.ranks.world import Context
from harness.units import format_duration
from harness.workloads.train.config import TrainCase
from harness.workloads.train.setup import Training

if TYPE_CHECKING:
    from harness.runtime.executor.cache.activations import Tap
    from harness.runtime.executor.change.elastic import ElasticExecutor
    from harness.runtime.executor.change.transfer import PairBytes
    from harness.runtime.executor.engine import ExecutorEngine

_log = logging.getLogger(__name__)

_READS_TIMED = 3


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first layer of the next engine, and the outputs that it records.

    Attributes:
        n_skipped: frozen layers that are read from the cache.
        tap: None: nothing is recorded.
    """

    n_skipped: int = 0
    tap: Tap | None = None


@dataclass(kw_only=True)
class _RecordedFreeze:
    """Values that the current engine records.

    Attributes:
        n_frozen: layers whose outputs they are.
        since: the first step that recorded.
    """

    n_frozen: int
    since: int
    tap: Tap
    is_worth: bool | None = None  # None: not decided


class TrainingCache:
    """`--cache`: keeps the outputs of frozen layers, and decides when training uses them.

    All ranks construct it, and call its methods between the same steps.

    Raises:
        ConfigError: a sample is not the same when it is read again.
    """

    def __init__(self, case: TrainCase, context: Context, training: Training) -> None:
        from harness.runtime.executor.cache.activations import Activations

        self._case, self._context = case, context
        self._data, self._n_steps_per_epoch = training.data, training.plan.n_steps_per_epoch
        self._activations = Activations(
            len(training.data), round(case.cache_memory * (1 << 20)), context.run_dir / "cache"
        )
        self.n_skipped = 0
        self._recording: _RecordedFreeze | None = None
        self._refused: set[int] = set()  # numbers of frozen layers
        raise_on_all_ranks(lambda: _check_repeats(self._data), context.world)

    def due_step(self, step: int) -> tuple[int, int] | None:
        """The layers that the cache replaces soon, and the first step without them."""
        found = self._recording
        if found is None or found.n_frozen in self._refused:
            return None
        return found.n_frozen, max(step, found.since + self._n_steps_per_epoch)

    def begin_step(self, samples: Sequence[int]) -> None:
        """Record the coming step, which is of these samples."""
        if self._recording is not None:
            self._recording.tap.begin(samples)

    def start(
        self,
        step: int,
        n_frozen: int,
        elastic: ElasticExecutor,
        still_s: Callable[[PairBytes], float],
        n_left: int,
    ) -> Start:
        """Choose the start of an engine that trains from a step on.

        Args:
            still_s: predicts how long training stands still for a change that moves so many bytes;
                called on rank 0 only.
            n_left: measured steps from then on.
        """
        from harness.runtime.executor.cache.activations import Tap

        n_skipped, recording = self.n_skipped, self._recording
        if recording is not None and recording.n_frozen <= n_frozen:
            is_complete = step >= recording.since + self._n_steps_per_epoch
            if is_complete and self._is_worth(recording, elastic, still_s, n_left):
                n_skipped = recording.n_frozen
        if n_skipped > n_frozen:  # the layers are trained again
            n_skipped = 0
        if n_frozen == n_skipped or self._is_refused(n_frozen, elastic):
            return Start(n_skipped=n_skipped)
        clock = self._context.recorder.clock
        return Start(n_skipped=n_skipped, tap=Tap(self._activations, clock))

    def build(
        self, start: Start, build: Callable[[int, Tap | None], ExecutorEngine]
    ) -> ExecutorEngine:
        """Build an engine, without the cache where its strategy does not allow it.

        Args:
            build: takes the number of skipped layers and a tap.
        """
        from harness.runtime.executor.cache.boundary import UncachedError

        for n_skipped, tap in ((start.n_skipped, start.tap), (start.n_skipped, None)):
            try:
                return build(n_skipped, tap)
            except UncachedError as error:
                if self._context.world.is_first:
                    _log.warning("--cache %s: %s", self._case.cache, error)
        return build(0, None)

    def fill(
        self, engine: ExecutorEngine, training: Training, sample: Callable[..., None]
    ) -> PairBytes:
        """Bring cached outputs to the ranks that read them next; training stands still.

        Args:
            training: by the current engine.
            sample: records a sample of the change.

        Returns:
            Bytes that travelled.
        """
        rest, world = engine.prefix.rest, self._context.world
        if rest is None:
            return {}
        survey = self._activations.survey(rest.values, world)
        missing = survey.missing()
        if missing:
            self._compute(missing, training)
            survey = self._activations.survey(rest.values, world)
            assert not survey.missing(), "every sample has been computed"
        flags = gather_numbers(float(engine.is_cache_read), world)
        readers = [rank for rank, flag in enumerate(flags) if flag]
        self._activations.exchange(survey, readers, world)
        sample("cache_computed", len(missing))
        pair_bytes = survey.n_bytes(readers)
        n_received = sum(n for (_, target), n in pair_bytes.items() if target == world.rank)
        sample("cache_received_bytes", n_received)
        return pair_bytes

    def take_over(
        self,
        engine: ExecutorEngine,
        elastic: ElasticExecutor,
        step: int,
        sample: Callable[..., None],
    ) -> None:
        """Go on with an engine from a step on; frees outputs that it does not need."""
        prefix, n_frozen = engine.prefix, engine.prefix.n_frozen
        self.n_skipped = prefix.n_skipped
        before, self._recording = self._recording, None
        if prefix.tap is not None:
            since = before.since if before is not None and before.n_frozen == n_frozen else step
            self._recording = _RecordedFreeze(n_frozen=n_frozen, since=since, tap=prefix.tap)
        kept = set(elastic.values_at(self.n_skipped)) if self.n_skipped else set()
        if self._recording is not None:
            kept |= set(elastic.values_at(n_frozen))
        self._activations.keep_only(kept)
        for place, n_bytes in zip(("memory", "disk"), self._activations.n_bytes, strict=True):
            sample("cache_bytes", n_bytes, place=place)

    def data_for(self, engine: ExecutorEngine) -> Any:
        from harness.runtime.executor.cache.activations import CachedData

        rest = engine.prefix.rest
        if rest is None:
            return self._data
        return CachedData(self._data, self._activations, rest, is_read=engine.is_cache_read)

    def _compute(self, samples: list[int], training: Training) -> None:
        """Run the forward of samples that no step has read, which records them."""
        plan, rank = training.plan, self._context.world.rank
        assert plan.positions is not None, "the executor has positions"
        assert self._recording is not None, "samples of the recorded outputs are missing"
        for at in range(0, len(samples), plan.global_batch):
            batch = samples[at : at + plan.global_batch]
            batch += [samples[0]] * (plan.global_batch - len(batch))
            self._recording.tap.samples = batch
            own = [batch[position] for position in plan.positions[rank]]
            engine: Any = training.engine
            engine.compute_forward(training.data.__getitems__(own) if own else None)

    def _is_refused(self, n_frozen: int, elastic: ElasticExecutor) -> bool:
        """Whether the outputs of these layers are not kept; the reason is told once."""
        if n_frozen not in self._refused and (reason := elastic.why_not_cached(n_frozen)):
            self._refuse(n_frozen, reason)
        return n_frozen in self._refused

    def _refuse(self, n_frozen: int, reason: str) -> None:
        self._refused.add(n_frozen)
        if self._context.world.is_first:
            _log.warning("no cache of %d frozen layers: %s", n_frozen, reason)

    def _is_worth(
        self,
        recording: _RecordedFreeze,
        elastic: ElasticExecutor,
        still_s: Callable[[PairBytes], float],
        n_left: int,
    ) -> bool:
        """Whether reading gains more than the change costs, by the times of the slowest rank."""
        if recording.n_frozen in self._refused:
            return False
        if self._case.cache == "on" or recording.is_worth is not None:
            return recording.is_worth is not False
        if not recording.tap.n_steps:  # of an engine that has trained no step yet
            return False
        world = self._context.world
        values = elastic.values_at(recording.n_frozen)
        survey = self._activations.survey(values, world)
        readers = [rank for rank in range(world.size) if survey.held[rank].any()]
        pair_bytes = survey.n_bytes(readers)
        change_s = broadcast_result(lambda: still_s(pair_bytes), float, world)
        forward_s, read_s = maximum_over_ranks(
            [recording.tap.step_s(), self._read_s(values)], world
        )
        recording.is_worth = change_s < (forward_s - read_s) * n_left
        text = (
            f"their forward takes {format_duration(forward_s)} a step, reading "
            f"{format_duration(read_s)}, the change {format_duration(change_s)} once, with "
            f"{n_left} steps left"
        )
        if not recording.is_worth:
            self._refuse(recording.n_frozen, text)
        elif world.is_first:
            _log.info("the cache pays: %s", text)
        return recording.is_worth

    def _read_s(self, values: Sequence[str]) -> float:
        """Seconds in which this rank reads its rows of a batch."""
        found: list[float] = []
        for _ in range(_READS_TIMED):
            start_s = time.perf_counter()
            for value in values:
                rows = self._activations.rows(value)
                held = [] if rows is None else rows.holds().nonzero()[0].tolist()
                self._activations.read(value, held[: self._case.batch]) if held else None
            found.append(time.perf_counter() - start_s)
        return statistics.median(found)

    def close(self) -> None:
        """Free memory and disk after the last step."""
        self._activations.keep_only(())


def _check_repeats(data: Any) -> None:
    """Refuse data whose samples change, such as by random augmentation."""
    for index in changed_columns(data, is_next_epoch=True).values():
        raise ConfigError(
            f"--cache keeps activations, but sample {index} of the data is not the same when "
            "it is read again: use --cache off, or data without random augmentation"
        )
