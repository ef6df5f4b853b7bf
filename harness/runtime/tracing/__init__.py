"""Trace a model into a graph with the same outputs and gradients."""
