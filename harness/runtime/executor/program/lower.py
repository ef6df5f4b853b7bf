"""Lower a strategy to the program of one device: tasks into segments, segments into graphs."""

from __future__ import annotations

from harness.runtime.devices.compiling import compiled_by_torch
from harness.runtime.executor.cache.boundary import recorded_keys
from harness.runtime.executor.program.emit import DeviceTasks, SegmentBuilder
from harness.runtime.executor.program.program import (
    Draft,
    PartKey,
    Program,
    Segment,
    draft_segments,
)


class Lowering:
    """Makes the program of one device for one size of microbatch."""

    def __init__(self, tasks: DeviceTasks) -> None:
        self._tasks = tasks
        self._layout, self._device = tasks.layout, tasks.device

    def program(self) -> Program:
        """Lower all stages of this device."""
        drafts = draft_segments(self._tasks.forms, self._device)
        recorded = recorded_keys(self._layout, self._device)
        needed = self._needed_outside([d for each in drafts.values() for d in each])
        needed |= {key for key in recorded if isinstance(key, PartKey)}
        stages = {
            stage: tuple(self._segment(draft, needed) for draft in each)
            for stage, each in drafts.items()
        }
        outputs = {key for own in stages.values() for segment in own for key in segment.outputs}
        counted = frozenset(key for key in outputs if key.value == "loss" and self._is_counted(key))
        return Program(stages, self._layout.differentiable, counted, recorded)

    def _is_counted(self, key: PartKey) -> bool:
        copies = self._layout.parts[key.operator][key.part].copies
        return not copies or self._device == copies[0]

    def _needed_outside(self, drafts: list[Draft]) -> set[PartKey]:
        """Values that are read outside of the segment that computes them."""
        needed = {route.source for draft in drafts for route in draft.sends}
        for draft in drafts:
            inside = {(part.operator, part.index) for part in draft.parts}
            for part in draft.parts:
                for _, want in self._layout.reads(part):
                    needed |= {
                        PartKey.of(want.value, p.part)
                        for p in want.pieces
                        if p.part.device == self._device
                        and (want.is_exchanged or (p.part.operator, p.part.index) not in inside)
                    }
        return needed

    def _segment(self, draft: Draft, needed: set[PartKey]) -> Segment:
        builder = SegmentBuilder(self._tasks, needed)
        stage = draft.parts[0].stage
        for part in draft.parts:
            builder.add(part)
        inside = {(part.operator, part.index) for part in draft.parts}
        # The only task, if there is one.
        is_collective = self._tasks.forms.of[draft.parts[0].operator] == "collective"
        always = inside if is_collective else inside & self._layout.unread
        outputs = sorted(key for key in needed if (key.operator, key.part) in inside)
        outputs += [
            key
            for key in builder.values
            if key.value == "loss" or (key not in needed and (key.operator, key.part) in always)
        ]
        module = builder.finish(outputs, stage)
        # Collective tasks communicate, and a split backward has side effects.
        is_compiled = self._tasks.forms.is_compiled and not is_collective
        is_compiled &= stage not in self._tasks.gradients.split
        return Segment(
            module=module,
            # Not the module itself, because errors would lose the failing line in their traceback.
            call=compiled_by_torch(module, self._tasks.meta.device)
            if is_compiled
            else module.forward,
            inputs=tuple(builder.inputs),
            outputs=tuple(outputs),
            fetches=tuple(sorted(draft.fetches, key=lambda w: w.number)),
            sends=tuple(draft.sends),
            runs_always=bool(always),
            units=draft.units,
            is_differentiable=any(
                key.value == "loss" or key.value in self._layout.differentiable for key in outputs
            ),
            is_apart=draft.is_apart,
            is_last=draft.is_last,
        )
