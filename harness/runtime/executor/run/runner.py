"""Run one step's actions on one device: segments forward and backward, with their transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from harness.domain.schedule import Action
from harness.domain.strategy import Strategy
from harness.runtime.devices.precision import Precision, has_gradients
from harness.runtime.engines.phases import Phases
from harness.runtime.executor.cache.activations import Tap
from harness.runtime.executor.gradients.deferred import WeightGradients
from harness.runtime.executor.program.program import (
    InputKey,
    PartKey,
    Program,
    Route,
    Segment,
    WantKey,
)
from harness.runtime.executor.run.flight import (
    Flight,
    Stash,
    call_with,
    on_buffer_copies,
    random_state,
    repeated,
)
from harness.runtime.executor.sharded.gathers import WeightGathers
from harness.runtime.executor.shards.pointwise import RandomState
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.executor.transport.messages import Message, Place
from harness.runtime.executor.transport.moves import Fetch, Moves, Receives, Sums


class Runner:
    """Runs programs on one device.

    Args:
        programs: programs and their moves by microbatch size.
        gradients: weight gradients that are computed outside of autograd.
        stash: gives each microbatch its version of the weights; None without versions.
        update: called after each microbatch's backward if there are versions.
        gathers: gathers weights that are freed between their uses.
        tap: records the values at a frozen boundary; None if none are kept.
    """

    def __init__(
        self,
        strategy: Strategy,
        programs: dict[int, tuple[Program, Moves]],
        channels: Channels,
        phases: Phases,
        precision: Precision,
        gradients: WeightGradients,
        random: RandomState,
        stash: Stash | None,
        update: Callable[[], None],
        gathers: WeightGathers,
        tap: Tap | None,
    ) -> None:
        self._gathers = gathers
        self._stash, self._update, self._tap = stash, update, tap
        self._programs, self._sizes = programs, strategy.microbatch_sizes()
        self._channels, self._phases, self._precision = channels, phases, precision
        self._recompute = [stage.recompute for stage in strategy.stages]
        self._gradients = gradients
        self._random = random
        self._device = channels.device
        self._sums = Sums(channels, phases, len(self._sizes))
        self._receives: Receives
        self._receives_of: dict[tuple[Action, ...], Receives] = {}
        self._flights: dict[int, Flight] = {}
        self._at_action = 0  # number of the action in the step
        self.loss = torch.zeros((), device=self._device)

    def run(self, actions: tuple[Action, ...], fed: Sequence[Flight], first: int = 0) -> None:
        """Run every action in order.

        Args:
            actions: actions of a step, whose first microbatch has number 0.
            fed: the step's microbatches.
            first: number of microbatches since the last flush, before this step.

        Raises:
            PeerError: another rank died or hangs.
        """
        self.loss = torch.zeros((), device=self._device)
        if actions not in self._receives_of:
            self._receives_of[actions] = Receives(
                actions, self._at, len(self._sizes), self._channels, self._phases, self._dtype,
                first,
            )  # fmt: skip
        self._receives = self._receives_of[actions]
        self._receives.start(first)
        self._gathers.start_step(actions, is_muted=self._channels.is_muted)
        numbered = (each._replace(microbatch=first + each.microbatch) for each in actions)
        for self._at_action, action in enumerate(numbered):
            number, stage = self._number(action.microbatch), action.stage
            self._random.microbatch = number
            if action.kind == "forward":
                self._phases.begin("forward", stage=stage, microbatch=number)
                self._flights[action.microbatch] = fed[number]
                if self._stash is not None:
                    fed[number].version = self._stash.newest()
                at = self._at_action
                backward = actions[at]._replace(kind="backward")
                self._forward(action, is_followed=actions[at + 1 : at + 2] == (backward,))
            elif action.kind == "backward":
                self._phases.begin("backward", stage=stage, microbatch=number)
                self._backward(action)
                self._gradients.flush_joined(stage)
                self._apply(self._flights[action.microbatch])
                if self._stash is not None:
                    del self._flights[action.microbatch]
            else:
                self._phases.begin("backward", pass_="weights", stage=stage, microbatch=number)
                self._gradients.flush(stage, action.microbatch)
        self._gathers.finish_updated()  # of weights that no segment uses
        self._receives.finish()
        if self._stash is None:
            self._flights.clear()

    def forget(self) -> None:
        """Drop microbatches whose backward will not run."""
        self._flights.clear()

    def modules(self) -> Iterator[nn.Module]:
        for program, _ in self._programs.values():
            yield from program.modules()

    def buffers(self) -> Iterator[Tensor]:
        """Buffers that a step may change, such as running statistics."""
        for module in self.modules():
            yield from module.buffers()

    def _apply(self, flight: Flight) -> None:
        """With versions, update the weights by this microbatch's gradients."""
        if self._stash is not None and flight.version is not None:
            self._stash.move_gradients(flight.version)
            flight.version = None
            self._update()
            self._stash.updated()

    # Messages

    def _number(self, microbatch: int) -> int:
        return microbatch % len(self._sizes)

    def _at(self, microbatch: int) -> tuple[Program, Moves]:
        return self._programs[self._sizes[self._number(microbatch)]]

    def _dtype(self, sent: Message | Fetch) -> torch.dtype:
        """The dtype in which a value is sent: autocast's if it is on and weights made the value."""
        return self._precision.transfer_dtype(sent.dtype) if sent.is_rounded else sent.dtype

    def _send(self, flight: Flight, message: Message, microbatch: int) -> None:
        dtype = self._dtype(message)
        pieces: list[Tensor] = []
        for route in message.routes:
            if message.is_backward:
                flight.own_gradient(key := WantKey(route.want.number))  # the send reads it later
                piece = route.in_want.take(flight.gradient(key))
            else:
                piece = route.held.take(flight.leaves[route.source].detach())
            pieces.append(piece.to(dtype))
        joined = pieces[0] if len(pieces) == 1 else torch.cat([p.reshape(-1) for p in pieces])
        self._channels.send(joined, message, microbatch)

    # Forward

    def _forward(self, action: Action, *, is_followed: bool) -> None:
        """Run forward; `is_followed` by its own backward, for which its last part stays."""
        microbatch, stage = action.microbatch, action.stage
        program, moves = self._at(microbatch)
        flight = self._flights[microbatch]
        for position, segment in enumerate(program.stages[stage]):
            place = stage, position
            for fetch in moves.fetches[place]:
                self._assemble(flight, fetch, microbatch)
            self._gathers.before((self._at_action, position), segment.units)
            is_kept = not self._recompute[stage] or (is_followed and segment.is_last)
            outputs = self._compute(flight, segment, place, is_kept=is_kept)
            outputs = self._gathers.kept(segment.units, outputs)
            self._gathers.after((self._at_action, position))
            flight.outputs[place] = outputs
            for key, output in zip(segment.outputs, outputs, strict=True):
                self._detach(flight, program, key, output)
            if self._tap is not None and not self._channels.is_muted:
                self._record(self._tap, flight, program, place, microbatch)
            self._start_sums(flight, moves, segment, microbatch)
            for message in moves.leaving.get(place, ()):
                self._send(flight, message, microbatch)
            if not is_kept and segment.is_differentiable:
                flight.outputs[place] = ()

    def _compute(
        self, flight: Flight, segment: Segment, place: tuple[int, int], *, is_kept: bool
    ) -> tuple[Tensor, ...]:
        inputs = [flight.input(key) for key in segment.inputs]
        if not is_kept:
            flight.random[place] = random_state(self._device)
        with contextlib.nullcontext() if is_kept else torch.no_grad(), self._precision.autocast():
            if self._tap is not None and segment.is_apart and self._tap.is_timing:
                return self._tap.timed(lambda: _call(segment, flight, inputs))
            return _call(segment, flight, inputs)

    def _detach(self, flight: Flight, program: Program, key: PartKey, output: Tensor) -> None:
        """Keep an output as a leaf, for its readers after its segment."""
        leaf = output.detach()
        if key.value == "loss":
            if key in program.counted:
                self.loss = self.loss + leaf * flight.loss_share
        elif key.value in program.differentiable and has_gradients(leaf):
            leaf.requires_grad_()
        flight.leaves[key] = leaf

    def _record(
        self, tap: Tap, flight: Flight, program: Program, place: Place, microbatch: int
    ) -> None:
        """Record rows at the frozen boundary that this segment has fetched or computed."""
        number = self._number(microbatch)
        fetched: list[InputKey] = [fetch.key for fetch in self._at(microbatch)[1].fetches[place]]
        for key in (*fetched, *program.stages[place[0]][place[1]].outputs):
            if (found := program.recorded.get(key)) is not None:
                tap.take(found, flight.leaves[key], sum(self._sizes[:number]))

    def _start_sums(self, flight: Flight, moves: Moves, segment: Segment, microbatch: int) -> None:
        for key in segment.outputs:
            for fetch, held in moves.sums.get(key, ()):
                if not fetch.sum.goes:
                    continue
                whole = self._allocated(fetch)
                whole.copy_(held.take(flight.leaves[key].detach()))
                self._sums.start(whole, fetch, microbatch, is_backward=False)

    def _allocated(self, fetch: Fetch) -> Tensor:
        return torch.empty(fetch.shape, dtype=self._dtype(fetch), device=self._device)

    def _assemble(self, flight: Flight, fetch: Fetch, microbatch: int) -> None:
        """Assemble a want from received and local pieces."""
        route = fetch.whole
        if fetch.sum.goes:
            whole = self._sums.take(fetch, microbatch, is_backward=False)
        elif route is not None and (route.held.is_all or not route.is_local):
            whole = self._piece(flight, route, microbatch)
        else:
            whole = self._allocated(fetch)
            is_added = fetch.want.is_sum and not fetch.routes[0].in_want.is_all
            if is_added:
                whole.zero_()
            for each in fetch.routes:
                target = each.in_want.take(whole)
                write = target.add_ if is_added else target.copy_
                write(self._piece(flight, each, microbatch))
                is_added = fetch.want.is_sum
        leaf = whole.detach()
        if fetch.is_differentiable:
            leaf.requires_grad_()
        flight.leaves[fetch.key] = leaf

    def _piece(self, flight: Flight, route: Route, microbatch: int) -> Tensor:
        if route.is_local:
            return route.held.take(flight.leaves[route.source].detach())
        return self._receives.take(microbatch, route, is_backward=False)

    # Backward

    def _backward(self, action: Action) -> None:
        microbatch, stage = action.microbatch, action.stage
        number = self._number(microbatch)
        program, moves = self._at(microbatch)
        flight = self._flights[microbatch]
        for moment, position in enumerate(reversed(range(len(program.stages[stage])))):
            place = stage, position
            segment = program.stages[stage][position]
            self._gathers.before((self._at_action, moment), segment.units)
            if place in flight.random and segment.is_differentiable:
                self._phases.begin("forward", pass_="recompute", stage=stage, microbatch=number)
                self._repeat(flight, segment, place)  # while its gradients are in transit
                self._phases.begin("backward", stage=stage, microbatch=number)
            self._collect(flight, moves, place, segment, microbatch)
            if segment.is_differentiable:
                self._differentiate(flight, segment, place, action)
            self._gathers.after((self._at_action, moment))
            flight.outputs.pop(place, None)
            self._return(flight, moves, place, microbatch)
            for key in segment.outputs:
                flight.leaves.pop(key, None)

    def _collect(
        self, flight: Flight, moves: Moves, place: Place, segment: Segment, microbatch: int
    ) -> None:
        """Add gradients from other devices to the gradients of the outputs."""
        for key in segment.outputs:  # a partial sum has the gradients of all readers of the sum
            for fetch, held in moves.sums.get(key, ()):
                if fetch.sum.returns and fetch.is_differentiable:
                    gradient = self._sums.take(fetch, microbatch, is_backward=True)
                    flight.add_gradient(key, held, gradient)
        for route in moves.collected[place]:
            gradient = self._receives.take(microbatch, route, is_backward=True)
            flight.add_gradient(route.source, route.held, gradient, is_own=True)

    def _repeat(self, flight: Flight, segment: Segment, place: tuple[int, int]) -> None:
        """Run a segment's forward again, with gradients; the first one's outputs are freed."""
        with repeated(flight.random.pop(place), self._device), on_buffer_copies(segment.module):
            inputs = [flight.input(key) for key in segment.inputs]
            with torch.enable_grad(), self._precision.autocast():
                flight.outputs[place] = _call(segment, flight, inputs)
        for key, output in zip(segment.outputs, flight.outputs[place], strict=True):
            flight.leaves[key].data = output.detach()

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
            elif flight.leaves[key].grad is not None or segment.runs_always:
                outputs.append(output)
                gradients.append(flight.gradient(key))
        if not outputs:
            return
        for read in segment.inputs:
            flight.own_gradient(read)  # which autograd adds to in place
        queue = self._gradients.split.get(action.stage)
        with contextlib.nullcontext() if queue is None else queue.filling(action.microbatch):
            torch.autograd.backward(outputs, gradients)

    def _return(self, flight: Flight, moves: Moves, place: Place, microbatch: int) -> None:
        """Send the gradients of a segment's fetches back to the devices of their pieces."""
        for fetch in moves.fetches[place]:
            if fetch.is_differentiable:
                self._return_local(flight, fetch, microbatch)
        for message in moves.returning.get(place, ()):
            self._send(flight, message, microbatch)
        for fetch in moves.fetches[place]:
            del flight.leaves[fetch.key]

    def _return_local(self, flight: Flight, fetch: Fetch, microbatch: int) -> None:
        """Pass a gradient to an all-reduce, or to the parts of this device."""
        if fetch.sum.returns:
            flight.own_gradient(fetch.key)  # which is summed in place
        gradient = flight.gradient(fetch.key)
        if fetch.sum.returns:
            self._sums.start(gradient.contiguous(), fetch, microbatch, is_backward=True)
        for route in fetch.local:
            flight.add_gradient(route.source, route.held, route.in_want.take(gradient))


def _call(segment: Segment, flight: Flight, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    if flight.version is not None:
        return call_with(segment.module, flight.version, inputs)
    found: tuple[Tensor, ...] = segment.call(*inputs)
    return found
