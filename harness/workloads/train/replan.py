"""Searches beside a running training: rank 0 starts one in a process of its own and polls it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO

import msgspec

from harness.plan.again import FoundAgain, SearchAgain

_COMMAND = (sys.executable, "-P", "-m", "harness.plan.again")


class BesideSearch:
    """At most one search at a time, in a process that stays for the next; used on rank 0 only."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: IO[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a search has been started whose answer was not taken."""
        return self._asked is not None

    def warm_up(self) -> None:
        """Start the process, because its imports take seconds of a busy core."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [*_COMMAND, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip

    def start(self, request: SearchAgain) -> None:
        """Start a search; one that still runs is ended."""
        if self.is_running:
            self.close()
        self.warm_up()
        assert self._process is not None
        assert self._process.stdin is not None
        # By a file, because a full pipe would stop training until the process reads.
        self._asked = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed with its answer)
        self._asked.write(msgspec.json.encode(request))
        self._asked.flush()
        with suppress(BrokenPipeError):  # it has died, as `poll` tells
            self._process.stdin.write(f"{self._asked.name}\n".encode())
            self._process.stdin.flush()

    def poll(self) -> FoundAgain | None:
        """The answer, once; None while the search runs, and if there is none."""
        if self._asked is None or self._process is None:
            return None
        answers = self._process.stdout
        assert answers is not None
        if not select.select([answers], [], [], 0)[0]:
            return None
        line = answers.readline()
        self._asked.close()
        self._asked = None
        if line:
            return msgspec.json.decode(line, type=FoundAgain)
        code = self._process.wait()
        self.close()
        return FoundAgain(error=f"the search beside training ended with exit code {code}")

    def close(self) -> None:
        """End the process, and a search that still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._asked is not None:
            self._asked.close()
        self._process = self._asked = None
