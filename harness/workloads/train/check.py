"""Check the files that training runs name, before a sweep begins."""

from __future__ import annotations

from pathlib import Path

from harness.domain.strategy import Strategy
from harness.errors import StrategyError
from harness.plan.formats.detect import read_strategy_file
from harness.runtime.data import DATA, DataOptions, fit_to_data
from harness.runtime.models import ModelOptions
from harness.workloads.train.config import TrainCase, is_file, parse_change


def data_options(case: TrainCase) -> DataOptions:
    """Options that the run's data set is opened with."""
    return DataOptions(
        data_dir=case.data_dir,
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
        StrategyError: the file is missing, malformed, or for another batch.
    """
    path = Path(case.strategy)
    strategy = Strategy.load(path)
    if strategy.batch != case.batch:
        raise StrategyError(
            f"{path} is for a batch of {strategy.batch}, the run has {case.batch}: give "
            f"--batch-size {strategy.batch}, or search again"
        )
    return strategy


def check_files(case: TrainCase) -> None:
    """Refuse a run whose files are missing or have the wrong format.

    Raises:
        StrategyError, DataError, ResultsError: names the file.
    """
    if is_file(case.strategy):
        load_for(case)
    for text in case.change:
        read_strategy_file(parse_change(text)[1])
    DATA[case.data].check(data_options(case))
    if case.load_state is not None:
        from harness.runtime.executor.state.files import check_sharded

        check_sharded(case.load_state)
