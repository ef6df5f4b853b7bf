"""Split a device's tasks into segments, each of which runs without waiting for other devices.

fetches | tasks | sends     a task with inputs from other devices begins a segment,
        |       |           a task with outputs for other devices ends it
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from harness.runtime.executor.geometry.layout import Part, Want
from harness.runtime.executor.program.program import Send
from harness.runtime.executor.shards.forms import Forms


@dataclass
class Draft:
    """A segment without its graph.

    Attributes:
        fetches: wants that must arrive before it, first used by this segment.
        sends: pieces of its outputs that other devices read, in order.
        waits: whether it waits for other devices: for fetches or statistics of a batch norm.
    """

    parts: list[Part] = field(default_factory=list)
    fetches: list[Want] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    waits: bool = False


def draft_segments(forms: Forms, device: int) -> dict[int, list[Draft]]:
    """A device's segments by stage, in the order in which they run."""
    layout = forms.layout
    outgoing: dict[Part, list[Send]] = defaultdict(list)
    for want in layout.wants:
        for piece in dict.fromkeys((*want.pieces, *want.returns)):
            if piece.part.device == device != want.device:
                goes, returns = piece in want.pieces, piece in want.returns
                outgoing[piece.part].append(Send(want, piece, goes, returns))
    fetched: set[int] = set()
    found: dict[int, list[Draft]] = {}
    for stage in range(len(layout.strategy.stages)):
        drafts = _drafts(forms, device, stage, outgoing, fetched)
        if drafts:
            found[stage] = drafts
    return found


def _drafts(
    forms: Forms, device: int, stage: int, outgoing: dict[Part, list[Send]], fetched: set[int]
) -> list[Draft]:
    layout = forms.layout
    drafts: list[Draft] = []
    draft = Draft()
    for part in layout.tasks(device, stage):
        wants = [want for _, want in layout.reads(part)]
        missing = {w.number: w for w in wants if w.is_exchanged and w.number not in fetched}
        is_norm = forms.of[part.operator] == "norm"
        if draft.parts and (missing or is_norm):
            drafts.append(draft)
            draft = Draft()
        draft.fetches += missing.values()
        fetched.update(missing)  # in place, for later stages
        draft.parts.append(part)
        draft.waits |= bool(missing) or is_norm
        if is_norm or part in outgoing:
            draft.sends = outgoing.get(part, [])
            drafts.append(draft)
            draft = Draft()
    return [*drafts, draft] if draft.parts else drafts
