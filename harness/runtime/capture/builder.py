"""Turn the nodes of a traced model into operators: what each computes, holds and allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn

from harness.domain.graph import KEPT, KEPT_HALF, LOSS, SCORE_FLOPS, Operator
from harness.runtime.capture.meta_run import MetaResult, parameters_of, untrained
from harness.runtime.capture.operators import (
    Attributes,
    describe_node,
    draws_random,
    is_dropout,
    is_known,
    is_opaque,
    updates_statistics,
)
from harness.runtime.capture.products import EinsumProduct, describe_product
from harness.runtime.capture.sample_dims import (
    Values,
    batch_sizes,
    changing_dims,
    is_cut_by_samples,
    named_shape,
    sample_dims,
)
from harness.runtime.capture.saved import KeptBytes, tensors_within
from harness.runtime.models.task import logits_of
from harness.runtime.tracing.constructs import WRITES, WRITTEN, function_name
from harness.runtime.tracing.hooks import has_gradient_hooks
from harness.runtime.tracing.mixing import SampleMixing

BY_SOFTMAX = ("cross_entropy", "span_cross_entropy")


def argument_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, with repetitions."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


@dataclass(frozen=True, kw_only=True)
class _NodeFacts:
    """A node that computes a tensor, and the facts from which its operator is derived.

    Attributes:
        product: a product by letters, if that is what it is.
        sources: the operators that it reads, with repetitions.
        function: its name; empty for user code that was not traced, which may have any.
        unknown: the function, if the planner does not know it and users are told so.
    """

    node: fx.Node
    kind: str
    described: Attributes
    product: EinsumProduct | None
    sources: list[fx.Node]
    parameters: dict[str, nn.Parameter]
    function: str
    unknown: str
    is_known: bool
    is_repeatable: bool


class OperatorBuilder:
    """Turns nodes into operators; skips nodes that compute no tensor."""

    def __init__(
        self,
        module: fx.GraphModule,
        measured: dict[fx.Node, MetaResult],
        by_batch: list[Values],
        batch: int,
    ) -> None:
        self._module, self._by_batch, self._batch = module, by_batch, batch
        self._batches = batch_sizes(by_batch)
        self._mixing = SampleMixing(module, by_batch)
        self._modules = dict(module.named_modules())
        self._measured, self.untrained = measured, untrained(module, measured)
        self._has_frozen = not all(p.requires_grad for p in module.parameters())
        # A node that is no operator (an element of a tuple) has the name of its producer.
        self._name_of: dict[fx.Node, str] = {}
        self._waiting: dict[fx.Node, dict[str, nn.Parameter]] = {}
        self._first_user: dict[int, str] = {}  # of each parameter, by its id
        self._unsampled: set[str] = set()  # operators that no sample affects
        self._first_call: dict[object, str] = {}  # of each batch norm with running statistics
        self._taken = {LOSS}
        self._written: frozenset[str] = module.meta.get(WRITTEN, frozenset())
        self.operators: list[Operator] = []
        self.unknown: defaultdict[str, list[str]] = defaultdict(list)
        self.nodes: dict[str, fx.Node] = {}
        self.output = ""

    def add(self, node: fx.Node) -> None:
        """Add the next node in execution order."""
        if node.op == "output":
            last = [n for n in node.all_input_nodes if n in self._name_of]
            self.output = self._name_of[last[0]] if last else ""
            if last:
                logits_of(self._measured[last[0]].value)  # raises if the loss cannot use it
            return
        value = self._measured[node].value
        if node.op == "placeholder":
            self._add_input(node, value)
        elif node.op == "get_attr":
            self._waiting[node] = parameters_of(node, self._module)
        elif tensors_within(value):
            source = next(iter(node.all_input_nodes), node)
            is_of_tuple = not isinstance(self._measured[source].value, Tensor)
            if function_name(node.target) == "getitem" and is_of_tuple:
                self._name_of[node] = self._name_of[source]  # an element or slice of a tuple
            else:
                self._add_operator(self._facts_of(node))

    def with_kept_bytes(self, loss: str) -> list[Operator]:
        """The operators with the bytes that each keeps until backward; see `saved`."""
        values = {n: tensors_within(found.value) for n, found in self._measured.items()}
        saved = {n: found.saved for n, found in self._measured.items()}
        operators = {operator.name: operator for operator in self.operators}
        kept = {k: KeptBytes(values, saved, is_half=k == KEPT_HALF) for k in (KEPT, KEPT_HALF)}
        of_node = {node: operators[name] for name, node in self.nodes.items()}
        for one in kept.values():
            for node in values:
                one.follow(node, argument_nodes(node), of_node.get(node))
            if loss not in BY_SOFTMAX:  # others save what they read
                one.keep(self.nodes[self.output])
        for name, node in self.nodes.items():
            attrs = operators[name].attrs | {key: one.of(node) for key, one in kept.items()}
            operators[name] = replace(operators[name], attrs=attrs)
        return list(operators.values())

    def _add_input(self, node: fx.Node, value: Tensor) -> None:
        self._name_of[node] = node.name
        self._taken.add(node.name)
        operator = Operator(
            name=node.name, kind="input", shape=self._named_shape(node),
            dtype=str(value.dtype).removeprefix("torch."), activation_bytes=_n_bytes([value]),
        )  # fmt: skip
        self.operators.append(operator)

    def _sample_dims(self, node: fx.Node) -> tuple[int, ...]:
        by_batch = [tensors_within(values[node])[0].shape for values in self._by_batch]
        return sample_dims(self._shape(node), by_batch, self._batches, self._batch)

    def _named_shape(self, node: fx.Node) -> dict[str, int]:
        return named_shape(self._shape(node), self._sample_dims(node))

    def _tensor(self, node: fx.Node) -> Tensor:
        return tensors_within(self._measured[node].value)[0]

    def _shape(self, node: fx.Node) -> torch.Size:
        return self._tensor(node).shape

    def _growing(self, node: fx.Node) -> tuple[int, ...]:
        """Dims that change with the batch."""
        if not self._by_batch:
            return self._sample_dims(node)
        return changing_dims([tensors_within(values[node])[0].shape for values in self._by_batch])

    def _described(self, node: fx.Node) -> tuple[str, Attributes, EinsumProduct | None]:
        """Kind and attributes; a product by letters, if that is what it is."""
        kind, attrs = describe_node(node, self._modules, len(node.all_input_nodes))
        is_user_code = is_opaque(node, self._modules) or "autocast" in attrs
        product = None if is_user_code else describe_product(node, self._shape, self._growing)
        values = (node, *(n for n in node.all_input_nodes if n in self._name_of))
        if product and all(map(self._named_shape, values)):
            return "einsum", attrs | product.attributes, product
        return kind, attrs, None

    def _free_name(self, node: fx.Node) -> str:
        """A unique operator name: the path of the node's module, or else the node's name."""
        name = str(node.target) if node.op == "call_module" else node.name
        name = name if name not in self._taken else node.name
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _written_buffers(self, node: fx.Node) -> list[str]:
        """Buffers that a node uses and that some node writes."""
        names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        if node.op == "call_module":
            owned = self._modules[str(node.target)].named_buffers()
            names = [f"{node.target}.{name}" for name, _ in owned]
        return [name for name in names if name in self._written]

    def _facts_of(self, node: fx.Node) -> _NodeFacts:
        kind, attrs, product = self._described(node)
        function, is_traced = str(attrs["function"]), not is_opaque(node, self._modules)
        is_known_node = is_traced and is_known(kind, function)
        is_named = is_traced and not is_known_node and "autocast" not in attrs
        parameters = parameters_of(node, self._module)
        for given in node.all_input_nodes:
            parameters |= self._waiting.get(given, {})
        is_hooked = any(map(has_gradient_hooks, parameters.values()))
        if is_hooked:  # its hook must see the whole gradient
            kind, attrs, product = "other", {"function": function}, None
        is_random = draws_random(node, self._module) and not is_dropout(node, self._module)
        return _NodeFacts(
            node=node, kind=kind, described=attrs, product=product, parameters=parameters,
            sources=[n for n in argument_nodes(node) if n in self._name_of],
            function=function if is_traced else "", unknown=function if is_named else "",
            is_known=is_known_node, is_repeatable=is_known_node and not (is_hooked or is_random),
        )  # fmt: skip

    def _add_operator(self, facts: _NodeFacts) -> None:
        node, found, name = facts.node, self._measured[facts.node], self._free_name(facts.node)
        attrs = facts.described | self._cutting(facts)
        if not facts.is_repeatable:
            attrs["is_repeatable"] = False
        if not self._reads_samples(facts, attrs):
            self._unsampled.add(name)
            attrs["reads_samples"] = False
        attrs |= self._state(facts, name)
        n_scores = found.forward.scores + found.backward.scores
        if n_scores and (facts.product is None or not facts.product.has_weights):
            attrs[SCORE_FLOPS] = n_scores
        if facts.unknown and facts.sources:  # not a made tensor
            self.unknown[facts.unknown].append(name)
        new = [p for p in facts.parameters.values() if id(p) not in self._first_user]
        self._first_user |= {id(p): name for p in new}
        self._name_of[node], self.nodes[name] = name, node
        operator = Operator(
            name=name, kind=facts.kind, shape=self._named_shape(node),
            inputs=[self._name_of[n] for n in facts.sources],
            dtype=str(self._tensor(node).dtype).removeprefix("torch."),
            forward_flops=found.forward.total, backward_flops=found.backward.total,
            parameter_bytes=_n_bytes(new), activation_bytes=_n_bytes(found.received),
            signature=self._signature(facts), attrs=attrs,
        )  # fmt: skip
        self.operators.append(operator)

    def _cutting(self, facts: _NodeFacts) -> Attributes:
        """Why an operator cannot be cut by samples, if it cannot."""
        found: Attributes = {}
        if self._mixes_samples(facts) or facts.node.meta.get(WRITES):
            found["mixes_samples"] = True
        if buffers := self._written_buffers(facts.node):
            found["writes_buffers"] = buffers
        made, *read = [(self._shape(n), self._sample_dims(n)) for n in (facts.node, *facts.sources)]
        if found or not is_cut_by_samples(facts.kind, facts.function, made, read):
            found["is_cut_by_samples"] = False
        return found

    def _mixes_samples(self, facts: _NodeFacts) -> bool:
        if facts.product is None:
            mixes = self._mixing.mixes(facts.node, facts.kind, is_known=facts.is_known)
        else:
            mixes = facts.product.mixes_samples
        return mixes or self._mixing.is_uneven(facts.node)

    def _reads_samples(self, facts: _NodeFacts, attrs: Attributes) -> bool:
        """Whether samples, their number or chance may affect the output."""
        is_fixed = {"is_repeatable", "mixes_samples", "writes_buffers"}.isdisjoint(attrs)
        is_fixed = is_fixed and not self._growing(facts.node) and facts.kind != "batch_norm"
        return not is_fixed or any(self._name_of[n] not in self._unsampled for n in facts.sources)

    def _state(self, facts: _NodeFacts, name: str) -> Attributes:
        """Module and parameters, and which of them are frozen or another operator's too."""
        found: Attributes = {}
        if facts.node.op == "call_module":
            found["module"] = str(facts.node.target)
        if updates_statistics(facts.node, self._modules):
            first = self._first_call.setdefault(facts.node.target, name)
            found |= {"shares_norm_with": first} if first != name else {}
        if facts.parameters:
            found["parameters"] = list(facts.parameters)
        tied = [p for p in facts.parameters.values() if id(p) in self._first_user]
        if tied:
            found |= {"tied_to": self._first_user[id(tied[0])], "tied_bytes": _n_bytes(tied)}
        given = facts.parameters.items()
        frozen = [p for n, p in given if not p.requires_grad or n in self.untrained]
        if frozen:
            found["frozen_bytes"] = _n_bytes(frozen)
        return found

    def _signature(self, facts: _NodeFacts) -> str:
        """Equal for operators that take the same time for equal numbers of samples."""
        words = [f"{name}={value}" for name, value in sorted(facts.described.items())]
        output, *inputs = [self._tensor(n) for n in (facts.node, *facts.sources)]
        shapes = ["x".join(map(str, x.shape[1:])) for x in (output, *inputs)]
        text = f"{facts.kind}({', '.join(words)}) {', '.join(shapes[1:])} -> {shapes[0]}"
        has_gradient = self._measured[facts.node].has_gradient
        if not self._has_frozen and has_gradient == output.requires_grad:
            return text
        flags = [x.requires_grad for x in (*facts.parameters.values(), *inputs)]
        return f"{text} with gradients {''.join('01'[x] for x in (*flags, has_gradient))}"


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
