"""The interface of a workload, and the flags that several workloads share."""
