"""The plan of a run: the strategy and the prediction in its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.measure.derive import read_prediction, read_strategy
from harness.measure.store import Problem


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run's files; None is one that is absent or could not be read."""

    strategy: Strategy | None
    prediction: Prediction | None

    @property
    def is_pipeline(self) -> bool:
        """Whether two or more stages were planned."""
        return self.strategy is not None and len(self.strategy.stages) > 1


def read_plan(run_dir: Path) -> tuple[Plan, list[Problem]]:
    """Read both files; one that is malformed is a problem, named with its path, and left out."""
    problems: list[Problem] = []
    strategy: Strategy | None = None
    prediction: Prediction | None = None
    try:
        strategy = read_strategy(run_dir)
    except HarnessError as error:
        problems.append((run_dir / STRATEGY_FILE, str(error)))
    try:
        prediction = read_prediction(run_dir)
    except HarnessError as error:
        problems.append((run_dir / PREDICTION_FILE, str(error)))
    return Plan(strategy=strategy, prediction=prediction), problems
