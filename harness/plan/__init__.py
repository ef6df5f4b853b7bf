"""Graph + profile + cluster -> strategy, as pure functions; no torch."""
