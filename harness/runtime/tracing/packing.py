"""Keep the packing of padded sequences, an RNN and the unpacking as one operator.

The shapes between them depend on the lengths. The joined operator takes the padded sequences and
their lengths, and returns padded outputs, so that a strategy can cut it by samples.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from harness.runtime.models.own_loss import Call
from harness.runtime.tracing.constructs import ConstructError

# Functions that a tracer records as nodes.
FUNCTIONS = (pack_padded_sequence, pad_packed_sequence)


class _Packing(nn.RNNBase):
    """An RNN over padded sequences (samples, steps, features) of some lengths each."""

    def forward(
        self, x: Tensor, lengths: Tensor, n_steps: int | None, hx: Any = None
    ) -> tuple[Any, Any]:
        """Run over the steps of each sequence; outputs of others are zeros.

        Raises:
            ConstructError: `n_steps`, those of the output, are not those of the input.
        """
        n_given = x.shape[1 if self.batch_first else 0]
        if n_steps not in (None, n_given):
            raise ConstructError(
                f"pad_packed_sequence makes {n_steps} steps of {n_given}: give it the number of "
                "steps of the padded input as total_length"
            )
        if x.is_meta:
            return super().forward(x, hx)  # type: ignore[no-any-return]
        # Integers that are drawn to time or to compare an operator are no lengths.
        counts = lengths.clamp(1, n_given).cpu()
        packed = pack_padded_sequence(x, counts, self.batch_first, enforce_sorted=False)
        y, state = super().forward(packed, hx)
        return pad_packed_sequence(y, self.batch_first, total_length=n_given)[0], state


_KINDS = {
    kind: type(f"Packed{kind.__name__}", (_Packing, kind), {}) for kind in (nn.LSTM, nn.GRU, nn.RNN)
}


def join_packed(graph: fx.Graph, model: nn.Module) -> dict[str, nn.Module]:
    """Replace packing, RNN and unpacking by a call of the RNN; returns those RNNs by path.

    Raises:
        ConstructError: a packed sequence has another reader, the length of the output depends
            on the lengths, or one RNN runs over packed sequences and over others.
    """
    found: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        if node.target is not pack_padded_sequence:
            continue
        given = Call(pack_padded_sequence, node.args, node.kwargs, None).arguments
        given["lengths"] = _on_device(given["lengths"])
        for call in list(node.users):
            part: Any = None
            if call.op == "call_module" and call.args[:1] == (node,):
                part = model.get_submodule(str(call.target))
            if type(part) not in _KINDS:
                raise ConstructError(
                    "forward gives a packed sequence to another module than an RNN"
                )
            n_steps = _unpack(graph, call, given)
            _move_before(call, n_steps)
            call.args = (given["input"], given["lengths"], n_steps, *call.args[1:])
            joined = copy.copy(part)
            joined.__class__ = _KINDS[type(part)]
            joined.batch_first = given["batch_first"]
            found[str(call.target)] = joined
        graph.erase_node(node)
    for call in graph.nodes:
        if str(call.target) in found and len(call.args) < 3:
            raise ConstructError(
                f"forward calls {call.target!r} with a packed sequence and with one that is not: "
                "pack both, or use two RNNs"
            )
    return found


def _unpack(graph: fx.Graph, call: fx.Node, given: dict[str, Any]) -> Any:
    """Let the readers of the unpacked outputs read the RNN's; returns their number of steps."""
    n_steps: Any = None
    outputs = [n for n in call.users if n.target is operator.getitem and n.args[1] == 0]
    for pad in [reader for output in outputs for reader in output.users]:
        if pad.target is not pad_packed_sequence:
            raise ConstructError(
                "forward reads a packed sequence: unpack it by pad_packed_sequence"
            )
        made = Call(pad_packed_sequence, pad.args, pad.kwargs, None).arguments
        n_steps = made["total_length"]
        if n_steps is None:
            raise ConstructError(
                "pad_packed_sequence makes as many steps as the longest sequence of a batch has, "
                "on which others depend: give it total_length=x.shape[1]"
            )
        if made["batch_first"] != given["batch_first"] or made["padding_value"]:
            raise ConstructError(
                "pad_packed_sequence has another batch_first or padding_value than the packing"
            )
        for k, result in enumerate((made["sequence"], given["lengths"])):
            for reader in [n for n in pad.users if n.args[1] == k]:
                reader.replace_all_uses_with(result)
                graph.erase_node(reader)
        graph.erase_node(pad)
    return n_steps


def _on_device(lengths: Any) -> Any:
    """Lengths before they are moved to the CPU, where PyTorch wants them."""
    is_moved = isinstance(lengths, fx.Node) and lengths.op == "call_method"
    if is_moved and (
        lengths.target == "cpu" or lengths.args[1:] in (("cpu",), (torch.device("cpu"),))
    ):
        return lengths.args[0]
    return lengths


def _move_before(call: fx.Node, n_steps: Any) -> None:
    """Compute a number of steps before a call, where it is computed after it."""
    if isinstance(n_steps, fx.Node) and call < n_steps:
        for source in n_steps.all_input_nodes:
            _move_before(call, source)
        call.prepend(n_steps)
