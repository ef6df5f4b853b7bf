"""A model as a graph of operators with shapes and sample dims; `tracing` records it."""
