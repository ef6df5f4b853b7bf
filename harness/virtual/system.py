"""Run system tools, and raise their messages as errors."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness.errors import EnvironmentSetupError

# All tools finish at once, because they only change kernel state or write a small file.
TOOL_TIMEOUT_S = 30.0
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def find(tool: str) -> str | None:
    """A tool's path, searched also in directories that a user's PATH may lack."""
    return shutil.which(tool) or shutil.which(tool, path=_SBIN)


def run(argv: Sequence[str], *, stdin: str = "") -> str:
    """Run a tool and return its output.

    Raises:
        EnvironmentSetupError: it failed, is missing, or timed out.
    """
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, check=False, timeout=TOOL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentSetupError(f"{' '.join(argv)}: {error}") from None
    if done.returncode != 0:
        message = done.stderr.strip() or done.stdout.strip() or "no message"
        raise EnvironmentSetupError(f"{' '.join(argv)} ended with {done.returncode}: {message}")
    return done.stdout


def succeeds(argv: Sequence[str]) -> bool:
    """Whether a tool runs and ends with 0."""
    try:
        run(argv)
    except EnvironmentSetupError:
        return False
    return True


def in_network(namespace: Path) -> list[str]:
    """A prefix that runs a command line in a network namespace."""
    return ["nsenter", f"--net={namespace}", "--"]


def check_tools() -> None:
    """Check that the required tools are installed.

    Raises:
        EnvironmentSetupError: names missing tools and their packages.
    """
    missing = [tool for tool in _TOOLS if find(tool) is None]
    if missing:
        packages = " ".join(sorted({_TOOLS[tool] for tool in missing}))
        raise EnvironmentSetupError(
            f"a virtual cluster needs {', '.join(missing)}: run `bash setup/install.sh` as root, "
            f"or `apt-get install {packages}`"
        )


def check_rights() -> None:
    """Check that this user may make namespaces.

    Raises:
        EnvironmentSetupError: not allowed; names an alternative.
    """
    try:
        run(["unshare", "--net", "--uts", "--mount", "--ipc", "true"])
    except EnvironmentSetupError as error:
        raise EnvironmentSetupError(
            f"no right to make network namespaces ({str(error).rsplit(': ', 1)[-1]}): run as root, "
            "or use ranks on this machine alone, `mpirun --oversubscribe -np 5 ./entry.sh`"
        ) from None
