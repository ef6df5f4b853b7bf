"""What a rank runs; one module per workload."""
