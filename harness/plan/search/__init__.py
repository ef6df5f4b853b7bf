"""Searches for the fastest strategy under the simulator."""
