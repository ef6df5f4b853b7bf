"""The links workload: latency and bandwidth between every pair of ranks, and of collectives."""
