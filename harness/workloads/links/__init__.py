"""The links workload: latency and bandwidth of every pair of ranks, and times of collectives."""
