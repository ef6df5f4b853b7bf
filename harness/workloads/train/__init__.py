"""The train workload: train a model by a strategy and measure its steps."""
