"""State of which each device that holds a weight keeps a part only (ZeRO, FSDP, HSDP).

| state | sharded |
|---|---|
| `optimizer` | the optimizer's state (ZeRO-1); gradients are summed to their owners once a step |
| `gradients` | also gradients, summed after each microbatch (ZeRO-2, FSDP's SHARD_GRAD_OP) |
| `parameters` | also parameters, which are gathered before each use (ZeRO-3, FULL_SHARD) |

`_in_node` shards a state over the holders of each node and replicates it over nodes (HSDP,
HYBRID_SHARD), so that weights are gathered within nodes:

    node 0   device 0: rows 0-3    device 1: rows 4-7
                    |                     |            gradients of equal rows are all-reduced
    node 1   device 2: rows 0-3    device 3: rows 4-7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

ShardState = Literal[
    "none",
    "optimizer",
    "gradients",
    "parameters",
    "optimizer_in_node",
    "gradients_in_node",
    "parameters_in_node",
]
SHARD_STATES: tuple[ShardState, ...] = get_args(ShardState)

Group = tuple[int, ...]


def shards_gradients(state: ShardState, n_microbatches: int) -> bool:
    """Whether a device keeps the summed gradients of its own parts only: always where a step has
    one microbatch, because gradients are summed to the owners of parts as soon as they are whole.
    """
    return state != "none" and (n_microbatches == 1 or not state.startswith("optimizer"))


def shards_parameters(state: ShardState) -> bool:
    """Whether weights are freed after each use."""
    return state.startswith("parameters")


def shards_in_nodes(state: ShardState) -> bool:
    """Whether each node keeps the whole state."""
    return state.endswith("_in_node")


def sharing_groups(state: ShardState, holders: Group, node_of: Sequence[object]) -> list[Group]:
    """The groups of a weight's holders that each keep its whole state in parts, equal in number:
    one device each where state is whole, and one group where `_in_node` finds unlike numbers of
    holders in the nodes.

    Args:
        holders: ascending.
        node_of: each device's node.
    """
    if state == "none":
        return [(holder,) for holder in holders]
    if not shards_in_nodes(state):
        return [holders]
    return equal_nodes(holders, node_of)


def equal_nodes(devices: Group, node_of: Sequence[object]) -> list[Group]:
    """The devices of each node if they are equally many, else all."""
    groups = by_node(devices, node_of)
    return groups if len(set(map(len, groups))) == 1 else [devices]


def averaged_replicas(devices: Group, node_of: Sequence[object]) -> list[Group]:
    """The devices of each data-parallel replica that is averaged: those of a node, or one device,
    where all are of one node."""
    groups = by_node(devices, node_of)
    return groups if len(groups) > 1 else [(device,) for device in devices]


def by_node(devices: Group, node_of: Sequence[object]) -> list[Group]:
    """The devices of each node, in the order of its first one."""
    nodes = dict.fromkeys(node_of[device] for device in devices)
    return [tuple(d for d in devices if node_of[d] == node) for node in nodes]
