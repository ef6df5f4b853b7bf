"""Capture a model as a graph of operators with shapes and sample dims; `tracing` traces it."""
