"""Patch PyTorch during tracing, so that torch.fx sees calls that it would trace through."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import autograd_function
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

# Takes the class of an autograd function and its arguments.
Apply = Callable[..., Any]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value in the block."""
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def autograd_functions(apply: Apply) -> Iterator[None]:
    """Redirect every `Function.apply` to `apply(function, *args)`.

    The base class is patched, because a model may hold a reference to `Function.apply` already.
    """

    def caught(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction:
            return args[0](*args[2:])  # args[1]: preserve_rng_state
        if function.__module__ == autograd_function.__name__:  # of a vmap in torch
            return original_apply(function, *args)
        return apply(function, *args, **kwargs)

    # That of torch 2.15 has an `apply` of its own, which does not call that of its base.
    is_base = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
    owner = _SingleLevelFunction if is_base else torch.autograd.Function
    with replaced(owner, "apply", classmethod(caught)):
        yield


@contextmanager
def without_values() -> Iterator[None]:
    """Run a model's code on tensors without data: leave out `torch._check_tensor_all`, by which
    models compare numbers of tokens and features, and run what torch.compile has compiled as it is
    written, because its kernels would read memory that is not there."""
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "_check_tensor_all_with", lambda *_: None))
        if "torch._dynamo" in sys.modules:  # whose import takes long
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def users_code(model: nn.Module) -> Iterator[None]:
    """Let `len(x)` in the files of a model's modules be `x.shape[0]`, which stays open, leave out
    checks of values, by the model and by distributions, run it `without_values`, and assign where a
    mask is true without counting its elements."""
    names = {type(module).__module__ for module in model.modules()} - {"builtins"}
    with ExitStack() as stack:
        for name in names & sys.modules.keys():
            if not name.startswith("torch."):
                stack.enter_context(replaced(sys.modules[name], "len", _length))
        stack.enter_context(replaced(torch.distributions.Distribution, "_validate_args", False))
        stack.enter_context(without_values())
        stack.enter_context(replaced(Tensor, "__setitem__", setitem))
        yield


def setitem(x: Tensor, index: Any, value: Any, assign: Any = Tensor.__setitem__) -> None:
    """`x[index] = value`; where a mask is true, also on tensors without data, and so that the
    gradient of a value does not count them."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    n_whole = x.dim() - index.dim() if is_mask else 0
    if is_mask and isinstance(value, Tensor) and value.dim() <= n_whole:
        x.copy_(torch.where(index[(..., *[None] * n_whole)], value, x))
    else:
        assign(x, index, value)


def _length(value: Any) -> Any:
    shape: Any = value.shape if isinstance(value, Tensor | fx.Proxy) else (len(value),)
    return shape[0]


def original_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a function inside `autograd_functions`."""
    original: Callable[..., Any] = torch._C._FunctionBase.__dict__["apply"]
    return original.__get__(None, function)(*args)
