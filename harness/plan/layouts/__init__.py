"""Layouts of tensor, data and pipeline parallelism on equal nodes, priced by classes of devices."""
