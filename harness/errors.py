"""Errors that a user can act on; messages name the fault, the values that disagree and a remedy.

Raise one where bad input is parsed. `__main__` modules print it as a single line and
exit with `EXIT_CODE`; a traceback means a bug in the harness.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator

EXIT_CODE = 2
_INTERRUPTED, _UNREAD = 130, 141  # as a shell reports SIGINT and SIGPIPE
_LONGEST = 2000
# A remedy for a user of `train` and for one whose own program trains by a strategy.
WITHOUT_PLAN = "train it by PyTorch alone (train --engine torch), which needs no plan"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class HarnessError(Exception):
    """Base of every error caused by input or environment rather than by a bug.

    The middle of a long message is cut out, because the fault is at the start and the remedy at
    the end.
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST - 500]} ... {message[-450:]}"
        super().__init__(message)


class HostfileError(HarnessError):
    """A hostfile cannot be read, or is invalid."""


class ConfigError(HarnessError):
    """Flags or environment variables contradict each other or the cluster."""


class EnvironmentSetupError(HarnessError):
    """A required tool, permission or library is missing."""


class ResultsError(HarnessError):
    """A results directory or record is malformed or of another version."""


class ClusterError(HarnessError):
    """A cluster file is malformed or names devices that do not exist."""


class ModelError(HarnessError):
    """A model cannot be built, captured or fed."""


class DataError(HarnessError):
    """A data set is missing or has the wrong layout."""


class LaunchError(HarnessError):
    """Ranks cannot find each other, or the launcher's environment is incomplete."""


class VerificationError(HarnessError):
    """A computed result is wrong, so that its measurement must not be reported."""


class GraphError(HarnessError):
    """A graph or profile file is malformed, cyclic or empty."""


class StrategyError(HarnessError):
    """A strategy is malformed or does not fit its graph or cluster."""


class PlanError(HarnessError):
    """No plan exists for the request."""


class PeerError(HarnessError):
    """Another rank stopped answering in the middle of a step.

    Attributes:
        peers: the ranks of which one stopped.
    """

    def __init__(self, message: str, peers: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


@contextlib.contextmanager
def naming(source: object) -> Iterator[None]:
    """Put a file before errors of its content that do not name it; those of flags stay."""
    try:
        yield
    except ConfigError:
        raise
    except HarnessError as error:
        if str(source) in str(error):
            raise
        raise type(error)(f"{source}: {error}") from None


def run_command(name: str, command: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command line's program; returns its exit code.

    A HarnessError, a package that this Python lacks, and Ctrl-C end in one line on stderr; a reader
    of its output that has gone (`| head`) ends it silently.

    Args:
        name: of the program, which begins the line.
        interrupted: of the line after Ctrl-C.
    """
    replace_unprintable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of setup/lib.sh, during the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = command()
        flush_output()
        return code
    except HarnessError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_CODE
    except ModuleNotFoundError as error:
        remedy = "run `source .venv/bin/activate`, or `bash setup/install.sh` first"
        print(f"{name}: {sys.executable} has no module {error.name}: {remedy}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return _UNREAD
    except OSError as error:  # a disk is full, or files are not permitted or too many
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_CODE


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """End in one line if the output cannot be written (a full disk), and silently where nobody
    reads it to its end (`| head`)."""
    try:
        try:
            yield
        finally:
            flush_output()
    except OSError as error:
        drop_output()
        if isinstance(error, BrokenPipeError):
            raise SystemExit(0) from None
        raise HarnessError(f"the output cannot be written: {error}") from None


def replace_unprintable() -> None:
    """Print escapes for characters that the terminal's encoding lacks, such as of file names."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Flush the output, unless the program was started without one (`>&-`)."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drop_output() -> None:
    """Drop what is left of the output, which Python would write again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
