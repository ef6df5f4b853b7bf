"""The flags of a search, shared by `search` and `train --strategy searched`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import ConfigError
from harness.units import parse_bytes
from harness.workloads.common.number_flags import check_above_zero, check_at_least

_AT_LEAST = {"search_budget": 1, "trials": 1}


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Limits of a search in time and memory."""

    search_seconds: float = 120.0
    """Time limit of the search; it then returns the best plan found."""
    search_budget: int | None = None
    """Maximum number of plans that the search simulates. Default: as many as take some seconds."""
    trials: int = 4
    """Number of best predicted plans that are trained for a few steps each, in turn, before the
    fastest measured one is chosen. 1 chooses by prediction alone."""
    memory: str | None = None
    """Memory that a plan may use on each device, such as 12GB. Default: all of it."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)

    def check_search(self) -> None:
        """Refuse limits that are too small.

        Raises:
            ConfigError: names the flag.
        """
        check_at_least(self, _AT_LEAST)
        check_above_zero(self, ("search_seconds",))
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(f"--memory {self.memory} must be above 0")
