"""Lower a strategy to the program of one device: tasks into segments, segments into graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.runtime.executor.deferred import WeightQueue
from harness.runtime.executor.emit import DeviceTasks, SegmentBuilder
from harness.runtime.executor.layout import Part, Want
from harness.runtime.executor.program import PartKey, Program, Segment, Send


@dataclass
class _Draft:
    """A segment before its graph: which tasks, and what must have arrived."""

    parts: list[Part] = field(default_factory=list)
    fetches: list[Want] = field(default_factory=list)


class Lowering:
    """Makes the program of one device for one size of microbatch.

    Args:
        queues: by stage, where the gradients of weights wait; none when nothing is deferred.
    """

    def __init__(self, tasks: DeviceTasks, queues: Mapping[int, WeightQueue]) -> None:
        self._tasks, self._queues = tasks, queues
        self._layout, self._device = tasks.layout, tasks.device
        self._outgoing = self._sends()

    def _sends(self) -> dict[tuple[str, int], list[Send]]:
        """What other devices want of each of this device's parts."""
        found: dict[tuple[str, int], list[Send]] = defaultdict(list)
        for want in self._layout.wants:
            for piece in want.pieces if want.device != self._device else ():
                if piece.part.device == self._device:
                    found[piece.part.operator, piece.part.index].append(Send(want, piece))
        return found

    def program(self) -> Program:
        """Lower all stages that this device has."""
        layout, fetched = self._layout, set[int]()
        drafts = {
            stage: self._drafts(stage, fetched)
            for stage in range(len(layout.strategy.stages))
            if any(True for _ in layout.tasks(self._device, stage))
        }
        needed = self._needed_outside([d for own in drafts.values() for d in own])
        stages = {
            stage: tuple(self._segment(draft, needed) for draft in own)
            for stage, own in drafts.items()
        }
        differentiable = layout.differentiable
        blocks = {
            key: self._tasks.block_of(key)
            for own in stages.values()
            for s in own
            for key in s.outputs
        }
        return Program(stages, differentiable, blocks)

    def _drafts(self, stage: int, fetched: set[int]) -> list[_Draft]:
        drafts: list[_Draft] = []
        draft = _Draft()
        for part in self._layout.tasks(self._device, stage):
            wants = [want for _, want in self._tasks.wants(part)]
            missing = {w.number: w for w in wants if w.remote and w.number not in fetched}
            is_alone = self._tasks.forms.of[part.operator] == "norm"
            if draft.parts and (missing or is_alone):
                drafts.append(draft)
                draft = _Draft()
            draft.fetches += missing.values()
            fetched.update(missing)  # in place, for the stages that follow
            draft.parts.append(part)
            if is_alone or (part.operator, part.index) in self._outgoing:
                drafts.append(draft)
                draft = _Draft()
        return [*drafts, draft] if draft.parts else drafts

    def _needed_outside(self, drafts: list[_Draft]) -> set[PartKey]:
        """Values that leave the segment that computes them."""
        needed = {send.key for sends in self._outgoing.values() for send in sends}
        for draft in drafts:
            inside = {(part.operator, part.index) for part in draft.parts}
            for part in draft.parts:
                for _, want in self._tasks.wants(part):
                    needed |= {
                        PartKey(want.value, p.part.operator, p.part.index)
                        for p in want.pieces
                        if p.part.device == self._device
                        and (want.remote or (p.part.operator, p.part.index) not in inside)
                    }
        return needed

    def _segment(self, draft: _Draft, needed: set[PartKey]) -> Segment:
        builder = SegmentBuilder(self._tasks, needed)
        for part in draft.parts:
            builder.add(part)
        inside = {(part.operator, part.index) for part in draft.parts}
        outputs = sorted(key for key in needed if (key.operator, key.part) in inside)
        outputs += [key for key in builder.values if key.value == "loss"]
        sends = [
            send
            for part in draft.parts
            for send in self._outgoing.get((part.operator, part.index), [])
        ]
        return Segment(
            module=builder.finish(outputs, self._queues.get(draft.parts[0].stage)),
            inputs=tuple(builder.inputs),
            outputs=tuple(outputs),
            fetches=tuple(sorted(draft.fetches, key=lambda w: w.number)),
            sends=tuple(sends),
            operators=tuple(dict.fromkeys(part.operator for part in draft.parts)),
            is_differentiable=any(
                key.value == "loss" or key.value in self._layout.differentiable for key in outputs
            ),
        )
