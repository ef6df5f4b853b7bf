"""The matmul workload: matrix products on each device and over all devices."""
