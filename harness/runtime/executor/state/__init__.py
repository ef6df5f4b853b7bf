"""Parameters, buffers and optimizer state: the slices of each device, and their files."""
