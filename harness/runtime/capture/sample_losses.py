"""Rewrite the loss of a whole batch as one of each sample, so that parts of a batch can compute it.

A `BatchLoss` returns its model's loss once for each sample. Where that loss is a mean over elements
of which each sample has equally many, a sum divided by a number of samples, or a sum of these with
factors that no sample changes, a sample's loss is that of its own elements.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional

from harness.runtime.capture.sample_dims import Values, batch_sizes, sample_dims, values_by_batch
from harness.runtime.models.own_loss import BatchLossTask, Call
from harness.runtime.models.task import IGNORED, Task
from harness.runtime.tracing.constructs import function_name

_log = logging.getLogger(__name__)

_SUMS = ("add", "iadd", "sub", "isub", "neg")
_PRODUCTS = ("mul", "imul")
_QUOTIENTS = ("truediv", "itruediv", "div")
_CASTS = ("float", "double", "to", "_to_copy")
_VIEWS = ("reshape", "view", "squeeze", "clone", "contiguous")
# What selects or arranges labels, and makes none of another value; and what makes them from 0 on.
_SELECTIONS = (
    *_VIEWS, "getitem", "slice", "select", "flatten", "transpose", "permute", "unsqueeze", "long",
    "to", "_to_copy",
)  # fmt: skip
_CHOICES = ("argmax", "argmin")
# Means over the weights of the classes, and over the labels that count.
_CLASS_LOSSES = (
    "CrossEntropyLoss", "cross_entropy", "cross_entropy_loss", "NLLLoss", "NLLLoss2d", "nll_loss",
    "nll_loss_nd",
)  # fmt: skip
_OTHERS = ("CTCLoss", "ctc_loss")  # over the lengths of targets
_UNREDUCED, _REDUCTIONS = 0, {"mean": 1, "sum": 2}  # of torch.ops


class _OtherLossError(Exception):
    """The loss is no mean over samples; says why."""


def split_by_samples(
    task: Task, module: fx.GraphModule, examples: Sequence[Tensor]
) -> list[Values]:
    """Let a traced `BatchLoss` return each sample's loss if it is a mean over samples; returns
    `values_by_batch` of the module, also of other models."""
    values = values_by_batch(module, examples)
    if not isinstance(task, BatchLossTask) or not values:
        return values
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    repeated: Any = output.args[0]
    unread = {node for node in graph.nodes if not node.users}
    has_blanks = any(spec.ignored is not None for spec in task.inputs)
    rewriting = _Rewriting(module, values, repeated, has_blanks=has_blanks)
    with graph.inserting_before(repeated):
        try:
            share = rewriting.share(repeated.args[0])
            if share is repeated.args[0]:
                raise _OtherLossError("it depends on no sample")
            output.args = (share,)
            values = []
        except _OtherLossError as error:
            _log.warning(
                "the loss of %s needs whole batches, which leaves out microbatches: %s, and %s",
                task.model._get_name(), task.reason, error,
            )  # fmt: skip
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in unread:
            graph.erase_node(node)
    module.recompile()
    return values or values_by_batch(module, examples)


def _is_sum(node: Any) -> bool:
    """Whether a value is a sum over all elements."""
    is_node = isinstance(node, fx.Node) and function_name(node.target) == "sum"
    return is_node and len(node.args) == 1 and not node.kwargs


def _kind_of(divisor: int) -> str:
    return "sum" if divisor else "mean"


class _Rewriting:
    """Makes nodes that compute each sample's share.

    Args:
        has_blanks: samples may have labels that do not count.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: Sequence[Values],
        repeated: fx.Node,
        *,
        has_blanks: bool,
    ) -> None:
        self._module, self._values, self._has_blanks = module, values, has_blanks
        _, n_samples = repeated.args
        self._n_samples = n_samples[0] if isinstance(n_samples, list | tuple) else n_samples
        self._varying: set[fx.Node] = set()
        for node in module.graph.nodes:
            if node.op == "placeholder" or not self._varying.isdisjoint(node.all_input_nodes):
                self._varying.add(node)

    def share(self, node: Any, divisor: int = 0) -> Any:
        """Each sample's share (n_samples,) of a mean over the batch.

        Args:
            divisor: 0: of a mean; else of a sum that so many per sample divide.

        Raises:
            _OtherLossError: it has none.
        """
        if not self._varies(node):
            if divisor:
                raise _OtherLossError("a number of samples divides what depends on no sample")
            return node
        name, args, kwargs = function_name(node.target), node.args, node.kwargs
        if args and name in _VIEWS:
            return self.share(args[0], divisor)
        is_quotient = name in _QUOTIENTS and len(args) == 2 and not kwargs.get("rounding_mode")
        if args and (name in _CASTS or is_quotient) and not any(map(self._varies, args[1:])):
            given = (self.share(args[0], divisor), *args[1:])
            return self._call(node.op, node.target, given, kwargs)
        count = [each.get(args[1]) for each in self._values] if is_quotient and not divisor else []
        if n := self._per_sample(count):
            return self.share(args[0], n)
        is_product = name in _PRODUCTS and sum(map(self._varies, args)) == 1
        if name in _SUMS or is_product:
            factors = [arg for arg in args if is_product and not self._varies(arg)]
            given = tuple(arg if arg in factors else self.share(arg, divisor) for arg in args)
            return self._call(node.op, node.target, given, kwargs)
        elements, divisor = self._elements(node, name, divisor)
        flat = self._call("call_function", torch.reshape, (elements, (self._n_samples, -1)))
        if not divisor:
            return self._call("call_function", torch.mean, (flat, 1))
        total = self._call("call_function", torch.sum, (flat, 1))
        return self._call("call_function", torch.div, (total, divisor))

    def _per_sample(self, counts: Sequence[Any]) -> int:
        """A number for each sample, which counts of all batches are multiples of; 0 if none is."""
        sizes = batch_sizes(self._values)
        if not counts or not all(type(n) is int for n in counts):
            return 0
        n = counts[0] // sizes[0]
        return n if counts == [n * size for size in sizes] else 0

    def _elements(self, node: fx.Node, name: str, divisor: int) -> tuple[fx.Node, int]:
        """The elements of which a value is the mean, or the sum, and the divisor of a sum."""
        args: list[Any] = list(node.args)
        if not divisor and args and name in _QUOTIENTS and all(map(_is_sum, args)):
            elements, counted = (part.args[0] for part in args)
            self._check_even(elements, name)
            if self._counts_all(counted, elements):
                return cast("fx.Node", elements), 0
        self._check_even(node.all_input_nodes[0], name)
        is_plain = len(args) in (1, 2) and node.kwargs.keys() <= {"dim"}
        is_plain = is_plain and not self._values[0][node].dim()
        if is_plain and name == _kind_of(divisor):
            return cast("fx.Node", args[0]), divisor
        return self._unreduced(node, name, divisor)

    def _counts_all(self, mask: Any, elements: fx.Node) -> bool:
        """Whether a mask, as wide as the elements, leaves out labels that do not count, which no
        sample has."""
        is_mask = function_name(mask.target) == "ne" and mask.args[1] == IGNORED
        is_mask = is_mask and self._all_count(mask.args[0])
        shapes = [each[node].shape for each in self._values for node in (mask, elements)]
        return is_mask and shapes[::2] == shapes[1::2]

    def _all_count(self, labels: Any) -> bool:
        """Whether all labels count, as those of inputs whose samples have none of IGNORED do."""
        while isinstance(labels, fx.Node):
            if labels.op == "placeholder":
                return not self._has_blanks
            name, value = function_name(labels.target), self._values[0][labels]
            if name in _CHOICES or (isinstance(value, Tensor) and value.is_floating_point()):
                return True
            if name not in _SELECTIONS:
                return False
            labels = labels.args[0] if labels.args else None
        return False

    def _call(self, op: str, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        return self._module.graph.create_node(op, target, args, kwargs)

    def _varies(self, node: Any) -> bool:
        """Whether a value depends on the samples."""
        if not isinstance(node, fx.Node):
            return False
        found = [each.get(node) for each in self._values]
        if isinstance(found[0], Tensor):
            if found[0].dim() > 1 and node not in self._varying:
                raise _OtherLossError(f"it has a factor {node.name} of {found[0].dim()} dims")
            return node in self._varying
        return any(value != found[0] for value in found)

    def _check_even(self, elements: fx.Node, name: str) -> None:
        """Refuse elements that are not as many of each sample."""
        found = [each[elements] for each in self._values]
        sizes = [[x.numel()] if isinstance(x, Tensor) else [0] for x in found]
        batches = batch_sizes(self._values)
        if not sample_dims([0], sizes, batches, batches[0]):
            raise _OtherLossError(f"{name} is no mean over samples")

    def _unreduced(self, node: fx.Node, name: str, divisor: int) -> tuple[fx.Node, int]:
        """A loss of torch's, without its mean or sum."""
        target: Any = node.target
        args, given = node.args, dict(node.kwargs)
        n_rows = [len(each[node.all_input_nodes[0]]) for each in self._values]
        if node.op == "call_module":
            part: Any = copy.deepcopy(self._module.get_submodule(str(target)))
            options = vars(part) | part._buffers | {"target": args[-1] if args else None, **given}
            divisor = self._check_reduction(type(part).__name__, options, divisor, n_rows)
            part.reduction = "none"
            target = f"{target}_of_samples"
            self._module.add_submodule(target, part)
        elif isinstance(target, torch._ops.OpOverload):
            known = {x.name: x.default_value for x in target._schema.arguments}
            args, given = (), known | dict(zip(known, args, strict=False)) | given
            divisor = self._check_reduction(name, given, divisor, n_rows)
            given["reduction"] = _UNREDUCED
        elif target is getattr(functional, name, None) and inspect.isfunction(target):
            args, given = (), Call(target, args, given, None).arguments
            divisor = self._check_reduction(name, given, divisor, n_rows)
            given["reduction"] = "none"
        else:
            raise _OtherLossError(f"{name} is no {_kind_of(divisor)} over samples")
        return self._call(node.op, target, args, given), divisor

    def _check_reduction(
        self, name: str, options: dict[str, Any], divisor: int, n_rows: Sequence[int]
    ) -> int:
        """Refuse a loss that is no sum, or no mean over elements, equally many of each sample;
        returns the divisor, that of a batchmean too."""
        if options.get("reduction") == "batchmean" and not divisor:
            return self._per_sample(n_rows)
        wanted = _kind_of(divisor)
        if options.get("reduction") not in (wanted, _REDUCTIONS[wanted]) or name in _OTHERS:
            raise _OtherLossError(f"{name} is no {wanted} over samples")
        if divisor or name not in _CLASS_LOSSES:
            return divisor
        if options.get("weight") is not None:
            raise _OtherLossError(f"{name} has weights of classes")
        ignored = options.get("ignore_index", IGNORED)
        if ignored != IGNORED or not self._all_count(options.get("target")):
            raise _OtherLossError(f"{name} leaves out labels of {ignored}")
        return divisor
