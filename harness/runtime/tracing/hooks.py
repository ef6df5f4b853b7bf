"""The hooks of modules and parameters."""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

from torch import nn

# Bytecode and calls by which a hook keeps state, so that its next call may differ.
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_")
_WRITING_CALLS = ("append", "extend", "insert", "pop", "update", "setdefault", "write", "print")


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of a module itself."""
    kinds = ("_backward", "_backward_pre", "_forward", "_forward_pre")
    return [hook for kind in kinds for hook in getattr(module, f"{kind}_hooks").values()]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module itself, not its children, has hooks on gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks other than PyTorch's forward hooks (such as `weight_norm`)."""
    forward = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    owners = (hook if hasattr(hook, "__module__") else type(hook) for hook in forward)
    is_from_torch = (str(owner.__module__).startswith("torch.") for owner in owners)
    return has_backward_hooks(module) or not all(is_from_torch)


def is_stateless(hook: Callable[..., Any]) -> bool:
    """Whether a hook's bytecode shows no writes to state."""
    hook = getattr(hook, "func", hook)
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None:
        return False
    writes = any(one.opname.startswith(_STORES) for one in dis.get_instructions(code))
    return not writes and not any(name in _WRITING_CALLS for name in code.co_names)
