"""Check hosts over ssh: probe, judge, report. Needs only harness.domain and standard library."""
