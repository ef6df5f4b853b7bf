"""Bytes of activations that a task keeps until its backward, and that it needs only meanwhile.

Backward needs the outputs that a trained operator reads, and the executor keeps what it has sent.
Any other output of an operator without a backward is freed after its last reader:

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


def held_outputs(tables: Tables, flow: Flow, has_backward: Flags, readers: Readers) -> HeldOutputs:
    """The bytes that every operator holds on every device."""
    outputs = tables.output_bytes
    if not len(readers.producers):
        return HeldOutputs(_with_sent(tables, outputs + tables.saved_bytes), np.zeros_like(outputs))
    brief = np.where(_is_brief(tables, flow, has_backward, readers), outputs, 0.0)
    kept = outputs - brief + tables.saved_bytes * has_backward[:, None]
    return HeldOutputs(_with_sent(tables, kept), _alive(tables, brief, readers))


def gradients_passed(tables: Tables, n_microbatches: int, has_backward: Flags) -> Floats:
    """(n_ops, n_devices) bytes of gradients while backward of each operator runs: of its output and
    inputs, and of its weights before they are added to those of earlier microbatches."""
    outputs = tables.output_bytes * tables.costs.wire_share[:, None]
    sources, readers = np.array(tables.edges, dtype=np.int64).reshape(-1, 2).T
    found = outputs + tables.weight_bytes * (n_microbatches > 1)
    np.add.at(found, readers, outputs[sources] * has_backward[sources, None])
    return np.where(tables.active & has_backward[:, None], found, 0.0)


def _with_sent(tables: Tables, kept: Floats) -> Floats:
    """At least the outputs that are sent, each as large as on the wire."""
    edges = tables.edge_rows()
    sent = edges.source[edges.goes]
    shares = tables.costs.wire_share[sent // kept.shape[1]]
    found = kept.copy()
    found.ravel()[sent] = np.maximum(
        found.ravel()[sent], tables.output_bytes.ravel()[sent] * shares
    )
    return found


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
    alive: Floats = changes[:-1].cumsum(axis=0)
    return alive
