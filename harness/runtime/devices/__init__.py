"""One device: memory, clocks, precision, peak speeds, load, and timed samples."""
