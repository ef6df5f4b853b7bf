"""`./entry.sh control RUN --strategy FILE`: ask a running training to go on by another strategy."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from harness.errors import ConfigError
from harness.measure.store import read_header
from harness.workloads.train.requests import (
    REQUEST_FILE,
    ChangeAnswer,
    Request,
    read_answer,
    write_request,
)

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Ask a training that was started with --controlled to go on by another strategy."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of the run, on the node of its rank 0."""
    strategy: Path
    """Strategy's file, of any format that search and convert write."""
    timeout_s: float = 600.0
    """Longest wait for the run's answer."""


def control(options: ControlOptions) -> str:
    """Send the request and wait; returns the run's answer in one line.

    Raises:
        ConfigError: there is no such run, it does not listen, or it keeps its strategy.
    """
    check_listens(options.run)
    request = write_request(options.run, options.strategy)
    answer = _wait(options, request)
    if answer.error:
        raise ConfigError(answer.error)
    return answer.text


def check_listens(run_dir: Path) -> None:
    """Refuse a run that would never answer.

    Raises:
        ResultsError: there is no run in the directory.
        ConfigError: the run has ended, or was not started with --controlled.
    """
    header = read_header(run_dir)
    if header.status != "running":
        raise ConfigError(f"{run_dir} is not running ({header.status}): name a run that trains")
    if not header.config.get("controlled"):
        raise ConfigError(
            f"{run_dir} ({header.workload}) takes no requests: start it with ./entry.sh train "
            "--controlled"
        )


def _wait(options: ControlOptions, request: Request) -> ChangeAnswer:
    deadline_s = time.monotonic() + options.timeout_s
    while time.monotonic() < deadline_s:
        answer = read_answer(options.run, request)
        if answer is not None:
            return answer
        if read_header(options.run).status != "running":
            break
        time.sleep(_POLL_S)
    with suppress(FileNotFoundError):
        (options.run / REQUEST_FILE).unlink()
    raise ConfigError(
        f"{options.run} gave no answer within {options.timeout_s:g} s, or ended before: look at "
        "its log"
    )


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = tyro.cli(ControlOptions, args=argv, prog="entry.sh control")
    print(control(options))
    return 0
