"""Carries out any Strategy on any captured model: see docs/design/executor.md."""
