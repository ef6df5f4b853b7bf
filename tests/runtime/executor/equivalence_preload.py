"""What the server that ranks are forked from imports: all that takes a process seconds."""

from __future__ import annotations

import equivalence_training as equivalence_training
import torch
from equivalence_models import small_graph

torch.set_num_threads(1)
small_graph("vit")  # torch imports much of itself, and sympy, only when it traces
