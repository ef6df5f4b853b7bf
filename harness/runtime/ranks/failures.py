"""What an exception of one rank says: whether another rank caused it, and where it was raised."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import harness
from harness.errors import first_line

_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "remote process exited",
    "connectfullmesh failed",
    "gloo/transport",
)
_TIMED_OUT = ("timed out waiting", "wait timeout", "watchdog caught collective operation timeout")
# gloo begins with the place in its source, and ends with advice that names no rank.
_SOURCE = re.compile(r"\[/[^\]\n]{1,300}\] ")
_ADVICE = " This is typically caused by"
_CALLBACK = "Got the following error when running the callback: RuntimeError: "
_OWN = Path(harness.__file__).parent
_TORCH = Path(torch.__file__).parent
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_MAX_CODE = 120


def has_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, which has the better reason."""
    return isinstance(error, dist.DistNetworkError) or _says(error, _LOST_PEER)


def has_timed_out(error: BaseException) -> bool:
    """Whether a collective of torch's own (its DDP's, for one) had no answer in time."""
    return _says(error, _TIMED_OUT)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(one in text for one in words)


def gist(error: BaseException) -> str:
    """What an error of a collective says, without the library's source lines and advice."""
    text = _SOURCE.sub("", first_line(error).removeprefix(_CALLBACK))
    return text.partition(_ADVICE)[0].rstrip(". ")


def located(error: BaseException) -> str:
    """`Type: message (file:line in function: code)`, then the traceback.

    The place is the innermost line of the user's; where there is none, that of a captured graph,
    and else the harness's own.
    """
    place = _place(error)
    first, *rest = f"{type(error).__name__}: {error}".splitlines()
    where = f" ({place})" if place else ""
    return "\n".join([first + where, *rest, "".join(traceback.format_exception(error))])


def users_line(error: BaseException) -> str:
    """The innermost line of the user's, such as `models.py:12 in forward`; empty without one."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    found = next((frame for frame in frames if _is_users(frame.filename)), None)
    return f"{Path(found.filename).name}:{found.lineno} in {found.name}" if found else ""


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    for is_wanted in (_is_users, _is_generated, _is_own):
        for frame in reversed(frames):
            if is_wanted(frame.filename):
                name = "a captured graph" if _is_generated(frame.filename) else frame.filename
                code = (frame.line or "")[:_MAX_CODE]
                return f"{Path(name).name}:{frame.lineno} in {frame.name}: {code}"
    return ""


def _is_generated(filename: str) -> bool:
    return filename.startswith("<")


def _is_own(filename: str) -> bool:
    return Path(filename).is_relative_to(_OWN)


def _is_users(filename: str) -> bool:
    path = Path(filename)
    is_packaged = "site-packages" in path.parts or "dist-packages" in path.parts
    is_standard = path.is_relative_to(_STANDARD) and not is_packaged
    is_library = is_standard or path.is_relative_to(_TORCH)
    return not (_is_generated(filename) or _is_own(filename) or is_library)
