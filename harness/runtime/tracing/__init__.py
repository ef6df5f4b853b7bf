"""Trace a model into a graph that computes what the model does, forward and backward."""
