"""Strategies in the formats of other planners."""
