"""The files that training runs name: loaded, and checked before a sweep begins."""

from __future__ import annotations

from pathlib import Path

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.strategy import Strategy, check_names, check_numbers, validate
from harness.errors import StrategyError, naming
from harness.plan.formats.detect import load_strategy_file
from harness.runtime.data import DataOptions, entry_of, fit_to_data, held_out_options
from harness.runtime.models.task import ModelOptions
from harness.workloads.train.config import TrainCase, is_file, parse_change


def data_options(case: TrainCase) -> DataOptions:
    """Options that the run's data set is opened with."""
    return DataOptions(
        data_dir=case.data_dir,
        held_out_dir=case.held_out_dir,
        n_samples=case.n_samples or 0,
        seed=case.seed,
        dlrm=case.dlrm_options(),
        vocabulary=case.vocabulary,
    )


def fitted_options(case: TrainCase) -> ModelOptions:
    """A run's model options, with missing ones filled in from the data and the model.

    Raises:
        ConfigError, ModelError, DataError: data and model do not fit each other, or the data are
            missing.
    """
    return fit_to_data(case.model, case.given_options(), case.data, data_options(case))


def load_for(case: TrainCase) -> Strategy:
    """Load the strategy's file of a run and check its batch.

    Raises:
        StrategyError: the file is missing, malformed, or for another batch or more ranks.
    """
    path = Path(case.strategy)
    strategy = _load(path, case)
    if strategy.n_devices > case.n_ranks:
        raise StrategyError(
            f"{path} is for {strategy.n_devices} devices, the run has {case.n_ranks} ranks: start "
            "more (mpirun -np), or search again"
        )
    return strategy


def _load_all(case: TrainCase) -> list[tuple[Path, Strategy]]:
    """Load the strategy's file of a run and those of its changes, whose ranks may be those that
    --resume has lost."""
    found = [(Path(case.strategy), load_for(case))] if is_file(case.strategy) else []
    changes = [parse_change(text)[1] for text in case.change]
    return found + [(path, _load(path, case)) for path in changes]


def _load(path: Path, case: TrainCase) -> Strategy:
    strategy = load_strategy_file(path)
    with naming(path):
        check_numbers(strategy)
    if strategy.batch != case.batch:
        raise StrategyError(
            f"{path} is for a batch of {strategy.batch}, the run has {case.batch}: give "
            f"--batch-size {strategy.batch}, or search again"
        )
    return strategy


def check_fit(case: TrainCase, graph: Graph) -> None:
    """Refuse files of strategies that do not fit the graph of a run's model."""
    ranks = Cluster.uniform(1, case.n_ranks, kind="rank", memory_bytes=1, inside_bytes_per_s=1.0)
    for path, strategy in _load_all(case):
        with naming(path):
            check_names(strategy, graph)
            if strategy.n_devices <= case.n_ranks:
                validate(strategy, graph, ranks)


def check_files(case: TrainCase) -> None:
    """Refuse a run whose files are missing or have the wrong format."""
    _load_all(case)
    entry, options = entry_of(case.data), data_options(case)
    entry.check(options)
    if case.evaluate:
        entry.check(held_out_options(case.data, options))
    if case.load_state is not None:
        from harness.runtime.executor.state.files import check_sharded

        check_sharded(case.load_state)
