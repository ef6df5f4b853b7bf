"""Rewrite the loss of a whole batch as one of each sample, so that parts of a batch can compute it.

A `BatchLoss` returns its model's loss once for each sample. Where that loss is a mean over elements
of which each sample has equally many, or a sum of such means with factors that no sample changes, a
sample's loss is that of its own elements.
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
_UNREDUCED, _MEAN = 0, 1  # of torch.ops


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

    def share(self, node: Any) -> Any:
        """Each sample's share (n_samples,) of a mean over the batch.

        Raises:
            _OtherLossError: it has none.
        """
        if not self._varies(node):
            return node
        name, args, kwargs = function_name(node.target), node.args, node.kwargs
        if args and name in _VIEWS:
            return self.share(args[0])
        is_linear = name in _CASTS or (name in _QUOTIENTS and not kwargs.get("rounding_mode"))
        if args and is_linear and not any(map(self._varies, args[1:])):
            return self._call(node.op, node.target, (self.share(args[0]), *args[1:]), kwargs)
        if name in _SUMS or (name in _PRODUCTS and sum(map(self._varies, args)) == 1):
            return self._call(node.op, node.target, tuple(map(self.share, args)), kwargs)
        elements = self._elements(node, name)
        flat = self._call("call_function", torch.reshape, (elements, (self._n_samples, -1)))
        return self._call("call_function", torch.mean, (flat, 1))

    def _elements(self, node: fx.Node, name: str) -> fx.Node:
        """The elements of which a value is the mean."""
        args: list[Any] = list(node.args)
        if args and name in _QUOTIENTS and all(map(_is_sum, args)):
            elements, counted = (part.args[0] for part in args)
            self._check_even(elements, name)
            if self._counts_all(counted, elements):
                return cast("fx.Node", elements)
        self._check_even(node.all_input_nodes[0], name)
        is_plain = len(args) in (1, 2) and node.kwargs.keys() <= {"dim"}
        if name == "mean" and is_plain and not self._values[0][node].dim():
            return cast("fx.Node", args[0])
        return self._unreduced(node, name)

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

    def _unreduced(self, node: fx.Node, name: str) -> fx.Node:
        """A loss of torch's, without its mean."""
        target: Any = node.target
        args, given = node.args, dict(node.kwargs)
        if node.op == "call_module":
            part: Any = copy.deepcopy(self._module.get_submodule(str(target)))
            options = {"target": args[-1] if args else None, **given}
            self._check_mean(type(part).__name__, vars(part) | part._buffers | options, "mean")
            part.reduction = "none"
            target = f"{target}_of_samples"
            self._module.add_submodule(target, part)
        elif isinstance(target, torch._ops.OpOverload):
            known = {x.name: x.default_value for x in target._schema.arguments}
            args, given = (), known | dict(zip(known, args, strict=False)) | given
            self._check_mean(name, given, _MEAN)
            given["reduction"] = _UNREDUCED
        elif target is getattr(functional, name, None) and inspect.isfunction(target):
            args, given = (), Call(target, args, given, None).arguments
            self._check_mean(name, given, "mean")
            given["reduction"] = "none"
        else:
            raise _OtherLossError(f"{name} is no mean over samples")
        return self._call(node.op, target, args, given)

    def _check_mean(self, name: str, options: dict[str, Any], mean: object) -> None:
        """Refuse a loss that is no mean over elements, equally many of each sample."""
        if options.get("reduction") != mean or name in _OTHERS:
            raise _OtherLossError(f"{name} is no mean over samples")
        if name in _CLASS_LOSSES and options.get("weight") is not None:
            raise _OtherLossError(f"{name} has weights of classes")
        ignored = options.get("ignore_index", IGNORED)
        is_whole = ignored == IGNORED and self._all_count(options.get("target"))
        if name in _CLASS_LOSSES and not is_whole:
            raise _OtherLossError(f"{name} leaves out labels of {ignored}")
