"""Frozen values that flow between the layers; they know no framework."""
