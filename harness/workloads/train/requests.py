"""`./entry.sh control RUN --strategy FILE`: requests to a running training, as files of the run.

The controller writes `change.request.json` once, so a second one is refused while the first waits;
rank 0 removes it when it has written a line of `change.answers.jsonl`. Who may write into the
directory may control the run.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from harness.domain.files import decode
from harness.errors import ConfigError, HarnessError, ResultsError, printing
from harness.inputs import parse_flags, read_file
from harness.measure.heartbeat import HEADER_FILE
from harness.measure.store import read_header, write_atomically, writing
from harness.workloads.common.flags import check_above_zero

REQUEST_FILE = "change.request.json"
ANSWER_FILE = "change.answers.jsonl"
# Lines of it: controllers in turn may be answered before the first of them has looked.
_N_ANSWERS = 20
# The id in the answer to a request that cannot be read.
UNREADABLE = "unreadable"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A wish to train on by another strategy.

    Attributes:
        id: unique, and repeated in the answer.
        source: the file's name, for messages.
        data: the strategy file's bytes.
    """

    id: str
    source: str
    data: bytes


class ChangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a request.

    Attributes:
        error: why training goes on by the old strategy; empty if it has changed.
        text: what has changed, in one line.
    """

    id: str
    error: str = ""
    text: str = ""


def write_request(run_dir: Path, source: Path) -> Request:
    """Ask a run to go on by a strategy's file.

    Raises:
        ConfigError: the file cannot be read, or another controller's request waits for its answer.
        ResultsError: the request cannot be written.
    """
    data = read_file(source, "strategy file", ConfigError, is_given=True)
    request = Request(id=uuid.uuid4().hex, source=str(source), data=data)
    path = run_dir / REQUEST_FILE
    with writing(path), tempfile.NamedTemporaryFile(dir=run_dir, prefix=".change.") as file:
        file.write(msgspec.json.encode(request))
        file.flush()
        try:
            os.link(file.name, path)  # fails if the file exists
        except FileExistsError:
            raise ConfigError(
                f"{run_dir} has a request already, which it has not answered: wait for the other "
                f"controller, or remove {REQUEST_FILE} if that one was stopped"
            ) from None
    return request


def read_request(run_dir: Path) -> Request | None:
    """The request that waits; None if there is none.

    Raises:
        ConfigError: the file is no request.
    """
    path = run_dir / REQUEST_FILE
    if not path.exists():
        return None
    data = read_file(path, "request", ConfigError)
    return decode(data, Request, source=str(path), error=ConfigError)


def answer_request(run_dir: Path, answer: ChangeAnswer) -> None:
    """Write the answer after the last ones, then let the next request come."""
    path = run_dir / ANSWER_FILE
    last = path.read_bytes().splitlines()[1 - _N_ANSWERS :] if path.exists() else []
    write_atomically(path, b"\n".join([*last, msgspec.json.encode(answer)]))
    _withdraw(run_dir, answer.id)


def _withdraw(run_dir: Path, request_id: str) -> None:
    """Remove a request, or one that cannot be read, but not the next one."""
    waiting = None
    with suppress(HarnessError):
        waiting = read_request(run_dir)
    if waiting is None or waiting.id == request_id:
        (run_dir / REQUEST_FILE).unlink(missing_ok=True)


def read_answer(run_dir: Path, request: Request) -> ChangeAnswer | None:
    """The answer to a request; None while there is none."""
    with suppress(HarnessError):
        data = read_file(run_dir / ANSWER_FILE, "answer", ConfigError)
        for line in data.splitlines():
            answer = decode(line, ChangeAnswer, source=ANSWER_FILE, error=ConfigError)
            if answer.id == request.id:
                return answer
    return None


_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """Ask a training that was started with --controlled to go on by another strategy."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run, on the node of its rank 0."""
    strategy: Path
    """Strategy file, in any format that search and convert write."""
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
    """Refuse a run that would never answer."""
    if not (run_dir / HEADER_FILE).exists():
        raise ResultsError(
            f"{run_dir} holds no {HEADER_FILE}: name the directory of a run that trains, such as "
            "results/RUN"
        )
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
    _withdraw(options.run, request.id)
    raise ConfigError(
        f"{options.run} gave no answer within {options.timeout_s:g} s, or ended before: look at "
        "its log"
    )


@printing()
def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse_flags(ControlOptions, argv, "entry.sh control")
    check_above_zero(options, ("timeout_s",))
    print(control(options))
    return 0
