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

from harness.plan.published.flexflow2018.compiled import compiled
from harness.plan.published.flexflow2018.tables import (
    DEVICE_LATEST,
    LONGEST,
    NODE_FIRST,
    NODE_FIRST_DEVICE,
    NODE_SECOND,
    READY,
    TRANSFER,
    Floats,
    Ints,
    Tables,
    Work,
)


@compiled
def count_feature_blocks(tables: Tables, plan: Ints, layer: int) -> int:
    """Feature blocks of a layer."""
    if tables.linear_mask >> layer & 1:
        return int(tables.n_devices >> plan[layer, tables.n_devices])
    return 1


@compiled
def count_parts(tables: Tables, plan: Ints, layer: int) -> int:
    """Parts of a layer."""
    if tables.linear_mask >> layer & 1:
        return tables.n_devices
    return int(1 << plan[layer, tables.n_devices])


@compiled
def count_groups(tables: Tables, plan: Ints, layer: int) -> int:
    """Groups between a layer and the one before it."""
    return int(1 << min(plan[layer - 1, tables.n_devices], plan[layer, tables.n_devices]))


@compiled
def transfer_ms(tables: Tables, plan: Ints, layer: int) -> float:
    """One transfer into the layer, between nodes."""
    s = tables.n_devices
    return float(tables.costs[layer, TRANSFER + plan[layer - 1, s], plan[layer, s]])


@compiled
def arrive(
    tables: Tables, plan: Ints, work: Work, finish_ms: Floats, layer: int, first: int, end: int
) -> None:
    """Set when consumers of groups `first` to `end - 1` are ready, and producers' longest transfer.

    Args:
        finish_ms: (layer, part).
    """
    n_groups = count_groups(tables, plan, layer)
    n_sources = count_parts(tables, plan, layer - 1) // n_groups
    n_targets = count_parts(tables, plan, layer) // n_groups
    if n_sources == 1 and n_targets == 1:
        _arrive_in_pairs(tables, plan, work, finish_ms, layer, first, end)
        return
    for group in range(first, end):
        _collect(tables, plan, work, finish_ms, layer, group * n_sources, n_sources)
        _deliver_all(
            tables, plan, work, layer, group * n_sources, n_sources, group * n_targets, n_targets
        )


@compiled
def _arrive_in_pairs(
    tables: Tables, plan: Ints, work: Work, finish_ms: Floats, layer: int, first: int, end: int
) -> None:
    between_ms = transfer_ms(tables, plan, layer)
    inside_ms = between_ms * tables.inside_ratio
    for part in range(first, end):
        a, b = plan[layer - 1, part], plan[layer, part]
        same_node = a >> tables.node_shift == b >> tables.node_shift
        cost_ms = 0.0 if a == b else (inside_ms if same_node else between_ms)
        work.times[LONGEST, layer - 1, part] = cost_ms
        work.times[READY, layer, part] = finish_ms[layer - 1, part] + cost_ms


@compiled
def _collect(
    tables: Tables, plan: Ints, work: Work, finish_ms: Floats, layer: int, source: int, n: int
) -> None:
    """Latest finish per device, and per node of its latest and of its other devices."""
    for i in range(source, source + n):
        device, done_ms = plan[layer - 1, i], finish_ms[layer - 1, i]
        node = device >> tables.node_shift
        if done_ms > work.times[DEVICE_LATEST, 0, device]:
            work.times[DEVICE_LATEST, 0, device] = done_ms
        first_ms = work.times[NODE_FIRST, 0, node]
        if device == work.counts[NODE_FIRST_DEVICE, node]:
            work.times[NODE_FIRST, 0, node] = max(first_ms, done_ms)
        elif done_ms > first_ms:
            work.times[NODE_SECOND, 0, node] = first_ms
            work.times[NODE_FIRST, 0, node] = done_ms
            work.counts[NODE_FIRST_DEVICE, node] = device
        elif done_ms > work.times[NODE_SECOND, 0, node]:
            work.times[NODE_SECOND, 0, node] = done_ms


@compiled
def _deliver_all(
    tables: Tables, plan: Ints, work: Work, layer: int,
    source: int, n_sources: int, target: int, n_targets: int,
) -> None:  # fmt: skip
    """Ready times from the maxima of `_collect`, which are emptied again."""
    shift = tables.node_shift
    between_ms = transfer_ms(tables, plan, layer)
    inside_ms = between_ms * tables.inside_ratio
    top_node, top_ms, next_ms = -1, -1.0, -1.0
    for node in range(tables.n_devices >> shift):
        latest_ms = work.times[NODE_FIRST, 0, node]
        if latest_ms > top_ms:
            top_node, next_ms, top_ms = node, top_ms, latest_ms
        elif latest_ms > next_ms:
            next_ms = latest_ms

    some_device = plan[layer, target]
    many_devices, many_nodes = False, False
    for j in range(target, target + n_targets):
        device = plan[layer, j]
        node = device >> shift
        many_devices |= device != some_device
        many_nodes |= node != some_device >> shift
        ready_ms = work.times[DEVICE_LATEST, 0, device]
        is_first = device == work.counts[NODE_FIRST_DEVICE, node]
        near_ms = work.times[NODE_SECOND if is_first else NODE_FIRST, 0, node]
        if near_ms >= 0:
            ready_ms = max(ready_ms, near_ms + inside_ms)
        far_ms = next_ms if node == top_node else top_ms
        if far_ms >= 0:
            ready_ms = max(ready_ms, far_ms + between_ms)
        work.times[READY, layer, j] = ready_ms

    for i in range(source, source + n_sources):
        device = plan[layer - 1, i]
        node = device >> shift
        longest_ms = 0.0
        if many_nodes or node != some_device >> shift:
            longest_ms = between_ms
        elif many_devices or device != some_device:
            longest_ms = inside_ms
        work.times[LONGEST, layer - 1, i] = longest_ms
        work.times[DEVICE_LATEST, 0, device] = -1.0
        work.times[NODE_FIRST, 0, node] = -1.0
        work.times[NODE_SECOND, 0, node] = -1.0
        work.counts[NODE_FIRST_DEVICE, node] = -1


@compiled
def collides(tables: Tables, plan: Ints, finish_ms: Floats, layer: int, part: int) -> bool:
    """Whether a transfer from the part overlaps one of an earlier layer on the same channel."""
    n_groups = count_groups(tables, plan, layer + 1)
    n_targets = count_parts(tables, plan, layer + 1) // n_groups
    target = part * n_groups // count_parts(tables, plan, layer) * n_targets
    for earlier in range(layer):
        if part >= count_parts(tables, plan, earlier):
            continue
        n_groups = count_groups(tables, plan, earlier + 1)
        n_theirs = count_parts(tables, plan, earlier + 1) // n_groups
        theirs = part * n_groups // count_parts(tables, plan, earlier) * n_theirs
        for to in range(max(target, theirs), min(target + n_targets, theirs + n_theirs)):
            their_ms = channel_ms(tables, plan, earlier, part, to)
            our_ms = channel_ms(tables, plan, layer, part, to)
            their_start_ms, our_start_ms = finish_ms[earlier, part], finish_ms[layer, part]
            if their_ms == 0.0 or our_ms == 0.0:
                continue
            if our_start_ms < their_start_ms + their_ms and their_start_ms < our_start_ms + our_ms:
                return True
    return False


@compiled
def channel_ms(tables: Tables, plan: Ints, layer: int, source: int, to: int) -> float:
    """The transfer from a part to a part of the next layer; 0 on one device."""
    a, b = plan[layer, source], plan[layer + 1, to]
    if a == b:
        return 0.0
    between_ms = transfer_ms(tables, plan, layer + 1)
    same_node = a >> tables.node_shift == b >> tables.node_shift
    return between_ms * tables.inside_ratio if same_node else between_ms
