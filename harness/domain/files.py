"""The JSON files of planning: one reader, validator and writer for all of them.

class MyFile(JsonFile, frozen=True, kw_only=True):
    FILE = FileKind("my file", SCHEMA, SCHEMA_VERSION, MyError, "make it again")
    name: str
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION
"""

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_type_hints

import msgspec

from harness.errors import HarnessError
from harness.inputs import MOST_COUNT, MOST_NUMBER, decode_text, one_line, read_file, shorten

T = TypeVar("T")
_MOST_BY_HAND = 2**20  # bytes of a file that people may have edited

# Integers in files are bounded, so that arithmetic neither overflows nor takes all memory.
Count = Annotated[int, msgspec.Meta(ge=-MOST_COUNT, le=MOST_COUNT)]
Number = Annotated[float, msgspec.Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]


@dataclass(frozen=True)
class FileKind:
    """Name, schema and error type of a kind of file.

    Attributes:
        name: such as `graph file`.
        remedy: advice for a file of another version.
    """

    name: str
    schema: str
    version: int
    error: type[HarnessError]
    remedy: str


class _Tag(msgspec.Struct, frozen=True):
    """Schema and version, read first, because other versions may have other fields."""

    schema: str | None = None
    version: int | None = None


class JsonFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that is stored in one file; subclasses have the fields `schema` and `version`.

    It and its members refuse unknown fields, because an unknown field is a typing error.
    """

    FILE: ClassVar[FileKind]

    def to_json(self) -> bytes:
        """Encode the file, indented for reading."""
        return encode(self)

    @classmethod
    def from_json(cls, data: bytes, *, source: str = "") -> Self:
        """Parse and validate.

        Raises:
            HarnessError: of the kind's type; malformed, of another version, with an unknown field,
                or inconsistent; names `source`.
        """
        kind = cls.FILE
        source = source or kind.name
        tag = decode(data, _Tag, source=source, error=kind.error)
        found = (
            kind.schema if tag.schema is None else tag.schema,
            kind.version if tag.version is None else tag.version,
        )
        if found != (kind.schema, kind.version):
            remedy = kind.remedy if found[0] == kind.schema else f"give a {kind.name}"
            raise kind.error(
                f"{source} has schema {one_line(found[0], 60)} version {found[1]}, this harness "
                f"reads {kind.schema} version {kind.version}: {remedy}"
            )
        value = decode(data, cls, source=source, error=kind.error)
        if len(data) <= _MOST_BY_HAND:
            _check_keys(data, source, kind.error)
        return value

    @classmethod
    def load(cls, path: Path, *, is_given: bool = False) -> Self:
        """Read a file.

        Args:
            is_given: a flag names it, so that it may be a pipe.

        Raises:
            HarnessError: of the kind's type; missing or malformed; names the path.
        """
        data = read_file(path, cls.FILE.name, cls.FILE.error, is_given=is_given)
        return cls.from_json(data, source=str(path))


def _check_keys(data: bytes, source: str, error: type[HarnessError]) -> None:
    """Refuse a duplicate key of an object, because one of the two values would be lost."""

    def unique(pairs: list[tuple[str, object]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise error(f"{source} has {shorten(twice)} twice in one object: keep one of them")

    if not data[:1].isascii():  # a byte-order mark
        data = decode_text(data, source, error).encode()
    text = data.decode(errors="replace")  # msgspec does not validate strings that it skips
    json.loads(text, object_pairs_hook=unique, parse_int=str, parse_float=str)


def encode(value: object, indent: int = 1) -> bytes:
    """JSON, indented for reading."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n"


def decode(data: bytes, type_: type[T], *, source: str, error: type[HarnessError]) -> T:
    """Parse JSON as a type.

    Raises:
        HarnessError: `error`; malformed, or refused by the type; names `source`.
    """
    if not data[:1].isascii():  # a byte-order mark, or no JSON
        data = decode_text(data, source, error).encode()
    try:
        return msgspec.json.decode(data, type=type_)
    except RecursionError:
        reason = "is nested too deep: write it as the harness does"
    except (msgspec.ValidationError, error) as problem:
        raise error(f"{source}: {one_line(_explain(str(problem), data, type_))}") from None
    except msgspec.DecodeError as problem:
        found = str(problem).removeprefix("JSON is malformed: ")
        reason = f"is not JSON{_broken_line(data)}: {one_line(found)}"
    except UnicodeDecodeError as problem:
        reason = f"is not UTF-8 in {shorten(problem.object)}: save it as UTF-8 text"
    raise error(f"{source} {reason}")


def _broken_line(data: bytes) -> str:
    """Names the first line that is not JSON, in a file that people may have edited."""
    try:
        json.loads(data.decode(errors="replace") if len(data) <= _MOST_BY_HAND else "0")
    except json.JSONDecodeError as problem:
        lines = [*problem.doc.splitlines(), ""]
        return f" in line {problem.lineno}, {shorten(lines[problem.lineno - 1].strip())}"
    except (ValueError, RecursionError):
        pass
    return ""


def _explain(problem: str, data: bytes, type_: Any) -> str:
    """A message of msgspec, with the key, the fields or the values that it leaves out."""
    fields = get_type_hints(type_) if hasattr(type_, "__struct_fields__") else {}
    if fields and "unknown field" in problem and " - at " not in problem:
        return f"{problem}: the fields are {', '.join(type_.__struct_fields__)}"
    place = re.search(r" - at `\$\.(\w+)(`$|\[\.\.\.\])", problem)
    if place is None or place[1] not in fields:
        return problem
    parts = get_args(fields[place[1]])
    if place[2] == "`":
        is_choice = problem.startswith("Invalid enum value")
        return f"{problem}: choose one of {', '.join(parts)}" if is_choice else problem
    key = _wrong_key(data, place[1], parts[-1])
    return problem if key is None else problem.replace("[...]", f"[{shorten(key)}]", 1)


def _wrong_key(data: bytes, field: str, type_: Any) -> str | None:
    """The first key of a mapping whose value is not of a type."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        for key, value in msgspec.json.decode(data)[field].items():
            try:
                msgspec.convert(value, type_)
            except msgspec.ValidationError:
                return str(key)
    return None
