"""PipeDream's problem (SOSP'19): stages of a pipeline, replicated, on hierarchical links."""
