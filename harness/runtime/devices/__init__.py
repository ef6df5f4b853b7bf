"""One device: memory, clocks, precision, peaks, telemetry, and timed samples."""
