"""Make the program of one device: its tasks into segments, segments into graphs."""

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


def make_program(tasks: DeviceTasks) -> Program:
    """Make all stages of one device for one size of microbatch."""
    layout = tasks.layout
    drafts = draft_segments(tasks.forms, tasks.device)
    recorded = recorded_keys(layout, tasks.device)
    needed = _needed_outside(tasks, [draft for each in drafts.values() for draft in each])
    needed |= {key for key in recorded if isinstance(key, PartKey)}
    stages = {
        stage: tuple(_segment(tasks, draft, needed) for draft in each)
        for stage, each in drafts.items()
    }
    outputs = {key for own in stages.values() for segment in own for key in segment.outputs}
    losses = {key: layout.parts[key.operator][key.part] for key in outputs if key.value == "loss"}
    # Of several copies the first counts.
    counted = [key for key, p in losses.items() if not p.copies or tasks.device == p.copies[0]]
    return Program(stages, layout.differentiable, frozenset(counted), recorded)


def _needed_outside(tasks: DeviceTasks, drafts: list[Draft]) -> set[PartKey]:
    """Values that are read outside of the segment that computes them."""
    needed = {route.source for draft in drafts for route in draft.sends}
    for draft in drafts:
        inside = {(part.operator, part.index) for part in draft.parts}
        for _, want in (read for part in draft.parts for read in tasks.layout.reads(part)):
            needed |= {
                PartKey.of(want.value, p.part)
                for p in want.pieces
                if p.part.device == tasks.device
                and (want.is_exchanged or (p.part.operator, p.part.index) not in inside)
            }
    return needed


def _segment(tasks: DeviceTasks, draft: Draft, needed: set[PartKey]) -> Segment:
    builder = SegmentBuilder(tasks, needed)
    stage = draft.parts[0].stage
    for part in draft.parts:
        builder.add(part)
    inside = {(part.operator, part.index) for part in draft.parts}
    # The only task, if there is one.
    is_collective = tasks.forms.of[draft.parts[0].operator] == "collective"
    always = inside if is_collective else inside & tasks.layout.unread
    outputs = sorted(key for key in needed if (key.operator, key.part) in inside)
    outputs += [
        key
        for key in builder.values
        if key.value == "loss" or (key not in needed and (key.operator, key.part) in always)
    ]
    module = builder.finish(outputs, stage)
    # Not the module itself, because errors would lose the failing line in their traceback.
    call = module.forward
    # Collective tasks communicate, and a split backward has side effects.
    if tasks.forms.is_compiled and not is_collective and stage not in tasks.gradients.split:
        call = compiled_by_torch(module, tasks.meta.device)
    values = {key.value for key in outputs}
    return Segment(
        **vars(draft),
        module=module,
        call=call,
        inputs=tuple(builder.inputs),
        outputs=tuple(outputs),
        runs_always=bool(always),
        is_differentiable="loss" in values or not values.isdisjoint(tasks.layout.differentiable),
    )
