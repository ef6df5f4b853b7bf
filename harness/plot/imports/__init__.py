"""Logs of other programs, turned into runs that stand in the same figures."""

from harness.plot.imports.logs import ImportFacts, import_logs

__all__ = ["ImportFacts", "import_logs"]
