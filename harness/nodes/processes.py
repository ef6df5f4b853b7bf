"""Child processes with a deadline, each in its own process group, which is killed with it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from harness.errors import EnvironmentSetupError

# Limit of kept output, so that a host cannot fill this machine's memory.
_MAX_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class Completed:
    """Output and exit status of a child; `returncode` is None if it was killed at its deadline."""

    returncode: int | None
    stdout: str
    stderr: str


class Child:
    """A running child with pipes; `errors` collects its standard error."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._errors = bytearray()
        self._output = bytearray()
        self._collector = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            if len(self._errors) < _MAX_BYTES:
                self._errors += chunk

    async def write(self, data: bytes) -> None:
        """Send data; a child that has ended shows only when reading."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def read_line(self) -> str:
        """The next line of output without its end; raises EOFError after the last."""
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
        except ValueError:
            raise EOFError("a line of output is too long") from None
        if not line:
            raise EOFError("the output has ended")
        return line.decode(errors="replace").rstrip("\r\n")

    async def read_rest(self) -> None:
        """Give it no more input, and read `output` until it ends, up to a limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        while chunk := await self._process.stdout.read(65536):
            if len(self._output) < _MAX_BYTES:
                self._output += chunk

    async def wait(self) -> int:
        """Its exit status, once its standard error is complete."""
        returncode = await self._process.wait()
        await asyncio.shield(self._collector)
        return returncode

    async def settle(self, timeout_s: float) -> None:
        """Wait briefly for a child that is about to end, so that `errors` is complete."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), timeout_s)

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the child runs."""
        return self._process.returncode

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    @property
    def errors(self) -> str:
        return self._errors.decode(errors="replace")

    async def kill(self, grace_s: float = 0.0) -> None:
        """Kill the process group and reap the child; with `grace_s`, send SIGTERM first."""
        if self._process.returncode is None and grace_s > 0:
            _signal_group(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        _signal_group(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._collector.cancel()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


@contextlib.asynccontextmanager
async def start(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, grace_s: float = 0.0
) -> AsyncIterator[Child]:
    """Run a command (a list: no shell reads it) and end its process group on leaving.

    Raises:
        EnvironmentSetupError: the program is not installed.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
            start_new_session=True,  # its own group, and no terminal to ask a password on
            limit=_MAX_BYTES,
        )
    except FileNotFoundError:
        raise EnvironmentSetupError(
            f"{command[0]} is not installed: run `bash setup/install.sh`, or install it yourself"
        ) from None
    child = Child(process)
    try:
        yield child
    finally:
        await child.kill(grace_s)


async def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    grace_s: float = 0.0,
) -> Completed:
    """Run a command without input until it ends or `timeout_s` is over."""
    async with start(command, env=env, grace_s=grace_s) as child:
        returncode: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await child.read_rest()
                returncode = await child.wait()
    return Completed(returncode=returncode, stdout=child.output, stderr=child.errors)
