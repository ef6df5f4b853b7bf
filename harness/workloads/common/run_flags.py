"""Flags of every workload: the results directory and limits of time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.workloads.common.flags import check_above_zero


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Flags that every workload shares."""

    results: Path = Path("results")
    """Results directory; each run gets a directory in it."""
    resume: bool = False
    """Skip runs that the results directory already holds with status ok or oom (out of memory)."""
    dry_run: bool = False
    """Print the runs in order and exit without running them."""
    run_timeout_s: float = 3600.0
    """Stop a run after this many seconds and record it with status timeout; the sweep goes on,
    except after links, which shares the ranks' first processes."""
    collective_timeout_s: float = 300.0
    """Fail a run in which a rank has waited for other ranks in a collective for this long."""
    heartbeat_timeout_s: float = 30.0
    """End the sweep on all hosts if a rank or host has sent no sign of life for this long (or for
    --run-timeout-s, if that is shorter); the run is recorded."""

    def check(self, config: Any) -> None:
        """Refuse limits that are not positive or too short for the workload.

        Args:
            config: the workload's configuration; None for the comparison.

        Raises:
            ConfigError: names the flag.
        """
        check_above_zero(self, ("run_timeout_s", "collective_timeout_s", "heartbeat_timeout_s"))
        wait_s = getattr(config, "longest_wait_s", 0.0)
        if wait_s > self.collective_timeout_s:
            raise ConfigError(
                f"--time-budget-s {wait_s:g} is longer than a rank waits for another, "
                f"--collective-timeout-s {self.collective_timeout_s:g}: lower the first or raise "
                "the second"
            )
