"""Functions that read a model's modules by their closure, such as minGPT's
`self.mlpf = lambda x: m.c_proj(m.c_fc(x))`."""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn


class Closure:
    """Calls a function. A copy reads the copied modules; deepcopy leaves functions as they are."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Closure:
        own = self._function
        cells = [copy.deepcopy(cell.cell_contents, memo) for cell in own.__closure__ or ()]
        defaults = copy.deepcopy(own.__defaults__, memo)
        made = FunctionType(
            own.__code__, own.__globals__, own.__name__, defaults, tuple(map(CellType, cells))
        )
        made.__kwdefaults__ = copy.deepcopy(own.__kwdefaults__, memo)
        return Closure(made)


def copy_closures(model: nn.Module) -> None:
    """Let copies of a model copy the functions among its attributes that read its modules."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and _reads_modules(value):
                setattr(module, name, Closure(value))


def _reads_modules(function: FunctionType) -> bool:
    try:
        contents = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        return False
    return any(isinstance(value, nn.Module | Tensor) for value in contents)
