"""Numbers of the passes of a microbatch, by which tasks are numbered (see `work`)."""

from typing import get_args

from harness.domain.schedule import ActionKind

ACTIONS: tuple[ActionKind, ...] = get_args(ActionKind)  # by number
FORWARD, BACKWARD, WEIGHT, RECOMPUTE = 0, 1, 2, 3
N_PASSES = 4
NONE = -1
