"""When the parts of a layer are ready: transfers from the layer before, without listing each one.

Cuts are powers of two, so producers and consumers fall into groups of consecutive parts, and in a
group every producer sends an equally large block to every consumer:

    producers  0 1 2 3 | 4 5 6 7        8 sample blocks into 2: groups of 4 x 1
    consumers     0    |    1

Where no channel makes a transfer wait, a consumer is ready at the latest of: finishes on its own
device, finishes elsewhere in its node plus the transfer inside, finishes in other nodes plus the
transfer between. Three maxima serve all consumers of a group, so a group of R x C costs R + C.
"""

from __future__ import annotations

from harness.plan.flexflow2018.compiled import compiled
from harness.plan.flexflow2018.tables import Floats, Scratch, State, Tables

SMALL_GROUP = 4


@compiled
def count_parts(tables: Tables, state: State, layer: int) -> int:
    """Parts of a layer."""
    return (1 << state.s[layer]) * tables.n_feature_blocks[layer, state.s[layer]]


@compiled
def count_groups(state: State, layer: int) -> int:
    """Groups between a layer and the one before it."""
    return 1 << min(state.s[layer - 1], state.s[layer])


@compiled
def arrive(
    tables: Tables, state: State, scratch: Scratch, finish_ms: Floats, layer: int, group: int
) -> None:
    """Set when the group's consumers are ready, and each producer's longest transfer."""
    n_groups = count_groups(state, layer)
    n_sources = count_parts(tables, state, layer - 1) // n_groups
    n_targets = count_parts(tables, state, layer) // n_groups
    source, target = group * n_sources, group * n_targets
    if n_sources * n_targets <= SMALL_GROUP:
        _arrive_one_by_one(tables, state, scratch, finish_ms, layer, source, n_sources, target, n_targets)
    else:
        _arrive_by_maxima(tables, state, scratch, finish_ms, layer, source, n_sources, target, n_targets)


@compiled
def _arrive_one_by_one(
    tables: Tables, state: State, scratch: Scratch, finish_ms: Floats, layer: int,
    source: int, n_sources: int, target: int, n_targets: int,
) -> None:  # fmt: skip
    between_ms = tables.between_ms[layer, state.s[layer - 1], state.s[layer]]
    inside_ms = between_ms * tables.inside_ratio
    for j in range(target, target + n_targets):
        scratch.ready_ms[layer, j] = 0.0
    for i in range(source, source + n_sources):
        a, longest_ms = state.devices[layer - 1, i], 0.0
        for j in range(target, target + n_targets):
            b, transfer_ms = state.devices[layer, j], 0.0
            if a != b:
                transfer_ms = inside_ms if tables.node[a] == tables.node[b] else between_ms
            longest_ms = max(longest_ms, transfer_ms)
            arrival_ms = finish_ms[layer - 1, i] + transfer_ms
            if arrival_ms > scratch.ready_ms[layer, j]:
                scratch.ready_ms[layer, j] = arrival_ms
        scratch.longest_ms[layer - 1, i] = longest_ms


@compiled
def _arrive_by_maxima(
    tables: Tables, state: State, scratch: Scratch, finish_ms: Floats, layer: int,
    source: int, n_sources: int, target: int, n_targets: int,
) -> None:  # fmt: skip
    between_ms = tables.between_ms[layer, state.s[layer - 1], state.s[layer]]
    inside_ms = between_ms * tables.inside_ratio
    for i in range(source, source + n_sources):
        device, done_ms = state.devices[layer - 1, i], finish_ms[layer - 1, i]
        node = tables.node[device]
        scratch.device_ms[device] = max(scratch.device_ms[device], done_ms)
        if device == scratch.first_device[node]:
            scratch.first_ms[node] = max(scratch.first_ms[node], done_ms)
        elif done_ms > scratch.first_ms[node]:
            scratch.second_ms[node] = scratch.first_ms[node]
            scratch.first_ms[node] = done_ms
            scratch.first_device[node] = device
        elif done_ms > scratch.second_ms[node]:
            scratch.second_ms[node] = done_ms
    first_node, top_ms, next_ms = -1, -1.0, -1.0
    for node in range(tables.n_nodes):
        if scratch.first_ms[node] > top_ms:
            first_node, next_ms, top_ms = node, top_ms, scratch.first_ms[node]
        elif scratch.first_ms[node] > next_ms:
            next_ms = scratch.first_ms[node]

    some_device = state.devices[layer, target]
    some_node, many_devices, many_nodes = tables.node[some_device], False, False
    for j in range(target, target + n_targets):
        device = state.devices[layer, j]
        node = tables.node[device]
        many_devices |= device != some_device
        many_nodes |= node != some_node
        ready_ms = scratch.device_ms[device]
        same = device == scratch.first_device[node]
        near_ms = scratch.second_ms[node] if same else scratch.first_ms[node]
        if near_ms >= 0:
            ready_ms = max(ready_ms, near_ms + inside_ms)
        far_ms = next_ms if node == first_node else top_ms
        if far_ms >= 0:
            ready_ms = max(ready_ms, far_ms + between_ms)
        scratch.ready_ms[layer, j] = ready_ms

    for i in range(source, source + n_sources):
        device = state.devices[layer - 1, i]
        node = tables.node[device]
        longest_ms = 0.0
        if many_nodes or node != some_node:
            longest_ms = between_ms
        elif many_devices or device != some_device:
            longest_ms = inside_ms
        scratch.longest_ms[layer - 1, i] = longest_ms
        scratch.device_ms[device] = -1.0
        scratch.first_ms[node] = -1.0
        scratch.second_ms[node] = -1.0
        scratch.first_device[node] = -1


@compiled
def synchronise(tables: Tables, state: State, scratch: Scratch, layer: int) -> None:
    """Set what summing the layer's weight gradients costs and gives back."""
    if tables.slice_ms[layer] == 0.0:
        return
    n_samples = 1 << state.s[layer]
    n_features = tables.n_feature_blocks[layer, state.s[layer]]
    transfers, squared = 0.0, 0
    for block in range(n_features):
        n_nodes, most = 0, 0
        for i in range(n_samples):
            device = state.devices[layer, i * n_features + block]
            node = tables.node[device]
            if scratch.n_on_device[device] == 0:
                n_nodes += scratch.n_on_node[node] == 0
                scratch.n_on_node[node] += 1
                most = max(most, scratch.n_on_node[node])
            scratch.n_on_device[device] += 1
        for i in range(n_samples):
            device = state.devices[layer, i * n_features + block]
            squared += scratch.n_on_device[device] ** 2
            scratch.n_on_device[device] = 0
            scratch.n_on_node[tables.node[device]] = 0
        transfers += (most - 1) * tables.inside_ratio + (n_nodes - 1)
    n_slices_per_block = n_samples if tables.is_linear[layer] else 1
    state.transfer_ms[layer] = tables.slice_ms[layer] * transfers * n_slices_per_block
    state.squared_parts[layer] = squared * n_slices_per_block * tables.is_linear[layer]
