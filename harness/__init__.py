"""A distributed-training benchmark harness: from bare hosts to a chart."""

__version__ = "0.1.0"
