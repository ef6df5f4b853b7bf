"""Draw figures and a report from results directories; no torch."""
