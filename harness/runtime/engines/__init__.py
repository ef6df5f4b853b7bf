"""The engine interface, plain PyTorch with DDP, DeepSpeed, and the optimizers."""
