"""Parse the probe's text into Facts. Pure and lenient: malformed values become unknown."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable
from itertools import pairwise

from harness.inputs import find_int, find_number
from harness.nodes.facts import Disk, Facts, InterfaceFacts, PeerRoute, PythonFacts, Section
from harness.nodes.parse_gpu import parse_gpus

_SECTION = re.compile(r"^@harness:(\w+)$")
_RC = re.compile(r"^@rc=([0-9]{1,9})$")
# cgroup v1 expresses "no limit" as a number close to 2**63.
_NO_LIMIT_BYTES = 2**60
# The output of `mpirun --version` is short, and the regular expressions below are not linear.
_LONGEST_VERSION = 4000


class Sections(dict[str, Section]):
    """Sections by name; a missing one is empty."""

    def __missing__(self, name: str) -> Section:
        return Section()


def split_sections(text: str) -> Sections:
    """Split the probe's text at its marks; drops the text before the first mark."""
    sections = Sections()
    name, lines, returncode = "", [""][:0], None
    for line in [*text.splitlines(), "@harness:end"]:
        if mark := _SECTION.match(line):
            if name:
                sections[name] = Section(tuple(lines), returncode)
            name, lines, returncode = mark.group(1), [], None
        elif mark := _RC.match(line):
            returncode = int(mark.group(1))
        elif line.strip():
            lines.append(line.rstrip())
    return sections


def parse_facts(text: str) -> Facts:
    sections = split_sections(text)
    user, shell = [*sections["shell"].lines, "", ""][:2]
    quota_cores, memory_limit_bytes, limit_free_bytes = parse_limits(sections["cgroup"].lines)
    memory = parse_meminfo(sections["memory"].lines)
    free_bytes = [memory.get("MemAvailable", memory.get("MemFree")), limit_free_bytes]
    state, _, place = sections["python"].first.partition(" ")
    python, python_error = parse_python(sections["versions"])
    return Facts(
        hostname=sections["hostname"].first,
        user=user,
        shell=shell,
        os_name=_os_name(sections["os"].lines),
        kernel=sections["kernel"].first,
        boot_id=sections["boot_id"].first,
        cpu_model=sections["cpu_model"].first.partition(":")[2].strip(),
        n_cores=parse_cpu_list(sections["cpus_allowed"].first.partition(":")[2].strip()),
        quota_cores=quota_cores,
        load_1min=find_number(sections["load"].first.split(" ")[0]),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=min((n for n in free_bytes if n is not None), default=None),
        memory_limit_bytes=memory_limit_bytes,
        disks=parse_disks(sections["disk"].lines),
        interfaces=parse_interfaces(sections),
        routes=parse_routes(sections["routes"].lines),
        own_addresses=tuple(line.split()[0] for line in sections["own_name"].lines),
        environment=place if state == "environment" else "",
        python_home=place if state == "missing" else "",
        python=python,
        python_error=python_error,
        mpi=parse_mpi(sections["mpirun"]),
        gpu=parse_gpus(sections),
    )


def _os_name(lines: Iterable[str]) -> str:
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    return values.get("PRETTY_NAME", values.get("NAME", "")).strip("'\"")


def parse_cpu_list(text: str) -> int | None:
    """Count the cores of a list such as `0-3,8`."""
    count = 0
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if match is None:
            return None
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        count += max(0, last - first + 1)
    return count


def parse_limits(lines: Iterable[str]) -> tuple[float | None, int | None, int | None]:
    """The tightest CPU quota in cores, memory limit and memory left below a limit, in bytes, over
    all levels of the cgroup."""
    cores: list[float] = []
    limits: list[int] = []
    left: list[int] = []
    for line in lines:
        name, *values = line.split()
        if name == "cpu.max" and len(values) == 2 and values[0] not in ("max", "-1"):
            quota, period = find_number(values[0]), find_number(values[1])
            if quota and period:
                cores.append(quota / period)
        elif name == "memory" and values:
            limit, used, *freed = (find_int(value, 0, 2**64) or 0 for value in [*values, "0"])
            if 0 < limit < _NO_LIMIT_BYTES:
                limits.append(limit)
                left.append(min(limit, max(0, limit - used + sum(freed))))
    return min(cores, default=None), min(limits, default=None), min(left, default=None)


def parse_meminfo(lines: Iterable[str]) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = (re.match(r"(\w+):\s+([0-9]{1,18}) kB", line) for line in lines)
    return {match.group(1): int(match.group(2)) * 1024 for match in found if match}


def parse_disks(lines: Iterable[str]) -> tuple[Disk, ...]:
    """`df -Pk`, one line a directory; the same file system counts once."""
    disks: dict[str, Disk] = {}
    for line in lines:
        match = _DISK.match(line)
        if match:
            free, mount = match.groups()
            disks[mount] = Disk(mount=mount, free_bytes=int(free) * 1024)
    return tuple(disks.values())


def parse_interfaces(sections: Sections) -> tuple[InterfaceFacts, ...]:
    """All interfaces in /proc/net/dev, with details from `ip` and /sys."""
    links = {m[1]: m for line in sections["links"].lines if (m := _LINK.match(line))}
    networks: dict[str, list[str]] = {}
    for line in sections["addresses"].lines:
        match = re.match(r"\d+:\s+(\S+)\s+inet6?\s+(\S+)", line)
        if match and _is_network(match[2]):
            networks.setdefault(match[1], []).append(match[2])
    sys_lines = (line.split() for line in sections["net_sys"].lines)
    sys = {words[0]: words[1:] for words in sys_lines if len(words) == 4}
    names = [line.split(":")[0].strip() for line in sections["net_dev"].lines if ":" in line]
    interfaces = []
    for name in names:
        kind, speed, duplex = sys.get(name, ["virtual", "-", "-"])
        link = links.get(name)
        flags = link[2].split(",") if link else ["UP"]
        interfaces.append(
            InterfaceFacts(
                name=name,
                networks=tuple(networks.get(name, ())),
                is_up="UP" in flags and "NO-CARRIER" not in flags,
                kind=kind,
                speed_mbit_per_s=_speed(speed) if kind != "virtual" else None,
                claimed_mbit_per_s=_speed(speed),
                duplex=duplex if duplex in ("half", "full") else "",
                mtu_bytes=int(link[3]) if link else None,
            )
        )
    return tuple(interfaces)


_DISK = re.compile(r".*?\s[0-9]{1,18}\s+[0-9]{1,18}\s+([0-9]{1,18})\s+[^\s%]+%\s+(/.*)$")
_LINK = re.compile(r"^\d+:\s+([^:@\s]+)(?:@\S+)?:\s+<([^>]*)>\s+mtu\s+([0-9]{1,9})")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_interface(text)
    except ValueError:
        return False
    return True


def _speed(text: str) -> int | None:
    """Megabits per second; drivers report -1 or 2**32 - 1 if the cable is unplugged."""
    return find_int(text, 1, 2**31 - 1)


def parse_routes(lines: Iterable[str]) -> tuple[PeerRoute, ...]:
    """`ip route get`: `10.0.0.3 dev eth0 src 10.0.0.2`, or `local ...` for the host itself."""
    routes = []
    for line in lines:
        words = line.split()
        is_local = words[:1] == ["local"]
        address, *rest = words[is_local:] or [""]
        following = dict(pairwise(rest))
        if interface := following.get("dev", ""):
            routes.append(
                PeerRoute(
                    address=address,
                    interface=interface,
                    source=following.get("src", ""),
                    is_local=is_local or interface == "lo",
                )
            )
    return tuple(routes)


def parse_python(section: Section) -> tuple[PythonFacts | None, str]:
    """The output of versions.py, or the last line that names its error."""
    if not section.lines:
        return None, ""
    try:
        answer = json.loads(section.lines[-1])
        facts = PythonFacts(
            version=str(answer["python"]),
            packages={str(name): str(value) for name, value in answer["packages"].items()},
            torch_cuda=answer["torch_cuda"],
            harness_hash=answer["harness_hash"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        errors = [line for line in section.lines if "rror: " in line] or section.lines
        return None, "no answer in time" if section.returncode == 124 else errors[-1]
    return facts, ""


def parse_mpi(section: Section) -> str:
    """Implementation and version, such as `Open MPI 4.1.8`; empty if there is none."""
    text = section.text[:_LONGEST_VERSION]
    if match := re.search(r"\(Open MPI\)\s+(\S+)", text):
        return f"Open MPI {match[1]}"
    if match := re.search(r"HYDRA.*?Version:\s+(\S+)", text, re.DOTALL):
        return f"MPICH {match[1]}"
    if match := re.search(r"(Intel\(R\) MPI.*?Version\s+\S+)", text):
        return match[1]
    return section.first if section.returncode == 0 else ""
