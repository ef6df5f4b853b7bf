"""The profile workload: times of each operator of a model on each kind of device."""
