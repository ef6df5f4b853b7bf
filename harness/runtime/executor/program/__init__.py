"""Lowers the tasks of one device to segments, and segments to torch.fx graphs."""
