"""Host lines of other programs, and the equivalent line of an Open MPI hostfile."""

from __future__ import annotations

import re
from difflib import get_close_matches

from harness.inputs import find_int, shorten

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_SLOTS = ("slots", "cpu", "count")
_OTHERS = ("gpus", "gpu", "ngpus", "np", "nproc", "procs", "processes", "ppn", "cpus", "ranks", "n")
_NO_COMMENTS = (";", "--", "%", "/*")
_SSH_PORT = 22
_FIRST_FREE_PORT = 1024


def _slots(options: str, default: str = "slots=1") -> str:
    """The slots option for the suggested line."""
    match = re.search(r"(?:slots|cpu|count) *= *([0-9]{1,5})(?![^ ])", options, re.ASCII)
    return f"slots={int(match[1])}" if match and int(match[1]) else default


def explain_name(name: str, options: str) -> str:
    """Explain why mpirun refuses the first word of a line, and give the line to write."""
    if (text := _ipv6(name, "")) is not None:
        return text
    for explain in (_marked, _colon, _user, _bracket, _list, _dot, _underscore, _quoted):
        if (text := explain(name, _slots(options))) is not None:
            return f"{shorten(name)} is not a host name or address; {text}"
    if (text := _swapped(name, options)) is not None:
        return f"{shorten(name)} is not a host name or address; {text}"
    return (
        f"{shorten(name)} is not a host name or address of letters, digits, `-` and `.`: write one "
        "host a line, like `ecetesla0 slots=1`"
    )


def _ipv6(name: str, _: str) -> str | None:
    if name.count(":") < 2:
        return None
    return (
        f"{shorten(name)[1:-1]} is an IPv6 address, of which mpirun takes the last part for slots: "
        "give it a name in /etc/hosts or ~/.ssh/config, and write that name, like `node1 slots=1`"
    )


def _colon(name: str, slots: str) -> str | None:
    """`node1:4` of MPICH and Intel MPI; a large number, as in `node1:2222`, is a port."""
    match = re.fullmatch(rf"(?:[^@:]*@)?({_NAME}):(.*)", name, re.ASCII)
    if match is None:
        return None
    number = find_int(match[2])
    if number is not None and (number == _SSH_PORT or number >= _FIRST_FREE_PORT):
        return (
            f"it has a port, which mpirun does not take: write `{match[1]} {slots}`, and "
            f"`Port {number}` below `Host {match[1]}` in ~/.ssh/config"
        )
    count = f"slots={number}" if number else slots
    return f"it is MPICH's form: write `{match[1]} {count}`"


def _user(name: str, slots: str) -> str | None:
    match = re.fullmatch(rf"({_NAME})@({_NAME})", name, re.ASCII)
    if match is None:
        return None
    return (
        f"it has a user's name: write `{match[2]} {slots}`, and `User {match[1]}` below "
        f"`Host {match[2]}` in ~/.ssh/config"
    )


def _bracket(name: str, slots: str) -> str | None:
    """Slurm's `gpu[01-04,7]`."""
    match = re.fullmatch(r"([A-Za-z0-9._-]*)\[([0-9]{1,9})[0-9,-]*\]([A-Za-z0-9._-]*)(,.*)?", name)
    if match is None:
        return None
    return (
        f"it is Slurm's list of hosts: write a line for each, the first "
        f"`{match[1]}{match[2]}{match[3]} {slots}`; `scontrol show hostnames` lists them"
    )


def _list(name: str, slots: str) -> str | None:
    names = [part for part in re.split("[,;]", name) if part]
    if not names or len(names) == len(name) or re.search("[,;]", name) is None:
        return None
    if not all(re.fullmatch(_NAME, part, re.ASCII) for part in names):
        return None
    lines = ", ".join(f"`{part} {slots}`" for part in names[:3])
    return f"it is not one host: write one a line, {lines}"


def _dot(name: str, slots: str) -> str | None:
    bare = name.rstrip(".")
    if bare == name or not re.fullmatch(_NAME, bare, re.ASCII):
        return None
    return f"it ends with a dot: write `{bare} {slots}`"


def _underscore(name: str, slots: str) -> str | None:
    if "_" not in name or not re.fullmatch(_NAME, name, re.ASCII):
        return None
    other = name.replace("_", "-").strip("-")
    return (
        f"it has an underscore, which mpirun refuses in names: write `{other} {slots}`, and "
        f"`HostName {name}` below `Host {other}` in ~/.ssh/config"
    )


def _marked(name: str, _: str) -> str | None:
    if name.startswith(_NO_COMMENTS):
        return "it looks like a comment: write comments as `# ...`"
    if name.startswith(("+", "^")):
        return "it does not name one host: write the name of a host, like `node1 slots=1`"
    return None


def _quoted(name: str, slots: str) -> str | None:
    bare = name.strip("'\"")
    if bare == name or not re.fullmatch(_NAME, bare, re.ASCII):
        return None
    return f"it has quotes: write `{bare} {slots}`"


def _swapped(name: str, options: str) -> str | None:
    """`slots=2 node1`, and `rank0=node1` of a rankfile."""
    key, sign, value = name.partition("=")
    other = options.strip()
    if sign and key in _SLOTS and re.fullmatch(_NAME, other, re.ASCII):
        return f"the host's name comes first: write `{other} {_slots(name)}`"
    if sign and key.startswith("rank") and re.fullmatch(_NAME, value, re.ASCII):
        return f"it is a line of a rankfile: write `{value} slots=1`"
    return None


def explain_option(name: str, key: str, value: str, options: str) -> str:
    """Explain why an option after a host's name is wrong, and give the line to write."""
    word = shorten(f"{key}={value}" if value else key)
    line = f"write `{name} {_slots(options)}`"
    if key in ("username", "user-name", "user_name", "user"):
        return f"{word} is for ssh: {line}, and `User {value}` below `Host {name}` in ~/.ssh/config"
    if key.startswith(_NO_COMMENTS):
        return f"{word} is no option of a host: {line[:-1]} # ...`, a comment"
    if re.fullmatch(r"[0-9.]+", name, re.ASCII) and re.fullmatch(_NAME, word[1:-1]) and not value:
        return f"{name} {word[1:-1]} is a line of /etc/hosts: write `{word[1:-1]} slots=1`"
    if _slots(options, "") == "" and (count := _meant_slots(key, value, options)):
        line = f"write `{name} slots={count}`"
    return f"unknown option {word}, expected slots=N: {line}"


def _meant_slots(key: str, value: str, options: str) -> int | None:
    """The number of an option that resembles `slots`, or means slots in another program."""
    if not value:  # `node1 4`, `node1 slots 4`
        return next((n for word in options.split() if (n := find_int(word, 1, 1000))), None)
    is_meant = key.lower() in _OTHERS or get_close_matches(key.lower(), _SLOTS, cutoff=0.6)
    return find_int(value, 1, 1000) if is_meant else None


def show_slots(name: str, value: str) -> str:
    """The line to write if slots are 0 or not a number."""
    if value.strip("0") == "" and value:
        return f"to leave {name} out, write `# {name}`"
    digits = re.match(r"\"?([0-9]+)", value, re.ASCII)
    count = find_int(digits[1], 1, 1000) if digits else None
    return f"write `{name} slots={count or 1}`" + ("" if count else ", the number of its GPUs")
