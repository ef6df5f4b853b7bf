"""Measurement without a framework: clock, recorder, statistics, store."""
