"""Judgements of a host's facts, one module per subject; each returns findings with a remedy."""
