"""Open MPI hostfiles: one host per line, `slots=N`, comments by `#` or `//`.

The reader accepts the syntax of Open MPI 4's mpirun, with the same meaning. If mpirun would refuse
or misread a line (`node1:4`, `10.0.0.1 node1`), the error shows the line to write instead. Host
names are validated here, so that no name can contain shell or ssh syntax.
"""

from __future__ import annotations

import codecs
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from harness.domain.hostfile_remedies import explain_name, explain_option, show_slots
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
_SLOTS = {"slots", "cpu", "count"}
_MAX_SLOTS = {f"{a}{sign}{b}" for name in _SLOTS for sign in "-_"
              for a, b in ((name, "max"), ("max", name))}  # fmt: skip
_OPTIONS = _SLOTS | _MAX_SLOTS
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
        number: number of its first line.
        is_given: the file gives slots, or lists the host twice: each line counts as a slot.
    """

    name: str
    number: int
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
            n_all = self.slots + slots - 1 if self.number != _number(where) else slots
            raise HostfileError(
                f"{where}: the slots of {self.name} are said twice (first in line {self.number}), "
                f"which mpirun refuses: write one line, `{self.name} slots={n_all}`"
            )
        self.slots, self.is_given = slots, True
        if self.max_slots:
            self.max_slots = max(self.max_slots, slots)


def _number(where: str) -> int:
    return int(where.rpartition(":")[2])


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
        entry = entries[_identity(name)] = _Entry(name, _number(where))
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
    if b"\0" in data or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        file = shlex.quote(str(path))
        raise HostfileError(
            f"{path} is UTF-16 or no text, which mpirun refuses: "
            f"run `iconv -f UTF-16 -t UTF-8 {file} | tr -d '\\r' > hosts.new`, and use hosts.new"
        )
    # Comments may be in any encoding; a name with a replaced byte is refused.
    return parse_hostfile(data.decode("utf-8", errors="replace"), source=one_line(str(path)))
