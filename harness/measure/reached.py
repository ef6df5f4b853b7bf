"""Progress of a run on one rank, which another process can read while the rank is stuck.

The run's process writes three integers, without a system call, into shared memory that the rank's
first process created.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from typing import get_args

import msgspec

from harness.domain.record import SpanKind

_N_BYTES = 24
_N_MARKS, _STEP, _PHASE = 0, 1, 2
# Value before any step; below every step number.
_NO_STEP = -(1 << 40)
# A phase must last this long to count as a standstill.
_LEAST_S = 3.0

PHASES: tuple[SpanKind, ...] = get_args(SpanKind)
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}


class Standstill(msgspec.Struct, frozen=True, kw_only=True):
    """Step and phase of a rank without progress.

    Attributes:
        step: counted from 0; below 0 while warming up; None before the first.
        phase: current phase; in a run without steps, the last finished one.
        for_s: seconds since the last progress.
        is_stopped: whether the process is stopped by a signal.
    """

    step: int | None
    phase: SpanKind
    for_s: float
    is_stopped: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether it is in a phase that waits for other ranks."""
        return self.phase == "communication" and not self.is_stopped

    @property
    def text(self) -> str:
        """Such as `no progress for 21 s, in forward of step 12`."""
        where = ""
        if self.step is not None:
            name = f"step {self.step}" if self.step >= 0 else "a warm-up step"
            where = f", in {self.phase} of {name}"
        stopped = "; its process is stopped (SIGSTOP or SIGTSTP)" if self.is_stopped else ""
        return f"no progress for {self.for_s:.0f} s{where}{stopped}"


class Reached:
    """The writer's end; private memory if `path` is empty."""

    def __init__(self, path: str = "") -> None:
        memory: bytearray | mmap.mmap = bytearray(_N_BYTES)
        if path:
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), _N_BYTES)
        self._values = memoryview(memory).cast("q")
        self._n_marks = 0
        self._values[_STEP] = _NO_STEP

    def begin_step(self, step: int) -> None:
        """Note the start of a step; warm-up steps are below 0."""
        self._values[_STEP] = step

    def begin(self, phase: SpanKind) -> None:
        self._n_marks += 1
        self._values[_PHASE] = _NUMBERS[phase]
        self._values[_N_MARKS] = self._n_marks


class ReachedReader:
    """The reader's end, which creates the memory and notes when it changes between polls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fd = os.memfd_create("reached")
        os.truncate(self._fd, _N_BYTES)
        self._memory = mmap.mmap(self._fd, _N_BYTES)
        self._seen = (0, 0, 0)
        self._since_s = clock()

    @property
    def path(self) -> str:
        """Path of the memory, for other processes of this host and user."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def poll(self) -> None:
        """Note the time if the run has progressed."""
        with memoryview(self._memory) as raw, raw.cast("q") as values:
            seen = (values[_N_MARKS], values[_STEP], values[_PHASE])
        if seen != self._seen:
            self._seen, self._since_s = seen, self._clock()

    def standstill(self, *, is_stopped: bool) -> Standstill | None:
        """Where the run is stuck; None if it has just progressed, or has noted nothing yet."""
        self.poll()
        n_marks, step, phase = self._seen
        for_s = self._clock() - self._since_s
        if not is_stopped and (n_marks == 0 or for_s < _LEAST_S):
            return None
        return Standstill(
            step=None if n_marks == 0 or step == _NO_STEP else step,
            phase=PHASES[phase],
            for_s=for_s,
            is_stopped=is_stopped,
        )

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)
