"""Open MPI hostfiles: one host a line, `slots=N`, comments by `#`.

A hostfile is data: names are checked here, so that none can carry a shell's or ssh's syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HostfileError

# user@ is refused on purpose: Open MPI takes it, ssh options and result names do not.
_HOST = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")


@dataclass(frozen=True)
class Host:
    """One line: a name or address, and how many ranks it takes.

    Attributes:
        slots: None: not said, and Open MPI takes as many as the host has cores.
    """

    name: str
    slots: int | None = None


def _parse_line(line: str, where: str) -> Host:
    name, *options = re.sub(r"\s*=\s*", "=", line).split()
    if name.count(":") > 1:
        raise HostfileError(
            f"{where}: {name} is an IPv6 address, of which mpirun takes the last part for slots: "
            "give it a name in /etc/hosts or ~/.ssh/config, and write that"
        )
    if not _HOST.match(name):
        raise HostfileError(f"{where}: {name!r} is not a host name or address")
    slots = None
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("slots", "max_slots", "max-slots"):
            raise HostfileError(f"{where}: unknown option {option!r}, expected slots=N")
        if not value.isdigit() or int(value) < 1:
            raise HostfileError(f"{where}: {option!r} must be a whole number above 0")
        if key == "slots":
            slots = int(value)
    return Host(name, slots)


def parse_hostfile(text: str, *, source: str = "hostfile") -> list[Host]:
    """Read the hosts, in order.

    Raises:
        HostfileError: names the line and what is wrong with it.
    """
    hosts: list[Host] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        host = _parse_line(line, f"{source}:{number}")
        if any(host.name == other.name for other in hosts):
            raise HostfileError(
                f"{source}:{number}: {host.name} is listed twice: raise its slots instead"
            )
        hosts.append(host)
    if not hosts:
        raise HostfileError(f"{source} names no host: write one a line, like `ecetesla0 slots=1`")
    return hosts


def load_hostfile(path: Path) -> list[Host]:
    """Read a hostfile.

    Raises:
        HostfileError: missing or malformed.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise HostfileError(
            f"hostfile {path} cannot be read ({reason}): write one host a line, like "
            "`ecetesla0 slots=1`"
        ) from None
    return parse_hostfile(text, source=str(path))
