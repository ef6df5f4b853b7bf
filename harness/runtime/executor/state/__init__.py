"""Parameters, optimizer state and buffers: which slices a device has, and their files."""
