"""Find attentions between projections in an exported graph, and join each into one operator.

    x -> linear -> view -> transpose --+
    x -> linear -> view -> rotary  ----+-- attention -> transpose -> view -> linear ->
    x -> linear -> view -> repeat  ----+

An attention is PyTorch's function, or a softmax between two products. The dim of the heads is
propagated from the projections through every operator in between, and then that of the positions.
A value from elsewhere (a mask, relative positions) has no such dim, or is sliced along it. Where an
operator is not known, the graph stays as it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from harness.domain.partition import Interval
from harness.runtime.capture.operators import draws_random
from harness.runtime.tracing.attention_joining import JoinedGraph, computed_bias, share_of
from harness.runtime.tracing.attention_positions import find_positions
from harness.runtime.tracing.constructs import AUTOCAST, HOOKS, NO_GRAD, function_name
from harness.runtime.tracing.dim_rules import (
    ATTENTION,
    LINEAR,
    PASSED,
    PRODUCTS,
    SPLITS,
    DimRules,
    NotCuttableError,
    is_size,
    natural,
    operator_name,
    require,
    shape_of,
    size_of,
    slice_bounds,
)
from harness.runtime.tracing.matrix_products import transposed_linear
from harness.runtime.tracing.module_calls import without_call

_AFTER_SOFTMAX = ("dropout", "to", "type_as", "contiguous", "clone", "slice")


def join_attentions(module: fx.GraphModule) -> None:
    """Join every attention that can be cut by heads."""
    for node in list(filter(_is_attention, module.graph.nodes)):
        for is_stacked in (False, True):
            try:
                found = _Region(module, node, is_stacked=is_stacked)
                found.propagate()
            except NotCuttableError:
                continue
            found.join()
            break
    module.graph.lint()
    module.recompile()


def _is_attention(node: fx.Node) -> bool:
    """Whether a node is PyTorch's function, or the product of a softmax with the values."""
    if node.target is ATTENTION:
        return True
    source: Any = node.args[0] if operator_name(node) in PRODUCTS else None
    while isinstance(source, fx.Node) and operator_name(source) in _AFTER_SOFTMAX:
        source = source.args[0]
    return isinstance(source, fx.Node) and operator_name(source) == "softmax"


class _HeadRules(DimRules):
    """The dim of the heads, which is outermost where a view merges it with others.

    Args:
        stacked: projections of which a view stacks queries, keys and values before the heads.

    Attributes:
        sections: of the output of each projection, where operators divide it.
    """

    def __init__(self, stacked: set[fx.Node]) -> None:
        super().__init__()
        self._stacked = stacked
        self.sections: dict[fx.Node, set[Interval]] = {}
        self._spans: dict[fx.Node, tuple[fx.Node, Interval]] = {}

    def start(self, projection: fx.Node) -> int:
        self._spans[projection] = projection, (0, size_of(projection, -1))
        return len(shape_of(projection)) - 1

    def of_view(self, node: fx.Node, source: fx.Node, place: int) -> int:
        if source not in self._stacked or len(shape_of(node)) - place < 3:
            return place
        size, n_stacked = size_of(source, -1), size_of(node, place)
        edges = [size * k // n_stacked for k in range(n_stacked + 1)]
        self.sections[source] = {*itertools.pairwise(edges)}
        return place + 1

    def of_attention(self, operands: Sequence[fx.Node]) -> int:
        """Heads are among the first dims of stacks of matrices."""
        places = {(len(shape_of(n)), self.dims.get(n)) for n in operands}
        require(len(places) == 1)
        ((rank, position),) = places
        require(position is not None and position < rank - 2)
        assert position is not None
        return position

    def of_element(self, node: fx.Node, source: fx.Node, position: int) -> int:
        whole = source.all_input_nodes[0]
        if whole in self._spans and shape_of(node)[position] != shape_of(whole)[position]:
            sizes = [value.shape[position] for value in source.meta["val"]]
            start = sum(sizes[: natural(node.args[1], len(sizes))])
            self._divide(whole, node, (start, start + size_of(node, position)))
        return position

    def of_cut(self, node: fx.Node, name: str, position: int) -> int:
        if name in ("repeat_interleave", "chunk"):
            return position
        source = node.all_input_nodes[0]
        require(source in self._spans)
        if name == "slice":
            bounds = slice_bounds(node, size_of(source, position))
            for k, value in enumerate(node.args[2:4], start=2):
                if value == bounds[k - 2]:  # not one that stands for the end
                    self.numbers.append((node, k, None))
            self._divide(source, node, bounds)
        else:
            sizes = node.args[1]
            indices = [None] if isinstance(sizes, int) else range(len(sizes))  # type: ignore[arg-type]
            self.numbers += [(node, 1, index) for index in indices]
        return position

    def _divide(self, whole: fx.Node, part: fx.Node, span: Interval) -> None:
        projection, (start, _) = self._spans[whole]
        span = span[0] + start, span[1] + start
        self._spans[part] = projection, span
        self.sections.setdefault(projection, set()).add(span)

    def spans_of(self, projection: fx.Node) -> tuple[Interval, ...]:
        """The sections of a projection's output, in order; refuses a gap between them."""
        size = size_of(projection, -1)
        spans = tuple(sorted(self.sections.get(projection, {(0, size)})))
        ends = [0, *(stop for _, stop in spans)]
        require([start for start, _ in spans] == ends[:-1] and ends[-1] == size)
        require(computed_bias(projection) is None or len({b - a for a, b in spans}) == 1)
        return spans


class _Region:
    """The operators from an attention's projections to the one of its output.

    Args:
        is_stacked: a view of a projection stacks queries, keys and values before the heads.
    """

    def __init__(self, module: fx.GraphModule, attention: fx.Node, *, is_stacked: bool) -> None:
        self._module, self._attention = module, attention
        self._after = self._find_after()
        self._last = self._after[-1]
        self._projections: set[fx.Node] = set()
        self._leads: dict[fx.Node, bool] = {}
        self._inside = self._find_inside()
        self._order = [n for n in module.graph.nodes if n in self._inside]
        marks = {(n.meta.get(NO_GRAD), str(n.meta.get(AUTOCAST))) for n in self._order}
        require(len(marks) == 1 and not any(n.meta.get(HOOKS) for n in self._order))
        outside = (u for n in self._order if n is not self._last for u in n.users)
        require(self._inside.issuperset(outside))
        self._heads = _HeadRules(self._projections if is_stacked else set())
        self._n_groups = 0

    # Finding

    def _find_after(self) -> list[fx.Node]:
        """The operators from the attention to the projection of its output."""
        node, found = self._attention, list[fx.Node]()
        while True:
            require(len(node.users) == 1)
            (node,) = node.users
            found.append(node)
            if self._is_projection(node):
                require(computed_bias(node) is None)
                return found
            require(operator_name(node) in PASSED)

    def _find_inside(self) -> set[fx.Node]:
        given = self._attention.args[: 3 if self._attention.target is ATTENTION else 2]
        require(all(isinstance(n, fx.Node) and self._find_leading(n) for n in given))
        self._leads |= dict.fromkeys((self._attention, *self._after), True)
        for node in self._after[:-1]:  # such as a gate
            list(map(self._find_leading, node.all_input_nodes))
        return {node for node, leads in self._leads.items() if leads}

    def _find_leading(self, node: fx.Node) -> bool:
        """Whether known operators lead from a projection to a value; remember all on the way."""
        if node in self._leads:
            return self._leads[node]
        if self._is_projection(node):
            self._projections.add(node)
            self._leads[node] = True
        elif is_size(node):
            self._leads[node] = False
        elif operator_name(node) not in PASSED:
            require(node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor))
            self._leads[node] = False
        else:
            self._leads[node] = any(list(map(self._find_leading, node.all_input_nodes)))
        return self._leads[node]

    def _is_projection(self, node: fx.Node) -> bool:
        if node.target is LINEAR:
            weight: Any = node.args[1]
            return bool(weight.op == "get_attr")
        return node.target is transposed_linear

    # Propagating

    def propagate(self) -> None:
        """Find the dim of heads of every value.

        Raises:
            NotCuttableError: an operator mixes heads, or they cannot be divided.
        """
        rules, source = self._heads, self._last.all_input_nodes[0]
        rules.propagate(self._order[:-1], self._projections)
        require(rules.dims[source] == len(shape_of(source)) - 1)
        whole = {n: k for n, k in rules.dims.items() if function_name(n.target) not in SPLITS}
        self._n_groups = math.gcd(*(size_of(node, dim) for node, dim in whole.items()))
        require(len(shape_of(self._last)) == 3 and self._n_groups > 1)
        first = next(n for n in self._order if n in self._projections).all_input_nodes[0]
        sizes = {n for node in self._order for n in node.all_input_nodes if is_size(n)}
        require(all(share_of(size, first) is not None for size in sizes))
        spans = itertools.chain(*rules.sections.values())
        require(all(edge % self._n_groups == 0 for edge in itertools.chain(*spans)))
        for projection in self._projections:
            rules.spans_of(projection)

    # Joining

    def join(self) -> None:
        """Replace the operators by one."""
        spans = {node: self._heads.spans_of(node) for node in self._projections}
        spans[self._last] = ((0, size_of(self._last.all_input_nodes[0], -1)),)
        positions = find_positions(
            self._order, self._projections, self._attention, self._heads.dims
        )
        joined = JoinedGraph(self._order, spans, self._heads.slices, positions)
        draws = any(draws_random(node, self._module) for node in self._order)
        region = joined.region(self._heads.numbers, self._n_groups, draws=draws)
        with self._module.graph.inserting_before(self._last):
            call = self._module.graph.call_function(region, (*joined.inputs, *joined.held))
        call.meta = without_call(self._last.meta)
        self._last.replace_all_uses_with(call)
        for node in reversed(self._order):
            self._module.graph.erase_node(node)
