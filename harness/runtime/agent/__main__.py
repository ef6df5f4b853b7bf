"""Start a rank's program as a child and watch over it: `python -SP agent/__main__.py ARGV...`

Signals and the exit status pass through. To start the child early, this module is run without `-m`
and imports only the C parts of `signal` and `socket` before the fork.
"""

import _signal as signal  # type: ignore[import-not-found]
import ctypes
import os
import sys
from _socket import AF_UNIX, SOCK_SEQPACKET, socketpair

from harness.runtime.agent import CHANNEL_VARIABLE

# Forwarded to the rank's program; blocked until the agent's loop runs.
HELD_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _start(argv: list[str], channel_fd: int) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    agent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(1)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # The harness unblocks SIGINT when it can end in one line.
        keeps = {signal.SIGINT} if argv[1:4] == ["-P", "-m", "harness"] else set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*HELD_SIGNALS} - keeps)
        os.set_inheritable(channel_fd, True)
        os.execvpe(argv[0], argv, {**os.environ, CHANNEL_VARIABLE: str(channel_fd)})
    except OSError as error:
        sys.stderr.write(f"error: {argv[0]}: {error.strerror}\n")
    finally:
        os._exit(127)


def _main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    agent_end, program_end = socketpair(AF_UNIX, SOCK_SEQPACKET)
    pid = _start(sys.argv[1:], program_end.fileno())
    program_end.close()
    from harness.runtime.agent.agent import watch_over

    return watch_over(pid, agent_end.detach(), HELD_SIGNALS)


if __name__ == "__main__":
    sys.exit(_main())
