"""Frozen values that the layers exchange; independent of any framework."""
