"""Record operators on parameters that forward takes from `parameters()`, not from an attribute."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

# Properties that are tensors, and methods and functions whose results are none.
_TENSORS = ("T", "mT", "H", "mH", "data", "real", "imag")
_FACTS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "data_ptr",
    "untyped_storage", "__hash__", "__len__", "__repr__", "__format__", "__reduce_ex__",
    "__deepcopy__", "type", "is_same_size", "result_type", "is_tensor", "requires_grad_",
)  # fmt: skip


class ParametersRecorded(TorchFunctionMode):
    """Passes a parameter of the traced model as a node to the operators that read it.

    torch.fx knows only attributes. It would compute `p.square()` once, of the weights of now.
    """

    def __init__(self, tracer: fx.Tracer, root: nn.Module) -> None:
        super().__init__()
        self._tracer = tracer
        self._names = {id(p): name for name, p in root.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(id(leaf) in self._names for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name in _TENSORS:
                return getattr(self._recorded(args[0]), name)
        if name in _FACTS or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._recorded, (args, kwargs))
        return fx.Proxy.__torch_function__(func, types, args, kwargs)

    def _recorded(self, value: Any) -> Any:
        name = self._names.get(id(value))
        return value if name is None else self._tracer.create_proxy("get_attr", name, (), {})
