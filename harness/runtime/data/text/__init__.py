"""Data sets of text, cut into tokens by a vocabulary."""
