"""Describe a rank's exception: whether another rank caused it, and where it was raised."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

import harness
from harness.errors import PeerError, first_line

_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "remote process exited",
    "connectfullmesh failed",
    "gloo/transport",
)
_TIMED_OUT = (
    "timed out waiting",
    "wait timeout",
    "application timeout",
    "watchdog caught collective operation timeout",
)
# gloo's messages start with a place in its source and end with general advice.
_SOURCE = re.compile(r"\[/[^\]\n]{1,300}\] ")
_ADVICE = " This is typically caused by"
_CALLBACK = "Got the following error when running the callback: RuntimeError: "
_HARNESS = Path(harness.__file__).parent
_TORCH = Path(torch.__file__).parent
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_MAX_CODE = 120
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,9}), in (\w{1,100})')


def has_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank ended; that rank's error is the cause."""
    return isinstance(error, dist.DistNetworkError) or _mentions(error, _LOST_PEER)


def has_timed_out(error: BaseException) -> bool:
    """Whether a collective that torch started (in DDP, say) timed out."""
    return _mentions(error, _TIMED_OUT)


def _mentions(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def gist(error: BaseException) -> str:
    """The message of a collective's error, without the library's source lines and advice."""
    text = _SOURCE.sub("", first_line(error).removeprefix(_CALLBACK))
    return text.partition(_ADVICE)[0].rstrip(". ")


@contextmanager
def blaming_peers(failure: str, ranks: Sequence[int]) -> Iterator[None]:
    """Convert the error of a collective over ranks to a PeerError, which begins with `failure`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"{failure} ({gist(error)}): one of them died or hangs, look at their logs", ranks
        ) from error


def located(error: BaseException) -> str:
    """`Type: message (file:line in function: code)`, then the traceback.

    The place is the innermost line of user code, else of a captured graph, else of the harness.
    """
    place = _place(error)
    first, *rest = f"{type(error).__name__}: {error}".splitlines()
    if first.endswith(":") and rest:  # TorchInductor's, whose cause is in the next line
        first, *rest = f"{first} {rest[0].strip()}", *rest[1:]
    where = f" ({place})" if place else ""
    return "\n".join([first + where, *rest, "".join(traceback.format_exception(error))])


def users_line(error: BaseException) -> str:
    """The innermost line of user code, such as `models.py:12 in forward`, or "": of the traceback,
    or of the one in a note or that torch quotes for the operator of a graph."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    for filename, line, name in reversed(_FRAME.findall(text) + frames):
        if is_from_user(filename):
            return f"{Path(filename).name}:{line} in {name}"
    return ""


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError):  # its message names the place, which no frame has reached
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    for matches in (is_from_user, _is_generated, _is_from_harness):
        for frame in reversed(frames):
            if matches(frame.filename):
                name = "a captured graph" if _is_generated(frame.filename) else frame.filename
                code = (frame.line or "")[:_MAX_CODE]
                return f"{Path(name).name}:{frame.lineno} in {frame.name}: {code}"
    return ""


def _is_generated(filename: str) -> bool:
    return filename.startswith("<") and not filename.startswith("<frozen ")


def _is_from_harness(filename: str) -> bool:
    return Path(filename).is_relative_to(_HARNESS)


@lru_cache(maxsize=4096)
def is_from_user(filename: str) -> bool:
    """Whether a file is neither of the harness, of torch nor of Python."""
    path = Path(filename)
    is_packaged = "site-packages" in path.parts or "dist-packages" in path.parts
    is_standard = path.is_relative_to(_STANDARD) and not is_packaged
    is_library = is_standard or path.is_relative_to(_TORCH)
    return not (filename.startswith("<") or _is_from_harness(filename) or is_library)
