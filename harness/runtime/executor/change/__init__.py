"""Move a running training from one strategy to another between two steps, without files."""
