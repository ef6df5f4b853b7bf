"""The profile workload: time each operator of a model on each kind of device."""
