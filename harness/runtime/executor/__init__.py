"""Trains any captured model by any Strategy: see docs/design/executor.md."""
