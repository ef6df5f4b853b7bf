"""Which machines of a cluster to use for a model, and what others would bring."""
