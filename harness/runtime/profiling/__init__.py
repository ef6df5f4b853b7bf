"""Time single operators and their shards on this device, and verify their results."""
