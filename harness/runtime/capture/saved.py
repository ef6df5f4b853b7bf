"""What a model keeps for backward: which tensors autograd saves, and whose memory they have.

An operator's output stays only if the operator or a reader saves it, and one written in place, or a
view, has the memory of its input:

    conv -> batch norm -> relu in place -> conv
    kept    -             kept (the batch norm's memory)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from harness.domain.graph import Operator
from harness.runtime.tracing.patches import replaced

# Kinds that autocast computes in 16 bits, and in fp32; all others take the widest of their inputs.
# Source: PyTorch, Automatic Mixed Precision package, CUDA op-specific behavior.
_NARROW = ("linear", "conv2d", "attention", "einsum", "lstm")
_PRODUCTS = ("conv", "matmul", "bmm", "baddbmm", "addmm")  # how names of other products begin
_WIDE = ("layer_norm", "softmax", "embedding")
_FP32, _HALF = 4, 2

_ATTENTION = F.scaled_dot_product_attention

_Place = tuple[fx.Node, int]  # a node, and one of its tensors


class SavedTensors(NamedTuple):
    """What one call saves.

    Attributes:
        inputs: places of its saved tensors among those in its arguments, and how often it saves
            each.
        outputs: places of its saved outputs.
        n_floats, other_bytes: floats, and bytes of other dtypes, that are neither.
        views: for each output, the place of the input whose memory it has.
    """

    inputs: Mapping[int, int]
    outputs: frozenset[int]
    n_floats: int
    other_bytes: int
    views: tuple[int | None, ...]


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors in nested arguments, in order."""
    found: list[Tensor] = []
    fx.node.map_aggregate(value, lambda x: found.append(x) if isinstance(x, Tensor) else None)
    return found


def call_saving(
    call: Callable[[], Any], arguments: Any, weights: Sequence[Tensor]
) -> tuple[Any, SavedTensors | None]:
    """Call, and say what autograd saves; None if that is unknown. Raises what the call raises, also
    where it allows no hooks of saved tensors, as torch.func.grad does.

    Args:
        arguments: of the call; no two of their tensors share memory.
        weights: of the called module.
    """
    kept: list[Tensor] = []
    with _keeping(kept), _FusedAttention(kept):
        value = call()
    try:
        return value, _saved(kept, tensors_within(arguments), tensors_within(value), weights)
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
        return value, None


def _keeping(kept: list[Tensor]) -> saved_tensors_hooks:
    """Add the tensors that autograd saves in the block."""

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return kept[-1]

    return saved_tensors_hooks(pack, lambda tensor: tensor)


class _FusedAttention(TorchFunctionMode):
    """Adds what a fused kernel of attention saves: its arguments, its result and a number for each
    query. Meta tensors go through the plain operators, which save the probabilities."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ATTENTION:
            return self._attend(*args, **(kwargs or {}))
        # This mode is off in the call, such as of multi_head_attention_forward.
        with replaced(F, "scaled_dot_product_attention", self._attend):
            return func(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        with _keeping([]):
            result = _ATTENTION(*args, **kwargs)
            if result.dim() > 3:  # fused kernels write the heads of a position side by side
                result = result.transpose(-3, -2).contiguous().transpose(-3, -2)
        if result.requires_grad:
            per_query = result.new_empty(result.shape[:-1])
            self._kept += [*tensors_within((args, kwargs)), result.detach(), per_query]
        return result


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _saved(
    kept: list[Tensor], inputs: list[Tensor], outputs: list[Tensor], weights: Sequence[Tensor]
) -> SavedTensors:
    input_of = {_memory(tensor): k for k, tensor in enumerate(inputs)}
    output_of = {_memory(tensor): k for k, tensor in enumerate(outputs)}
    saved = {_memory(tensor): tensor for tensor in kept}
    named = {*input_of, *output_of, *map(_memory, weights)}
    others = [tensor for memory, tensor in saved.items() if memory not in named]
    return SavedTensors(
        inputs=Counter(input_of[m] for m in map(_memory, kept) if m in input_of),
        outputs=frozenset(k for m, k in output_of.items() if m in saved and m not in input_of),
        n_floats=sum(_size(t) // t.element_size() for t in others if t.is_floating_point()),
        other_bytes=sum(_size(t) for t in others if not t.is_floating_point()),
        views=tuple(input_of.get(_memory(tensor)) for tensor in outputs),
    )


def _cast_of(operator: Operator) -> str:
    """The width to which autocast casts an operator's inputs: narrow, wide, or "" for neither."""
    is_product = str(operator.attrs.get("function", "")).lower().startswith(_PRODUCTS)
    if operator.kind in _NARROW or is_product:
        return "narrow"
    return "wide" if operator.kind in _WIDE else ""


def _size(tensor: Tensor) -> int:
    """Bytes of the memory that a view keeps."""
    return int(tensor.untyped_storage().nbytes())


class KeptBytes:
    """Bytes that stay until backward, by the node that made them; nodes are followed in order.

    Args:
        values: the tensors of each node.
        saved: what the call of each node saves.
        is_half: in 16-bit autocast, where products save copies of wider inputs and of weights.
    """

    def __init__(
        self,
        values: Mapping[fx.Node, Sequence[Tensor]],
        saved: Mapping[fx.Node, SavedTensors | None],
        *,
        is_half: bool,
    ) -> None:
        self._values, self._saved, self._is_half = values, saved, is_half
        self._origin: dict[_Place, _Place] = {}  # whose memory a tensor has
        self._width: dict[fx.Node, int] = {}  # bytes of a float
        self._kept: defaultdict[fx.Node, set[int]] = defaultdict(set)  # places of its tensors
        self._made: defaultdict[fx.Node, float] = defaultdict(float)
        self._cast: set[str] = set()  # operators that saved cast copies of their weights

    def follow(self, node: fx.Node, given: Sequence[fx.Node], operator: Operator | None) -> None:
        """Take the next node.

        Args:
            given: the nodes in its arguments.
            operator: that it became, if any.
        """
        kind = "" if operator is None else _cast_of(operator)
        width = self._width[node] = self._computed(kind, given)
        if node.op in ("placeholder", "get_attr"):
            return
        places = [(n, k) for n in given for k in range(len(self._values[n]))]
        saved = self._saved.get(node)
        if saved is None:  # as if it saved its outputs
            saved = SavedTensors({}, frozenset(range(len(self._values[node]))), 0, 0, ())
        for k, view in enumerate(saved.views):
            if view is not None and view < len(places):
                self._origin[node, k] = self._of(places[view])
        for i, n in saved.inputs.items():
            source, k = places[i] if i < len(places) else (None, 0)
            if source is None or source.op == "get_attr":
                continue
            if kind and self._width[source] != width:
                # Each product casts again, but for an LSTM's, which are one kernel.
                n_copies = 1 if operator and operator.kind == "lstm" else n
                self._made[node] += n_copies * self._values[source][k].numel() * width
            else:
                self.keep(source, k)
        for k in saved.outputs:
            self.keep(node, k)
        self._made[node] += saved.n_floats * width + saved.other_bytes
        is_differentiated = any(
            self._values[n][k].requires_grad for n, k in places if n.op != "get_attr"
        )
        if operator and width == _HALF and kind == "narrow" and is_differentiated:
            is_new = operator.attrs.get("tied_to") not in self._cast
            n_bytes = operator.weight_bytes if is_new else operator.parameter_bytes
            self._made[node] += n_bytes * width / _FP32
            self._cast.add(operator.name)

    def keep(self, node: fx.Node, k: int = 0) -> None:
        """A tensor of a node stays, by default its first."""
        node, k = self._of((node, k))
        self._kept[node].add(k)

    def of(self, node: fx.Node) -> int:
        """Bytes of a node, after all have been followed."""
        own = [self._values[node][k] for k in self._kept[node]]
        floats = sum(t.numel() for t in own if t.is_floating_point()) * self._width[node]
        others = sum(t.nbytes for t in own if not t.is_floating_point())
        return round(floats + others + self._made[node])

    def _computed(self, kind: str, given: Sequence[fx.Node]) -> int:
        if not self._is_half or kind == "wide":
            return _FP32
        widths = [self._width[n] for n in given if n.op != "get_attr"]
        return _HALF if kind == "narrow" else max(widths, default=_FP32)

    def _of(self, place: _Place) -> _Place:
        return self._origin.get(place, place)
