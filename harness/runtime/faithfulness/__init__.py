"""Hold captured graphs to the models that they were captured of."""
