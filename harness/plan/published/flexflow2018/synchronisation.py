"""What summing a layer's weight gradients over their holders costs, and what it gives back."""

from __future__ import annotations

from harness.plan.published.flexflow2018.compiled import compiled
from harness.plan.published.flexflow2018.tables import (
    ON_DEVICE,
    ON_NODE,
    SLICE,
    SYNC_MS,
    SYNC_SQUARED,
    State,
    Tables,
    Work,
)
from harness.plan.published.flexflow2018.transfers import count_feature_blocks


@compiled
def synchronise(tables: Tables, state: State, work: Work, layer: int) -> None:
    """Set the layer's SYNC_MS and SYNC_SQUARED.

    All slices of a feature block are held by the same devices, so one count serves them all.
    """
    if tables.costs[layer, SLICE, 0] == 0.0:
        return
    n_samples = 1 << state.plan[layer, tables.n_devices]
    n_features = count_feature_blocks(tables, state.plan, layer)
    transfers, squared = 0.0, 0
    for block in range(n_features):
        n_nodes, most = 0, 0
        for i in range(n_samples):
            device = state.plan[layer, i * n_features + block]
            node = device >> tables.node_shift
            if work.counts[ON_DEVICE, device] == 0:
                if work.counts[ON_NODE, node] == 0:
                    n_nodes += 1
                work.counts[ON_NODE, node] += 1
                most = max(most, work.counts[ON_NODE, node])
            squared += 2 * work.counts[ON_DEVICE, device] + 1  # (n + 1)^2 - n^2
            work.counts[ON_DEVICE, device] += 1
        for i in range(n_samples):
            device = state.plan[layer, i * n_features + block]
            work.counts[ON_DEVICE, device] = 0
            work.counts[ON_NODE, device >> tables.node_shift] = 0
        transfers += (most - 1) * tables.inside_ratio + (n_nodes - 1)
    is_linear = tables.linear_mask >> layer & 1
    n_slices = n_samples if is_linear else 1
    state.times[SYNC_MS, layer, 0] = tables.costs[layer, SLICE, 0] * transfers * n_slices
    state.times[SYNC_SQUARED, layer, 0] = squared * n_slices * is_linear
