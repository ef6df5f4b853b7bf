"""Runs the actions of a schedule, step by step."""
