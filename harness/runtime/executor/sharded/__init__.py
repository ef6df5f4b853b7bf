"""State of which each holder keeps a part (ZeRO, FSDP): owners, sums to them, gathers from them.

| shard_state | gradients | weights |
|---|---|---|
| none | all-reduced | every holder updates its copy |
| optimizer | summed to their owners, once a step | gathered beside the next forward |
| gradients | summed to their owners, once a microbatch | gathered beside the next forward |
| parameters | summed to their owners, once a microbatch | gathered before each use, then freed |

With `_in_node` the owners are those of each node, and their sums are all-reduced between nodes.
"""
