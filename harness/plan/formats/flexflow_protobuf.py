"""FlexFlow's protobuf strategies, both generations, without the protobuf library.

    message Strategy { repeated Op ops = 1; }
    v1 (to 2019)   message Op { string name = 1; repeated int32 dims = 2;
                                repeated int32 devices = 3; }
    r20 and later  message Op { string name = 1; DeviceType device_type = 2;
                                repeated int32 dims = 3; repeated int32 device_ids = 4;
                                repeated MemoryType memory_types = 5; }

The two share field numbers with other meanings, so a file is read as the one generation under
which every operator has as many devices as parts. Numbers may be packed or not; they are written
as FlexFlow (proto2) does, unpacked, so that a file prints back byte for byte. The wire format of
these two messages is the forty lines below: less than a dependency with its generated code.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, TypeVar

from harness.errors import StrategyError
from harness.inputs import shorten
from harness.plan.formats.flexflow import MOST_DIMS, Entry, check_names

Generation = Literal["v1", "r21"]
T = TypeVar("T")
GENERATIONS: tuple[Generation, ...] = ("v1", "r21")

_VARINT, _BYTES = 0, 2
_MOST_VALUES = 2**16  # of one operator: its dims and devices
# Field numbers by generation: name, device_type, dims, devices, memory_types (0: not there).
_FIELDS: dict[Generation, tuple[int, int, int, int, int]] = {
    "v1": (1, 0, 2, 3, 0),
    "r21": (1, 2, 3, 4, 5),
}


def parse_protobuf(
    data: bytes, *, source: str = "protobuf strategy"
) -> tuple[Generation, list[Entry]]:
    """Read a strategy; and find out its generation.

    Raises:
        StrategyError: not such a message, or of neither generation.
    """
    operators = []
    for field, value in _fields(data, source):
        if field != 1 or not isinstance(value, bytes):
            raise StrategyError(f"{source}: field {field} of the file is not an operator")
        operators.append(_bounded(_fields(value, source), source))
    if not operators:
        raise StrategyError(f"{source} holds no operator")
    for candidate in GENERATIONS:
        if all(_fits(fields, candidate, source) for fields in operators):
            entries = [_entry(fields, candidate, source) for fields in operators]
            check_names(entries, source)
            return candidate, entries
    raise StrategyError(
        f"{source} is no FlexFlow strategy of generation {' or '.join(GENERATIONS)}: parts and "
        "devices differ"
    )


def print_protobuf(entries: Sequence[Entry], generation: Generation) -> bytes:
    """Write a strategy, unpacked, fields in ascending order.

    Raises:
        StrategyError: v1 cannot hold memory types, or a device type other than GPU.
    """
    messages = []
    for e in entries:
        if generation == "v1" and (e.device_type or e.memory_types):
            raise StrategyError(
                f"operator {e.name!r} has device type {e.device_type} and memory types "
                f"{e.memory_types}, generation v1 holds neither: write r21"
            )
        name, device_type, dims, devices, memory_types = _FIELDS[generation]
        message = _encode_bytes(name, e.name.encode())
        if device_type:
            message += _encode_ints(device_type, [e.device_type or 0])
        message += _encode_ints(dims, e.dims) + _encode_ints(devices, e.devices)
        message += _encode_ints(memory_types, e.memory_types or ())
        messages.append(_encode_bytes(1, message))
    return b"".join(messages)


def _ints(fields: list[tuple[int, int | bytes]], number: int, source: str) -> tuple[int, ...]:
    """All values of a repeated field, packed or not."""
    own = (value for field, value in fields if field == number)
    return tuple(_bounded((item for value in own for item in _unpacked(value, source)), source))


def _unpacked(value: int | bytes, source: str) -> Iterator[int]:
    if isinstance(value, int):
        yield value
        return
    position = 0
    while position < len(value):
        item, position = _varint(value, position, source)
        yield item


def _bounded(values: Iterator[T], source: str) -> list[T]:
    found = list(islice(values, _MOST_VALUES + 1))
    if len(found) > _MOST_VALUES:
        raise StrategyError(
            f"{source} has an operator of more than {_MOST_VALUES} values: it is no strategy for "
            "devices that there are"
        )
    return found


def _fits(fields: list[tuple[int, int | bytes]], generation: Generation, source: str) -> bool:
    _, _, dims, devices, _ = _FIELDS[generation]
    allowed = set(_FIELDS[generation]) - {0}
    sizes = _ints(fields, dims, source)
    return (
        all(field in allowed for field, _ in fields)
        and 1 <= len(sizes) <= MOST_DIMS
        and min(sizes) > 0
        and math.prod(sizes) == len(_ints(fields, devices, source))
    )


def _entry(fields: list[tuple[int, int | bytes]], generation: Generation, source: str) -> Entry:
    name, device_type, dims, devices, memory_types = _FIELDS[generation]
    text = next((value for field, value in fields if field == name), b"")
    if not isinstance(text, bytes):
        raise StrategyError(f"{source}: an operator's name is not text")
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        raise StrategyError(f"{source}: an operator's name {shorten(text)} is not UTF-8") from None
    kinds = _ints(fields, device_type, source) if device_type else ()
    memory = _ints(fields, memory_types, source) if memory_types else ()
    return Entry(
        decoded,
        _ints(fields, dims, source),
        _ints(fields, devices, source),
        kinds[-1] if kinds else None,
        memory or None,
    )


def _varint(data: bytes, position: int, source: str) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise StrategyError(f"{source} is not a protobuf strategy, or is cut short at byte {position}")


def _fields(data: bytes, source: str) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one message: numbers and byte strings are all that it may hold."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position, source)
        value, position = _varint(data, position, source)
        if key & 7 == _VARINT:
            yield key >> 3, value
        elif key & 7 == _BYTES and position + value <= len(data):
            yield key >> 3, data[position : position + value]
            position += value
        else:
            raise StrategyError(
                f"{source} is not a protobuf strategy, or is cut short at byte {position}"
            )


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | _BYTES) + _encode_varint(len(value)) + value


def _encode_ints(field: int, values: Sequence[int]) -> bytes:
    key = _encode_varint(field << 3 | _VARINT)
    return b"".join(key + _encode_varint(value) for value in values)
