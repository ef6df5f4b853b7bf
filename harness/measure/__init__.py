"""Measuring without a framework: clock, recorder, statistics, counters, store."""
