"""The search workload: the fastest strategy for a model on these ranks."""
