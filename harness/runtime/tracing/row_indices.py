"""Join `x[torch.arange(len(x)), index]` into one operator that keeps samples apart.

Models pick one position of each sample by it, such as the last token. By itself the number of a
row depends on the batch that the row is in.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from harness.runtime.capture.operators import function_name
from harness.runtime.capture.sample_dims import values_by_batch

_INDEXING = (operator.getitem, torch.ops.aten.index.Tensor)


def picked(x: Tensor, *indices: Any) -> Tensor:
    """Index each row of x (samples, ...) by its own indices, each (samples,)."""
    return x[(torch.arange(len(x), device=x.device), *indices)]


def join_row_indices(module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
    """Rewrite a traced model in place."""
    found = list(_candidates(module))
    by_batch = values_by_batch(module, examples) if found else []
    for node, source, (rows, *indices) in found:
        sizes = [(values[rows].shape, values[source].shape[:1]) for values in by_batch]
        if sizes and all(a == b for a, b in sizes):
            node.target, node.args = picked, (source, *indices)
            if not rows.users:
                module.graph.erase_node(rows)
    module.recompile()


def _candidates(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, Sequence[Any]]]:
    """Nodes that index by a range of open size first; what they index, and all indices."""
    for node in module.graph.nodes:
        if node.target in _INDEXING and isinstance(node.args[1], list | tuple):
            source, indices = node.args
            rows = indices[0] if indices else None
            if isinstance(rows, fx.Node) and function_name(rows.target) == "arange":
                end = rows.args[0] if len(rows.args) == 1 else None
                if isinstance(end, fx.Node) and all(isinstance(n, fx.Node) for n in indices):
                    yield node, source, indices
