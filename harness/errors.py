"""Errors that a user can act on: what is wrong, what disagrees, what to do.

Raise one where bad input is parsed. `__main__` modules print it as a single line and
exit with `EXIT_CODE`; a traceback means a bug in the harness.
"""

from __future__ import annotations

from collections.abc import Iterable

EXIT_CODE = 2
_LONGEST = 2000


def first_line(error: BaseException) -> str:
    """What an error says, in short; its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class HarnessError(Exception):
    """Base of every error caused by input or environment rather than by a bug.

    The middle of a message that quotes too much is left out: the start says what is wrong, the end
    what to do.
    """

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST - 500]} ... {message[-450:]}"
        super().__init__(message)


class HostfileError(HarnessError):
    """A hostfile cannot be read or says something impossible."""


class ConfigError(HarnessError):
    """Flags or environment variables contradict each other or the cluster."""


class EnvironmentSetupError(HarnessError):
    """A tool, permission or library that the work needs is missing."""


class ResultsError(HarnessError):
    """A results directory or record is malformed or of another version."""


class ClusterError(HarnessError):
    """A cluster file is malformed or names devices that do not exist."""


class ModelError(HarnessError):
    """A model cannot be built, captured or fed."""


class DataError(HarnessError):
    """A data set is missing or has another layout than it should."""


class LaunchError(HarnessError):
    """Ranks cannot find each other, or the launcher's environment is incomplete."""


class VerificationError(HarnessError):
    """A computed result is wrong; the measurement must not become a number."""


class GraphError(HarnessError):
    """A graph or profile file is malformed, cyclic or empty."""


class StrategyError(HarnessError):
    """A strategy is malformed or does not fit its graph or cluster."""


class PlanError(HarnessError):
    """No plan exists for what was asked."""


class PeerError(HarnessError):
    """Another rank stopped answering in the middle of a step.

    Attributes:
        peers: the ranks of which one did.
    """

    def __init__(self, message: str, peers: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)
