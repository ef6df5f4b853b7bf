"""The flags of a search, which `search` and `train --strategy searched` share."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import ConfigError
from harness.units import parse_bytes
from harness.workloads.common.number_flags import check_above_zero, check_at_least

_AT_LEAST = {"search_budget": 1, "trials": 1}


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """How long to search, and within which memory."""

    search_seconds: float = 120.0
    """End the search after this long, with the best plan found."""
    search_budget: int | None = None
    """Most plans that are judged; by default as many as take some seconds."""
    trials: int = 4
    """Best plans that are trained for some steps, in turn, so that the clock chooses among them; 1
    trusts the prediction."""
    memory: str | None = None
    """Memory that a plan may use on each device, such as 12GB; by default all of it."""

    @property
    def memory_bytes(self) -> int | None:
        """Of `memory`."""
        return None if self.memory is None else parse_bytes(self.memory)

    def check_search(self) -> None:
        """Refuse numbers that make no sense.

        Raises:
            ConfigError: names the flag.
        """
        check_at_least(self, _AT_LEAST)
        check_above_zero(self, ("search_seconds",))
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(f"--memory {self.memory} must be above 0")
