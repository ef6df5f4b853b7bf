"""Check hosts over ssh: probe, judge, report. The standard library and harness.domain suffice."""
