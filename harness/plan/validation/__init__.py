"""Step times that others measured, held against the simulator's predictions."""
