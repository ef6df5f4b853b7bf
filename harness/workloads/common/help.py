"""The flags of a configuration as `--help` shows them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, get_args, get_type_hints

import tyro

_METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


def prepare_help(config: Any) -> None:
    """Order the flags of a dataclass, its own before those of its bases, and show each docstring as
    one paragraph, without None and defaults that mean automatic."""
    bases = [base for base in config.__mro__ if "__annotations__" in vars(base)]
    known, hints = config.__dataclass_fields__, get_type_hints(config, include_extras=True)
    for base in bases:
        docs = dict(_docstrings(base))
        for name in base.__annotations__:
            if name not in known or known[name].metadata:
                continue
            known[name].metadata = MappingProxyType({"help": docs.get(name, "")})
            if known[name].default in (None, ()):
                base.__annotations__[name] = _automatic(hints[name])
    names = [name for base in bases for name in base.__annotations__ if name in known]
    config.__dataclass_fields__ = {name: known[name] for name in names}


def _automatic(hint: Any) -> Any:
    """A type whose flag shows neither None nor its default."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    metavar = None
    if NoneType in get_args(hint) and len(kinds) == 1:
        choices = ",".join(map(str, get_args(kinds[0])))
        metavar = f"{{{choices}}}" if choices else _METAVARS[kinds[0]]
    return Annotated[hint, tyro.conf.arg(metavar=metavar, help_behavior_hint="")]


def _docstrings(config: type) -> Iterator[tuple[str, str]]:
    """The docstring below each field of a class, without its line breaks."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(below.value, ast.Constant)
            yield field.target.id, " ".join(str(below.value.value).split())
