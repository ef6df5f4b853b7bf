"""The matmul workload: products on each device and over all of them."""
