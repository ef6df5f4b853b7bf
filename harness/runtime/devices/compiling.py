"""Compile functions of tensors by torch.compile."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from harness.errors import ConfigError

_CAPABILITY = (7, 0)  # least of Triton

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled_by_torch(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function or module, compiled by TorchInductor for each shape and dtype of its inputs at
    the first call with them. It draws the random numbers of the function itself.

    Raises:
        ConfigError: this host cannot compile for the device.
    """
    _check_compiler(device)
    # Its handlers of the process that forked this one write to a stream that is closed here.
    torch._logging.set_logs(all=logging.ERROR)
    return torch.compile(function, dynamic=False, options={"fallback_random": True})


def uncompiled(function: _Function) -> _Function:
    """The function, which runs as it is where a compiled one calls it."""
    # As torch.compiler.disable, but without the import of torch._dynamo, which takes a second.
    return cast(_Function, torch._disable_dynamo(function))


def _check_compiler(device: torch.device) -> None:
    """Refuse a GPU that Triton has no code for, and a host without TorchInductor's C++ compiler,
    Triton's C compiler, or Python's headers, which both need."""
    variable, names = "CXX", ["g++", "clang++"]
    if device.type == "cuda":
        variable, names = "CC", ["gcc", "clang"]
    if given := os.environ.get(variable):
        names = [given]
    if not any(map(shutil.which, names)):
        raise ConfigError(
            f"compiling needs a compiler, this host has no {' or '.join(names)}: install one "
            f"(Debian: apt install g++), name it in {variable}, or do not compile"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise ConfigError(
            f"compiling needs Python's headers, {header} is missing: install them (Debian: apt "
            "install python3-dev), or do not compile"
        )
    if device.type != "cuda":
        return
    if (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        needs, has = (f"{major}.{minor}" for major, minor in (_CAPABILITY, found))
        raise ConfigError(
            f"compiling needs GPUs of compute capability {needs} for Triton, "
            f"{torch.cuda.get_device_name(device)} has {has}: do not compile, or leave this GPU out"
        )
