"""All numbers derived from a run's records, for tables and figures.

Figures and rank 0's tables import only this package, so both show the same numbers. Formulas:
docs/metrics.md.
"""

from __future__ import annotations

from harness.measure.derive.devices import (
    MatmulRow,
    MemoryRow,
    SummaRow,
    low_peak_warnings,
    matmul_peaks,
    matmul_table,
    memory_table,
    summa_table,
    unpublished_peaks,
)
from harness.measure.derive.doubts import stolen_shares, stolen_warnings
from harness.measure.derive.links import (
    CollectiveRow,
    LinkMatrix,
    OverheadRow,
    best_link_bytes_per_s,
    bus_factor,
    collective_table,
    link_matrices,
    nic_limit_bytes_per_s,
    overhead_table,
)
from harness.measure.derive.pipeline import PipelineSummary, StageTimes, pipeline_summary
from harness.measure.derive.prediction import (
    PARTS,
    CellSummary,
    MemoryPeak,
    PredictedRun,
    RankedStrategy,
    cell_summary,
    mean_parts,
    predicted_run,
    predicted_stages,
    read_prediction,
    read_strategy,
)
from harness.measure.derive.ranks import RankSummary
from harness.measure.derive.scaling import EfficiencyRow, ScalingPoint, scaling_table
from harness.measure.derive.spans import PHASES, StepPhases, covered_s, rank_phases
from harness.measure.derive.strategies import StrategyRow, strategy_table
from harness.measure.derive.timeline import (
    ClockOffset,
    Timeline,
    clock_offsets,
    measured_timeline,
    predicted_timeline,
)
from harness.measure.derive.training import (
    TrainingSummary,
    epoch_times,
    outliers,
    step_times,
    training_summary,
)

__all__ = [
    "PARTS",
    "PHASES",
    "CellSummary",
    "ClockOffset",
    "CollectiveRow",
    "EfficiencyRow",
    "LinkMatrix",
    "MatmulRow",
    "MemoryPeak",
    "MemoryRow",
    "OverheadRow",
    "PipelineSummary",
    "PredictedRun",
    "RankSummary",
    "RankedStrategy",
    "ScalingPoint",
    "StageTimes",
    "StepPhases",
    "StrategyRow",
    "SummaRow",
    "Timeline",
    "TrainingSummary",
    "best_link_bytes_per_s",
    "bus_factor",
    "cell_summary",
    "clock_offsets",
    "collective_table",
    "covered_s",
    "epoch_times",
    "link_matrices",
    "low_peak_warnings",
    "matmul_peaks",
    "matmul_table",
    "mean_parts",
    "measured_timeline",
    "memory_table",
    "nic_limit_bytes_per_s",
    "outliers",
    "overhead_table",
    "pipeline_summary",
    "predicted_run",
    "predicted_stages",
    "predicted_timeline",
    "rank_phases",
    "read_prediction",
    "read_strategy",
    "scaling_table",
    "step_times",
    "stolen_shares",
    "stolen_warnings",
    "strategy_table",
    "summa_table",
    "training_summary",
    "unpublished_peaks",
]
