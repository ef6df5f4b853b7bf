"""The event-driven simulator: predicts step time and memory of a strategy on a cluster."""
