"""Logs of other programs, converted to runs for the same figures."""

from harness.plot.imports.logs import ImportFacts, ImportOptions, import_logs

__all__ = ["ImportFacts", "ImportOptions", "import_logs"]
