"""Bytes of activations that a task keeps until its backward, and that it needs only meanwhile.

Backward needs the outputs that a trained operator reads, and the executor keeps the outputs that
leave their segment, which ends where the device sends and before it waits. Any other output of an
operator without a backward is freed after its last reader:

    input -> frozen a -> frozen b -> trained c
             until b     until backward of c
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.domain.graph import Graph
from harness.domain.sharding import has_tasks
from harness.plan.simulate.tables import Flow, Tables
from harness.plan.simulate.transfers import Floats, Ints

Flags = npt.NDArray[np.bool_]


class Readers(NamedTuple):
    """The readers of all operators without a backward, producer by producer.

    Attributes:
        producers, starts: (n_producers,) operators, and the place of each one's first reader.
        readers, read: (n_readers,) each reader, and the producer that it reads.
    """

    producers: Ints
    starts: Ints
    readers: Ints
    read: Ints


def readers_of(graph: Graph, has_backward: Flags) -> Readers:
    """The readers of each placed operator without a backward."""
    pairs = [
        (producer, reader)
        for producer, readers in enumerate(graph.consumers())
        if not has_backward[producer] and has_tasks(graph.operators[producer])
        for reader in readers
    ]
    read, readers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    producers, starts = np.unique(read, return_index=True)
    return Readers(producers, starts.astype(np.int64), readers, read)


class HeldOutputs(NamedTuple):
    """(n_ops, n_devices) bytes of outputs, and of what forward saves beside them.

    Attributes:
        kept: until backward.
        brief: held during the operator's forward alone, its own output included.
    """

    kept: Floats
    brief: Floats


class Segments(NamedTuple):
    """(n_ops, n_devices) operators that a device runs without waiting, and again together.

    Attributes:
        number: ascends in the order of stages, and of operators within them.
        leaving_bytes: of an output that is read after its segment, here or elsewhere.
    """

    number: Ints
    leaving_bytes: Floats


def find_segments(tables: Tables, flow: Flow, recomputed: Ints, has_backward: Flags) -> Segments:
    """The segments of all devices, by the executor's rule (`executor.program.program`).

    Args:
        recomputed: (n_ops,) number of the operators that a stage runs again together.
    """
    edges, active = tables.edge_rows(), tables.active
    begins, ends = np.zeros((2, *active.shape), dtype=np.int64)
    begins.ravel()[edges.target] = ends.ravel()[edges.source] = 1
    for one in edges.sums:
        ends.ravel()[list(one.sources)] = 1
        begins.ravel()[list(one.sources if one.is_collective else one.targets)] = 1
    order = flow.stage_ops
    both = np.stack([flow.stage_of[order], recomputed[order]])
    changes = (np.diff(both, prepend=both[:, :1]) != 0).any(axis=0)
    number = np.zeros_like(ends)
    before = np.cumsum(ends[order], axis=0) - ends[order]
    number[order] = np.cumsum(begins[order] + changes[:, None], axis=0) + before
    sources, readers = np.array(tables.edges, dtype=np.int64).reshape(-1, 2).T
    leaves = (number[sources] != number[readers]) & active[sources] & active[readers]
    leaves &= has_backward[sources, None]
    np.maximum.at(ends, sources, leaves)
    return Segments(number, ends * tables.output_bytes * tables.costs.wire_share[:, None])


def received_bytes(tables: Tables) -> Floats:
    """(n_ops, n_devices) bytes of received regions, assembled for their first reader."""
    edges = tables.edge_rows()
    found = np.bincount(edges.target, weights=edges.n_held, minlength=tables.active.size)
    for one in edges.sums:
        found[list(one.targets)] += one.n_bytes[0] * (one.n_rounds[0] > 0)
    return found.astype(np.float64).reshape(tables.active.shape)


def held_outputs(
    tables: Tables, flow: Flow, has_backward: Flags, readers: Readers, leaving_bytes: Floats
) -> HeldOutputs:
    """The bytes that every operator holds on every device."""
    outputs = tables.output_bytes
    if not len(readers.producers):
        kept = np.maximum(outputs + tables.saved_bytes, leaving_bytes)
        return HeldOutputs(kept, np.zeros_like(outputs))
    brief = np.where(_is_brief(tables, flow, has_backward, readers), outputs, 0.0)
    kept = outputs - brief + tables.saved_bytes * has_backward[:, None]
    return HeldOutputs(np.maximum(kept, leaving_bytes), _alive(tables, brief, readers))


def gradients_passed(tables: Tables, n_microbatches: int, has_backward: Flags) -> Floats:
    """(n_ops, n_devices) bytes of gradients while backward of each operator runs: of its output,
    of values inside it and its inputs, and of its weights before they are added to those of earlier
    microbatches or copied into a bucket."""
    outputs = tables.output_bytes * tables.costs.wire_share[:, None]
    sources, readers = np.array(tables.edges, dtype=np.int64).reshape(-1, 2).T
    gradients = tables.weight_bytes if n_microbatches > 1 else tables.shared_bytes
    found = outputs + tables.inner_bytes + gradients
    np.add.at(found, readers, outputs[sources] * has_backward[sources, None])
    return np.where(tables.active & has_backward[:, None], found, 0.0)


def _is_brief(tables: Tables, flow: Flow, has_backward: Flags, readers: Readers) -> Flags:
    """(n_ops, n_devices) whether an output has local readers without a backward and no others."""
    edges, stage_of = tables.edge_rows(), flow.stage_of
    by_backward = has_backward[readers.readers]
    by_backward |= stage_of[readers.readers] != stage_of[readers.read]
    is_kept = tables.active[readers.readers] & by_backward[:, None]
    brief = np.zeros_like(tables.active)
    brief[readers.producers] = ~np.logical_or.reduceat(is_kept, readers.starts, axis=0)
    brief.ravel()[edges.source[edges.goes]] = False
    return brief


def _alive(tables: Tables, brief: Floats, readers: Readers) -> Floats:
    """(n_ops, n_devices) bytes of brief outputs that live while each operator runs."""
    own, own_brief = readers.producers, brief[readers.producers]
    reading = np.where(tables.active[readers.readers], readers.readers[:, None], 0)
    last = np.maximum(np.maximum.reduceat(reading, readers.starts, axis=0), own[:, None])
    changes = np.zeros((len(brief) + 1, brief.shape[1]))
    changes[own] = own_brief
    devices = np.broadcast_to(np.arange(brief.shape[1]), last.shape)
    np.subtract.at(changes, (last + 1, devices), own_brief)
    return changes[:-1].cumsum(axis=0)
