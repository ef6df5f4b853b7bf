"""Gradients of weights: when they are computed, how they are all-reduced."""
