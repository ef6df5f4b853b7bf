"""The simulator: what a strategy costs on a cluster, before a step is run."""
