"""Tasks of one device as segments, and segments as torch.fx graphs."""
