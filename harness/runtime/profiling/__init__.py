"""Time single operators and their shards on this device, and verify what was timed."""
