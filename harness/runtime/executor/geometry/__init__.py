"""Blocks, slices and shapes of values at any batch size; no communication."""
