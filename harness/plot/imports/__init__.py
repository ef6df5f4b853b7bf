"""Logs of other programs, converted to runs for the same figures."""

from harness.plot.imports.logs import ImportFacts, import_logs

__all__ = ["ImportFacts", "import_logs"]
