"""Check hosts over ssh: probe, judge, report. Needs only the standard library and our own domain."""
