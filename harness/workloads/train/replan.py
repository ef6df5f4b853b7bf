"""Searches beside a running training: rank 0 starts one in a process of its own and polls it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import IO

import msgspec

from harness.plan.again import FoundAgain, SearchAgain

_COMMAND = (sys.executable, "-P", "-m", "harness.plan.again")


class BesideSearch:
    """At most one search at a time; used on rank 0 only."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a search has been started whose answer was not taken."""
        return self._process is not None

    def start(self, request: SearchAgain) -> None:
        """Start a search; one that still runs is ended."""
        self.close()
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 (closed with its search)
        with tempfile.TemporaryFile() as asked:
            asked.write(msgspec.json.encode(request))
            asked.seek(0)
            self._process = subprocess.Popen(
                [*_COMMAND, str(os.getpid())], stdin=asked, stdout=self._answer,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip

    def poll(self) -> FoundAgain | None:
        """The answer, once; None while the search runs, and if there is none."""
        if self._process is None or self._process.poll() is None:
            return None
        assert self._answer is not None
        code = self._process.returncode
        self._answer.seek(0)
        data = self._answer.read()
        self.close()
        if code != 0:
            return FoundAgain(error=f"the search beside training ended with exit code {code}")
        return msgspec.json.decode(data, type=FoundAgain)

    def close(self) -> None:
        """End a search that still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._answer is not None:
            self._answer.close()
        self._process = self._answer = None
