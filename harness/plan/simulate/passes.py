"""Numbers of the passes of a microbatch, by which tasks are numbered (see `work`)."""

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = 0, 1, 2, 3
N_PASSES = 4
NONE = -1
PASSES = {"forward": FORWARD, "backward": BACKWARD, "weight": WEIGHT}  # of kinds of actions
