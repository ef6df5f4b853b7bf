"""Carry out one step's actions on one device: segments forward and backward, pieces in and out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.domain.partition import Block
from harness.domain.schedule import Action
from harness.runtime.executor.assemble import Relative
from harness.runtime.executor.channels import Channels, Transfer
from harness.runtime.executor.deferred import WeightQueue
from harness.runtime.executor.dropout import RandomState
from harness.runtime.executor.flight import Flight
from harness.runtime.executor.layout import Layout, Piece, Want
from harness.runtime.executor.phases import Phases
from harness.runtime.executor.program import PartKey, Program, Segment, Send, WantKey
from harness.runtime.executor.randomness import random_state, repeated
from harness.runtime.executor.stash import Stash, call_with
from harness.runtime.executor.sums import Sums
from harness.runtime.precision import Precision

# How many actions ahead receives are posted: gloo starts to transfer when both ends are there.
_N_AHEAD = 2

Slot = tuple[int, int, int, bool]  # microbatch, want, part, is_backward


class Runner:
    """Runs programs on one device.

    Args:
        programs: by size of microbatch, each with its layout.
        sizes: samples of each microbatch.
        recompute: by stage, whether its forward is run again before its backward.
        reached: called with parameters whose weight gradients were computed apart.
        stash: gives each microbatch its version of the weights; None without versions.
        update: called after each microbatch's backward when there are versions.
    """

    def __init__(
        self,
        programs: dict[int, tuple[Layout, Program]],
        sizes: Sequence[int],
        actions: Sequence[Action],
        channels: Channels,
        phases: Phases,
        precision: Precision,
        recompute: Sequence[bool],
        queues: Mapping[int, WeightQueue],
        random: RandomState,
        reached: Callable[[nn.Parameter], None],
        stash: Stash | None,
        update: Callable[[], None],
    ) -> None:
        self._stash, self._update = stash, update
        self._programs, self._sizes, self._actions = programs, list(sizes), list(actions)
        self._channels, self._phases, self._precision = channels, phases, precision
        self._recompute, self._queues, self._reached = recompute, queues, reached
        self._random = random
        self._device = channels.buffers.device
        layouts = {size: layout for size, (layout, _) in programs.items()}
        self._sums = Sums(layouts, channels, phases)
        self._transfers: dict[Slot, Transfer] = {}
        self._flights: list[Flight] = []
        self._receives = [list(self._demands(action)) for action in self._actions]
        self.loss: Tensor | None = None

    def run(self, flights: list[Flight]) -> None:
        """One step: every action in order.

        Raises:
            PeerError: another rank died or hangs.
        """
        self._flights, self.loss = flights, None
        posted = 0
        for index, action in enumerate(self._actions):
            while posted < min(index + 1 + _N_AHEAD, len(self._actions)):
                self._post(posted)
                posted += 1
            name = f"stage{action.stage} #{action.microbatch}"
            self._random.microbatch = action.microbatch
            if action.kind == "forward":
                self._phases.begin("forward", name)
                if self._stash is not None:
                    flights[action.microbatch].version = self._stash.newest()
                self._forward(action)
            elif action.kind == "backward":
                self._phases.begin("backward", name)
                self._backward(action, name)
                self._apply(flights[action.microbatch])
            else:
                self._phases.begin("backward", f"{name} weights")
                for parameter in self._queues[action.stage].flush(action.microbatch):
                    self._reached(parameter)
            self._channels.drop_finished_sends()
        assert not self._transfers, "every receive that was posted is waited for"
        self._flights = []

    def _apply(self, flight: Flight) -> None:
        """With versions, update the weights by this microbatch alone."""
        if self._stash is not None and flight.version is not None:
            self._stash.hand_over(flight.version)
            flight.version = None
            self._update()
            self._stash.updated()

    # Receives

    def _layout(self, microbatch: int) -> tuple[Layout, Program]:
        return self._programs[self._sizes[microbatch]]

    def _demands(self, action: Action) -> Any:
        """What an action waits for, in the order in which the others send it."""
        if action.kind == "weight":
            return
        layout, program = self._layout(action.microbatch)
        segments = program.stages.get(action.stage, ())
        found: list[tuple[tuple[int, ...], Want, Piece]] = []
        for segment in segments:
            if action.kind == "forward":
                for want in segment.fetches:
                    for piece in self._pieces(layout, want):
                        found.append((_order(layout, want, piece), want, piece))
            else:
                for send in self._sends(layout, segment):
                    if send.want.value in program.differentiable:
                        order = _order(layout, send.want, send.piece)
                        found.append(((-send.want.first_consumer, *order), send.want, send.piece))
        is_backward = action.kind == "backward"
        for _, want, piece in sorted(found, key=lambda entry: entry[0]):
            yield want, piece, _sizes_of(piece.region, layout, want), is_backward

    def _pieces(self, layout: Layout, want: Want) -> list[Piece]:
        """What is received for a want piece by piece."""
        return [] if self._sums.serve(layout.samples, want) else want.remote

    def _sends(self, layout: Layout, segment: Segment) -> list[Send]:
        """What is sent piece by piece."""
        return [s for s in segment.sends if not self._sums.serve(layout.samples, s.want)]

    def _post(self, index: int) -> None:
        action = self._actions[index]
        layout, _ = self._layout(action.microbatch)
        for want, piece, shape, is_backward in self._receives[index]:
            slot = (action.microbatch, want.number, piece.part.index, is_backward)
            self._transfers[slot] = self._channels.receive(
                shape, self._dtype(layout, want), want, piece, action.microbatch,
                is_backward=is_backward,
            )  # fmt: skip

    def _dtype(self, layout: Layout, want: Want) -> torch.dtype:
        """What a value travels as: under autocast in autocast's dtype."""
        dtype = layout.tensor(want.value).dtype
        return self._precision.transfer_dtype(dtype)

    def _take(self, microbatch: int, want: Want, piece: Piece, *, is_backward: bool) -> Tensor:
        slot = (microbatch, want.number, piece.part.index, is_backward)
        transfer = self._transfers.pop(slot)
        kind = "gradient of " if is_backward else ""
        name = f"wait {kind}{piece.part.operator} #{microbatch} from rank {transfer.source}"
        n_bytes = transfer.buffer.numel() * transfer.buffer.element_size()
        found: Tensor = self._phases.wait(name, lambda: self._channels.wait(transfer), n_bytes)
        return found

    # Forward

    def _forward(self, action: Action) -> None:
        microbatch, stage = action.microbatch, action.stage
        layout, program = self._layout(microbatch)
        flight = self._flights[microbatch]
        for position, segment in enumerate(program.stages[stage]):
            for want in segment.fetches:
                self._assemble(flight, layout, program, want, microbatch)
            outputs = self._compute(flight, segment, (stage, position))
            flight.outputs[stage, position] = outputs
            for key, output in zip(segment.outputs, outputs, strict=True):
                self._cut_off(flight, program, key, output)
            self._start_sums(flight, layout, segment, microbatch)
            for send in self._sends(layout, segment):
                held = flight.leaves[send.key].detach()
                region = Relative.of(send.piece.region, program.blocks[send.key])
                piece = region.of_tensor(held).to(self._dtype(layout, send.want))
                self._channels.send(piece, send.want, send.piece, microbatch, is_backward=False)
            if self._recompute[stage] and segment.is_differentiable:
                flight.outputs[stage, position] = ()

    def _compute(
        self, flight: Flight, segment: Segment, place: tuple[int, int]
    ) -> tuple[Tensor, ...]:
        inputs = [flight.input(key) for key in segment.inputs]
        is_kept = not self._recompute[place[0]]
        if not is_kept:
            flight.random[place] = random_state(self._device)
        with contextlib.nullcontext() if is_kept else torch.no_grad(), self._precision.autocast():
            return _call(segment, flight, inputs)

    def _cut_off(self, flight: Flight, program: Program, key: PartKey, output: Tensor) -> None:
        """Keep an output as a leaf for whoever reads it after its segment."""
        leaf = output.detach()
        if key.value == "loss":
            self.loss = leaf if self.loss is None else self.loss + leaf
        elif key.value in program.differentiable and leaf.is_floating_point():
            leaf.requires_grad_()
        flight.leaves[key] = leaf

    def _start_sums(
        self, flight: Flight, layout: Layout, segment: Segment, microbatch: int
    ) -> None:
        for key in segment.outputs:
            want = self._sums.of(layout.samples, key)
            if want is not None:
                shape, dtype = _sizes_of(want.block, layout, want), self._dtype(layout, want)
                whole = self._channels.buffers.take(shape, dtype).copy_(flight.leaves[key].detach())
                self._sums.start(whole, layout.samples, want, microbatch, is_backward=False)

    def _assemble(
        self, flight: Flight, layout: Layout, program: Program, want: Want, microbatch: int
    ) -> None:
        """Make a want of what other devices sent and what is here."""
        shape, dtype = _sizes_of(want.block, layout, want), self._dtype(layout, want)
        first = want.pieces[0]
        if self._sums.serve(layout.samples, want):
            whole = self._sums.take(want, microbatch, is_backward=False)
        elif len(want.pieces) == 1 and first.region == want.block:
            whole = self._take(microbatch, want, first, is_backward=False)
        else:
            whole = self._channels.buffers.take(shape, dtype)
            if want.is_sum:
                whole.zero_()
            for piece in want.pieces:
                self._place(flight, program, want, piece, whole, microbatch)
        leaf = whole.detach()
        if want.value in program.differentiable:
            leaf.requires_grad_()
        flight.leaves[WantKey(want.number)] = leaf

    def _place(
        self,
        flight: Flight,
        program: Program,
        want: Want,
        piece: Piece,
        whole: Tensor,
        microbatch: int,
    ) -> None:
        target = Relative.of(piece.region, want.block).of_tensor(whole)
        if piece.part.device != want.device:
            source = self._take(microbatch, want, piece, is_backward=False)
        else:
            key = _key(want, piece)
            held = flight.leaves[key].detach()
            source = Relative.of(piece.region, program.blocks[key]).of_tensor(held)
        if want.is_sum:
            target.add_(source)
        else:
            target.copy_(source)
        if piece.part.device != want.device:
            self._channels.buffers.give_back(source)

    # Backward

    def _backward(self, action: Action, name: str) -> None:
        microbatch, stage = action.microbatch, action.stage
        layout, program = self._layout(microbatch)
        flight = self._flights[microbatch]
        for position in reversed(range(len(program.stages[stage]))):
            segment = program.stages[stage][position]
            self._collect(flight, layout, program, segment, microbatch)
            if segment.is_differentiable:
                if self._recompute[stage]:
                    self._phases.begin("forward", f"{name} recompute")
                    self._repeat(flight, segment, (stage, position))
                    self._phases.begin("backward", name)
                self._differentiate(flight, segment, (stage, position), action)
            flight.outputs.pop((stage, position), None)
            for want in sorted(segment.fetches, key=lambda w: -w.first_consumer):
                self._return(flight, layout, program, want, microbatch)
            for key in segment.outputs:
                flight.leaves.pop(key, None)

    def _collect(
        self, flight: Flight, layout: Layout, program: Program, segment: Segment, microbatch: int
    ) -> None:
        """Add the gradients that other devices send to those of the outputs."""
        self._collect_sums(flight, layout, program, segment, microbatch)
        sends = [s for s in self._sends(layout, segment) if s.want.value in program.differentiable]
        order = {id(s): (-s.want.first_consumer, *_order(layout, s.want, s.piece)) for s in sends}
        for send in sorted(sends, key=lambda s: order[id(s)]):
            gradient = self._take(microbatch, send.want, send.piece, is_backward=True)
            leaf = flight.leaves[send.key]
            region = Relative.of(send.piece.region, program.blocks[send.key])
            if leaf.grad is None and region.is_all and gradient.dtype == leaf.dtype:
                # Not given back: gradients further back may be views of it, and on their way.
                leaf.grad = gradient
            else:
                flight.add_gradient(send.key, region, gradient)
                self._channels.buffers.give_back(gradient)

    def _collect_sums(
        self, flight: Flight, layout: Layout, program: Program, segment: Segment, microbatch: int
    ) -> None:
        """A part of a sum has the gradient of all who read the sum."""
        for key in segment.outputs:
            want = self._sums.of(layout.samples, key)
            if want is not None and want.value in program.differentiable:
                gradient = self._sums.take(want, microbatch, is_backward=True)
                flight.add_gradient(key, Relative.of(want.block, want.block), gradient)

    def _repeat(self, flight: Flight, segment: Segment, place: tuple[int, int]) -> None:
        """Run a segment's forward again, this time for its gradients."""
        with repeated(flight.random.pop(place), self._device), _frozen(segment.module):
            inputs = [flight.input(key) for key in segment.inputs]
            with torch.enable_grad(), self._precision.autocast():
                flight.outputs[place] = _call(segment, flight, inputs)

    def _differentiate(
        self, flight: Flight, segment: Segment, place: tuple[int, int], action: Action
    ) -> None:
        outputs: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for key, output in zip(segment.outputs, flight.outputs[place], strict=True):
            if not output.requires_grad:
                continue
            if key.value == "loss":
                outputs.append(output)
                gradients.append(None)
            elif flight.leaves[key].grad is not None:
                outputs.append(output)
                gradients.append(flight.leaves[key].grad)
        if not outputs:
            return
        queue = self._queues.get(action.stage)
        with contextlib.nullcontext() if queue is None else queue.filling(action.microbatch):
            torch.autograd.backward(outputs, gradients)

    def _return(
        self, flight: Flight, layout: Layout, program: Program, want: Want, microbatch: int
    ) -> None:
        """Send the gradient of a want back to those who contributed to it."""
        leaf = flight.leaves.pop(WantKey(want.number))
        if want.value in program.differentiable:
            gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            pieces = want.pieces
            if self._sums.serve(layout.samples, want):
                gradient, pieces = gradient.contiguous(), ()
                self._sums.start(gradient, layout.samples, want, microbatch, is_backward=True)
            for piece in sorted(pieces, key=lambda p: _order(layout, want, p)):
                region = Relative.of(piece.region, want.block)
                share = region.of_tensor(gradient)
                if piece.part.device != want.device:
                    self._channels.send(share, want, piece, microbatch, is_backward=True)
                else:
                    key = _key(want, piece)
                    held = Relative.of(piece.region, program.blocks[key])
                    flight.add_gradient(key, held, share)
        if want.stage not in self._queues:  # else gradients of weights still need it
            self._channels.buffers.give_back(leaf.detach())


def _call(segment: Segment, flight: Flight, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    if flight.version is not None:
        return call_with(segment.module, flight.version, inputs)
    found: tuple[Tensor, ...] = segment.module(*inputs)
    return found


def _order(layout: Layout, want: Want, piece: Piece) -> tuple[int, ...]:
    """The order in which a device sends: as it computes."""
    return layout.position[piece.part.operator], piece.part.index, want.number


def _key(want: Want, piece: Piece) -> PartKey:
    return PartKey(want.value, piece.part.operator, piece.part.index)


def _sizes_of(block: Block, layout: Layout, want: Want) -> tuple[int, ...]:
    """The shape of a region; dims that a block does not name are whole."""
    sizes = tuple(stop - start for start, stop in block)
    return (*sizes, *layout.tensor(want.value).shape[len(sizes) :])


@contextlib.contextmanager
def _frozen(module: fx.GraphModule) -> Any:
    """Leave running statistics alone while a forward is repeated."""
    tracking = [m for m in module.modules() if getattr(m, "track_running_stats", False)]
    for norm in tracking:
        norm.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm in tracking:
            norm.track_running_stats = True  # type: ignore[assignment]
