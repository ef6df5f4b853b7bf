"""The search configuration of a training run: the flags that its plan depends on."""

from __future__ import annotations

from dataclasses import replace

from harness.errors import ConfigError
from harness.workloads.common.model_flags import fitted_flags, shared_flags
from harness.workloads.planning.search_config import PLANNED_DTYPES, PlannedDtype, SearchConfig
from harness.workloads.train.check import fitted_options
from harness.workloads.train.config import TrainCase


def search_config_of(case: TrainCase) -> SearchConfig:
    """Select the flags of a training run that its plan depends on, and no others.

    Raises:
        ConfigError: the dtype is not profiled.
        ModelError, DataError: the model does not accept the data, or the data are missing.
    """
    return replace(
        SearchConfig(**shared_flags(case, SearchConfig)),
        dtype=_planned_dtype(case.dtype),
        batch_size=case.batch,
        **fitted_flags(fitted_options(case)),
    )


def _planned_dtype(name: str) -> PlannedDtype:
    for dtype in PLANNED_DTYPES:
        if dtype == name:
            return dtype
    raise ConfigError(
        f"--dtype {name} cannot be planned: operators are profiled in {', '.join(PLANNED_DTYPES)}"
    )
