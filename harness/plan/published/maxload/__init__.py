"""The least load of the busiest device (Tarnawski et al., NeurIPS 2020): stages of any shape."""
