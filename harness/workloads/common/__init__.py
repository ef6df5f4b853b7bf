"""What all workloads share: their interface and their flags."""
