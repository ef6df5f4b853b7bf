"""Modes under which a model is exported.

One answers reads of values (`if`, `item()`) that no input's values can change. A tensor that
forward makes of sizes alone, such as a mask of ones, is computed beside its fake twin, for some
numbers of samples; where all give the same number, that is the answer. A check whether values are
finite is answered as if they were.

The other follows `torch.cat(list(x))`, by which models join the samples of x again. The list has
one row in the place of all samples, because their number is open.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from harness.runtime.capture.operators import (
    ALWAYS_RANDOM,
    CONCATENATIONS,
    SOMETIMES_RANDOM,
    UNDEFINED,
)
from harness.runtime.capture.saved import tensors_within
from harness.runtime.tracing.constructs import ConstructError, function_name
from harness.runtime.tracing.tracer import users_frame

_log = logging.getLogger(__name__)

# Numbers of samples, beside that of the batch.
_SIZES = (2, 3)
_LARGEST = 1 << 25  # elements
_READS: tuple[Any, ...] = (
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist,
)  # fmt: skip
# Functions that read only the shape and type of their first argument.
_OF_SHAPE = (
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor",
)  # fmt: skip
_UNKNOWN = {*UNDEFINED, *ALWAYS_RANDOM, *SOMETIMES_RANDOM}
# Each element's result where all values are finite.
_FINITE = {"isfinite": True, "isinf": False, "isnan": False, "isposinf": False, "isneginf": False}
# The result of operators on such checks.
_OF_CHECKS: dict[str, Callable[[list[bool]], bool]] = {
    **dict.fromkeys(("all", "__and__", "bitwise_and", "logical_and"), all),
    **dict.fromkeys(("any", "__or__", "bitwise_or", "logical_or"), any),
    **dict.fromkeys(("__invert__", "bitwise_not", "logical_not"), lambda given: not given[0]),
}


class _Known(NamedTuple):
    """Values of a tensor for each number of samples; `twin` keeps its id from being reused."""

    twin: Tensor
    values: tuple[Tensor, ...]


class _UnknownError(Exception):
    """A value depends on an input."""


class KnownValues(TorchFunctionMode):
    """Follows the tensors of a model that is exported inside it, for a batch of some samples."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._sizes = (*_SIZES, batch)
        self._known: dict[int, _Known] = {}
        self._checks: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The default, with which PyTorch draws tensors of closed sizes only.
        kwargs = {k: x for k, x in (kwargs or {}).items() if (k, x) != ("generator", None)}
        if func in _READS and (answer := self._answer(func, args[0])) is not None:
            return answer
        made = func(*args, **kwargs)
        name = function_name(func)
        self._follow_check(name, args, made)
        if name == "__get__" or func in _READS or self._is_large(made):
            return made
        try:
            values = [self._evaluate(func, name, args, kwargs, k) for k in range(len(self._sizes))]
        except Exception:  # of any operator; its result is then unknown
            self._lose(name, args, kwargs)
            return made
        twins, *results = map(tree_leaves, (made, *values))
        if any(len(found) != len(twins) for found in results):  # a tensor for each sample
            return made
        for twin, *found in zip(twins, *results, strict=True):
            if isinstance(twin, Tensor):
                self._known[id(twin)] = _Known(twin, tuple(found))
        return made

    def _is_large(self, made: Any) -> bool:
        sizes = [x.shape for x in tensors_within(made)]
        try:
            return any(math.prod(size_of(n, self._sizes[-1]) for n in s) > _LARGEST for s in sizes)
        except _UnknownError:
            return False

    def _answer(self, func: Any, tensor: Tensor) -> Any:
        if id(tensor) in self._checks:
            _log.warning(
                "forward checks whether values are finite (%s): the graph leaves out what it does "
                "when they are not",
                users_frame(),
            )
            with _disable_current_modes():
                return func(torch.tensor(self._checks[id(tensor)][1]))
        if id(tensor) not in self._known:
            return None
        with _disable_current_modes():
            first, *others = map(func, self._known[id(tensor)].values)
        return first if all(x == first for x in others) else None

    def _follow_check(self, name: str, args: Any, made: Any) -> None:
        if name in _FINITE:
            self._checks[id(made)] = made, _FINITE[name]
        elif name in _OF_CHECKS:
            given = [x for x in args if isinstance(x, Tensor | bool)]
            results = [self._checks[id(x)][1] for x in given if id(x) in self._checks]
            if results and len(results) == len(given):
                self._checks[id(made)] = made, _OF_CHECKS[name](results)
        elif name.endswith("_") and args:  # in place
            self._checks.pop(id(args[0]), None)

    def _evaluate(self, func: Any, name: str, args: Any, kwargs: Any, k: int) -> Any:
        if name in _UNKNOWN:
            raise _UnknownError
        n_blank = int(name in _OF_SHAPE)
        with _disable_current_modes():
            blanks = [
                torch.empty(
                    [size_of(n, self._sizes[k]) for n in x.shape], dtype=x.dtype, device=x.device
                )
                for x in args[:n_blank]
            ]
            given, named = tree_map(lambda x: self._value(x, k), (args[n_blank:], kwargs))
            return func(*blanks, *given, **named)

    def _value(self, x: Any, k: int) -> Any:
        if isinstance(x, Tensor):
            if id(x) not in self._known:
                raise _UnknownError
            return self._known[id(x)].values[k]
        return size_of(x, self._sizes[k])

    def _lose(self, name: str, args: Any, kwargs: Any) -> None:
        """Forget the values that an operator without a known result may change, or views of which
        it may give."""
        tensors = tensors_within((args, kwargs))
        if all(id(x) in self._known for x in tensors):
            self._forget(tensors)
        elif name.endswith("_") or "out" in kwargs:  # in place
            self._forget(tree_leaves((args[:1], kwargs.get("out"))))

    def _forget(self, changed: list[Any]) -> None:
        """Forget values and those that share their memory."""
        found = [self._known[id(x)] for x in changed if id(x) in self._known]
        places = {_place(each) for each in found}
        self._known = {k: each for k, each in self._known.items() if _place(each) not in places}


def _place(known: _Known) -> int:
    return known.values[0].untyped_storage().data_ptr()


def size_of(x: Any, n_samples: int) -> Any:
    """A size for a number of samples."""
    if not isinstance(x, SymInt):
        return x
    expression = x.node.expr
    if any(str(symbol).startswith("u") for symbol in expression.free_symbols):
        raise _UnknownError  # a size that depends on values
    return int(expression.subs(dict.fromkeys(expression.free_symbols, n_samples)))


class JoinedSamples(TorchFunctionMode):
    """Lets a model join samples, and refuses what else it does with one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}  # the row, and x

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, function_name(func)
        is_of_rows = name == "unbind" and not any((*args[1:], *kwargs.values()))
        if is_of_rows and args[0].dim() > 0 and isinstance(args[0].shape[0], SymInt):
            row = args[0][0]
            self._samples[id(row)] = row, args[0]
            return (row,)
        if name == "__len__" and any(args[0] is whole for _, whole in self._samples.values()):
            raise TypeError("the number of samples is open")  # `list` asks, and does without
        tensors = tensors_within((args, kwargs))
        found = [self._samples[id(x)][1] for x in tensors if id(x) in self._samples]
        if not found or name == "__get__":
            return func(*args, **kwargs)
        if len(tensors) == 1 and not any((*args[1:], *kwargs.values())):
            if name in CONCATENATIONS:
                return found[0].flatten(0, 1)
            if name == "stack":
                return found[0]
        raise ConstructError(
            "forward loops over the samples of a batch: compute on all of them at once"
        )
