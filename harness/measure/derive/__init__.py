"""All numbers derived from a run's records, for figures and rank 0 alike (docs/metrics.md)."""
