"""Open MPI hostfiles: one host per line, `slots=N`, comments by `#` or `//`.

The reader accepts the syntax of Open MPI 4's mpirun, with the same meaning. If mpirun would refuse
or misread a line (`node1:4`, `10.0.0.1 node1`), the error shows the line to write instead. Host
names are validated here, so that no name can contain shell or ssh syntax.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from harness.errors import HostfileError
from harness.inputs import find_int, one_line, read_file, shorten

_MOST_BYTES = 16 * 2**20
_MOST_SLOTS = 65536
_MOST_CHARACTERS = 1000
# Blanks of mpirun's lexer.
_TO_BLANK = str.maketrans(dict.fromkeys("\t\v\f", " "))
_COMMENT = re.compile(r"#|//")
_ODD_BLANK = re.compile(r"[^\S ]")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", re.ASCII)
_RANK = re.compile(
    r"rank[ \t\v\f]+[0-9]+[ \t\v\f]*=[ \t\v\f]*([^ \t\v\f]+)([ \t\v\f].*)?", re.ASCII
)
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")
_SLOTS = ("slots", "cpu", "count")
_MAX_SLOTS = {f"{a}{sign}{b}" for name in _SLOTS for sign in "-_"
              for a, b in ((name, "max"), ("max", name))}  # fmt: skip
_OPTIONS = _MAX_SLOTS.union(_SLOTS)
_KEYWORDS = _OPTIONS | {
    "rank", "slot", "username", "user-name", "user_name", "boards", "sockets", "cores",
    "sockets_per_board", "sockets-per-board", "cores_per_socket", "cores-per-socket",
}  # fmt: skip


@dataclass(frozen=True)
class Host:
    """A name or address, and its number of ranks.

    Attributes:
        slots: None if the file gives none; Open MPI then uses the host's number of cores.
    """

    name: str
    slots: int | None = None


@dataclass
class _Entry:
    """The lines of one host so far, with their slots added up as mpirun does.

    Attributes:
        where: its first line.
        is_given: the file gives slots, or lists the host twice: each line counts as a slot.
    """

    name: str
    where: str
    slots: int = 1
    is_given: bool = False
    max_slots: int = 0

    def update(self, options: list[tuple[str, str]], where: str) -> None:
        """Apply the options of one line, in order."""
        has_max = False
        for key, value in options:
            most = find_int(value, 1, _MOST_SLOTS)
            if most is None:
                raise HostfileError(
                    f"{where}: {key} is {shorten(value)}, it must be a whole number above 0, up to "
                    f"{_MOST_SLOTS}: {show_slots(self.name, value)}"
                )
            if key in _SLOTS:
                self._set_slots(most, where)
            elif most < self.slots:
                raise HostfileError(
                    f"{where}: {key}={most} is below the {self.slots} slots of {self.name}, which "
                    f"mpirun refuses: write `{self.name} slots={self.slots}`"
                )
            else:
                self.max_slots, has_max = most, True
        if has_max and not self.is_given:
            self.slots, self.is_given = self.max_slots, True

    def _set_slots(self, slots: int, where: str) -> None:
        if self.is_given:
            # This line has already counted as a slot unless it is the first.
            n_all = self.slots + slots - 1 if self.where != where else slots
            number = self.where.rpartition(":")[2]
            raise HostfileError(
                f"{where}: the slots of {self.name} are said twice (first in line {number}), which "
                f"mpirun refuses: write one line, `{self.name} slots={n_all}`"
            )
        self.slots, self.is_given = slots, True
        if self.max_slots:
            self.max_slots = max(self.max_slots, slots)


def _check_name(name: str, options: str, where: str) -> None:
    """Refuse words that are not host names, or that mpirun does not read as host names."""
    is_name = len(name) <= 255 and _HOST.fullmatch(name) and name not in _KEYWORDS
    labels = name.split(".")
    is_number = len(labels) > 1 and all(label.isascii() and label.isdigit() for label in labels)
    is_address = is_number and len(labels) == 4 and all(len(x) < 4 and int(x) < 256 for x in labels)
    if not is_name or "" in labels or is_number != is_address:
        raise HostfileError(f"{where}: {explain_name(name, options)}")


def _identity(name: str) -> str:
    """The key by which mpirun compares hosts: the name up to its first dot."""
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def _options(name: str, text: str, where: str) -> list[tuple[str, str]]:
    """The pairs after a name; refuses a word without `=`, because mpirun silently ignores it."""
    options = []
    for word in re.sub(" *= *", "=", text).split():
        key, sign, value = word.partition("=")
        if not sign or key not in _OPTIONS:
            raise HostfileError(f"{where}: {explain_option(name, key, value, text)}")
        options.append((key, value))
    return options


def _read_line(line: str, where: str, entries: dict[str, _Entry]) -> None:
    if len(line) > _MOST_CHARACTERS:
        raise HostfileError(
            f"{where}: the line has {len(line)} characters, {_MOST_CHARACTERS} at most: write one "
            "host a line, like `node1 slots=1`"
        )
    if odd := _ODD_BLANK.search(line):
        plain = " ".join(line.split())
        raise HostfileError(
            f"{where}: U+{ord(odd[0]):04X} is no blank to mpirun: write `{one_line(plain)}`"
        )
    rank = _RANK.fullmatch(line)
    name, _, text = line.partition(" ")
    if rank is not None:  # a line of a rankfile: mpirun counts a slot for each
        name, text = rank[1], ""
    _check_name(name, text, where)
    entry = entries.get(_identity(name))
    if entry is None:
        entry = entries[_identity(name)] = _Entry(name, where)
    elif entry.name != name:
        raise HostfileError(
            f"{where}: mpirun cuts names at the first dot, so that {entry.name} and {name} are one "
            "host to it: give them names of their own in /etc/hosts or ~/.ssh/config"
        )
    else:
        entry.slots, entry.is_given = entry.slots + 1, True
    if rank is not None:
        entry.is_given = True
    else:
        entry.update(_options(name, text, where), where)


def _check_characters(text: str, source: str) -> None:
    """Refuse invisible characters that mpirun refuses; the error says how to remove them."""
    file = shlex.quote(source)
    if text.startswith("\ufeff") or "\r" in text:
        mark = "a byte-order mark" if text.startswith("\ufeff") else "carriage returns (Windows)"
        raise HostfileError(
            f"{source} has {mark}, which mpirun refuses: "
            rf"run `sed -i 's/^\xEF\xBB\xBF//; s/\r$//; s/\r/\n/g' {file}`"
        )
    last = text.rpartition("\n")[2]
    if _COMMENT.search(last):
        raise HostfileError(
            f"{source} ends in a comment without a newline, which mpirun refuses: "
            f"run `echo >> {file}`"
        )


def parse_hostfile(text: str, *, source: str = "hostfile") -> list[Host]:
    """Read the hosts, in order; slots of a host on several lines add up as in mpirun.

    Raises:
        HostfileError: names the line, its error, and the line to write.
    """
    _check_characters(text, source)
    entries: dict[str, _Entry] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        line = _COMMENT.split(raw, maxsplit=1)[0].translate(_TO_BLANK).strip(" ")
        if line:
            _read_line(line, f"{source}:{number}", entries)
    if not entries:
        raise HostfileError(f"{source} names no host: write one a line, like `ecetesla0 slots=1`")
    return [Host(e.name, e.slots if e.is_given else None) for e in entries.values()]


def load_hostfile(path: Path) -> list[Host]:
    """Read a hostfile.

    Raises:
        HostfileError: missing or malformed.
    """
    data = read_file(path, "hostfile", HostfileError, _MOST_BYTES, is_given=True)
    if b"\0" in data:
        file = shlex.quote(str(path))
        raise HostfileError(
            f"{path} is UTF-16 or no text, which mpirun refuses: "
            f"run `iconv -f UTF-16 -t UTF-8 {file} | tr -d '\\r' > hosts.new`, and use hosts.new"
        )
    # Comments may be in any encoding; a name with a replaced byte is refused.
    return parse_hostfile(data.decode("utf-8", errors="replace"), source=one_line(str(path)))


_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
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
    if name.count(":") > 1 and "," not in name:
        return (
            f"{shorten(name)[1:-1]} is an IPv6 address, of which mpirun takes the last part for "
            "slots: give it a name in /etc/hosts or ~/.ssh/config, and write that name, like "
            "`node1 slots=1`"
        )
    explains = (_misspelt, _list, _colon, _underscore)
    texts = [*(explain(name, _slots(options)) for explain in explains), _swapped(name, options)]
    if text := next(filter(None, texts), None):
        return f"{shorten(name)} is not a host name or address; {text}"
    return (
        f"{shorten(name)} is not a host name or address of letters, digits, `-` and `.`: write one "
        "host a line, like `ecetesla0 slots=1`"
    )


def _colon(name: str, slots: str) -> str | None:
    """`node1:4` of MPICH and Intel MPI; a large number, as in `node1:2222`, is a port."""
    match = re.fullmatch(rf"(?:[^@:]*@)?({_NAME}):(.+)", name, re.ASCII)
    if match is None:
        return None
    number = find_int(match[2])
    if number is not None and (number == _SSH_PORT or number >= _FIRST_FREE_PORT):
        return (
            f"it has a port, which mpirun does not take: write `{match[1]} {slots}`, and "
            f"`Port {number}` below `Host {match[1]}` in ~/.ssh/config"
        )
    count = f"slots={number}" if number else _slots(match[2], slots)
    return f"it is MPICH's form: write `{match[1]} {count}`"


def _list(name: str, slots: str) -> str | None:
    names = [part for part in re.split("[,;]", name) if part]
    if not names or len(names) == len(name) or re.search("[,;]", name) is None:
        return None
    found = [re.fullmatch(rf"({_NAME})(?::([0-9]{{1,5}}))?", part, re.ASCII) for part in names]
    if not all(found):
        return None
    lines = ", ".join(f"`{m[1]} {f'slots={m[2]}' if m[2] else slots}`" for m in found[:3] if m)
    return f"it is not one host: write one a line, {lines}"


# Other spellings of a name, and what to write for its parts.
_SPELLINGS = (
    (r"(?:;|--|%|/\*).*", "it looks like a comment: write comments as `# ...`"),
    (r"[+^].*", "it does not name one host: write the name of a host, like `node1 slots=1`"),
    (
        rf"({_NAME})@({_NAME})",
        "it has a user's name: write `{1} {slots}`, and `User {0}` below `Host {1}` in "
        "~/.ssh/config",
    ),
    (
        r"([A-Za-z0-9._-]*)\[([0-9]{1,9})[0-9,-]*\]([A-Za-z0-9._-]*)(?:,.*)?",
        "it is Slurm's list of hosts: write a line for each, the first `{0}{1}{2} {slots}`; "
        "`scontrol show hostnames` lists them",
    ),
    (rf"({_NAME})\.+", "it ends with a dot: write `{0} {slots}`"),
    (rf"(?=.*['\"])['\"]*({_NAME})['\"]*", "it has quotes: write `{0} {slots}`"),
)


def _misspelt(name: str, slots: str) -> str | None:
    for pattern, text in _SPELLINGS:
        if match := re.fullmatch(pattern, name, re.ASCII):
            return text.format(*match.groups(), slots=slots)
    return None


def _underscore(name: str, slots: str) -> str | None:
    if "_" not in name or not re.fullmatch(_NAME, name, re.ASCII):
        return None
    other = name.replace("_", "-").strip("-")
    return (
        f"it has an underscore, which mpirun refuses in names: write `{other} {slots}`, and "
        f"`HostName {name}` below `Host {other}` in ~/.ssh/config"
    )


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
    if not value:  # `node1 4`, `node1 slots 4`, `node1 slots:4`
        words = options.replace(":", " ").split()
        return next((n for word in words if (n := find_int(word, 1, 1000))), None)
    is_meant = key.lower() in _OTHERS or get_close_matches(key.lower(), _SLOTS, cutoff=0.6)
    return find_int(value, 1, 1000) if is_meant else None


def show_slots(name: str, value: str) -> str:
    """The line to write if slots are 0 or not a number."""
    if value.strip("0") == "" and value:
        return f"to leave {name} out, write `# {name}`"
    digits = re.match(r"\"?([0-9]+)", value, re.ASCII)
    count = find_int(digits[1], 1, 1000) if digits else None
    return f"write `{name} slots={count or 1}`" + ("" if count else ", the number of its GPUs")


def numbered_runs(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Names in order, as the text before a number and the numbers that follow one another; the
    number of a name without one is empty."""
    runs: list[tuple[str, list[str]]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, number = match.groups() if match else (name, "")
        before, numbers = runs[-1] if runs else ("", [""])
        if before == prefix and number and numbers[-1] and int(number) == int(numbers[-1]) + 1:
            numbers.append(number)
        else:
            runs.append((prefix, [number]))
    return runs
