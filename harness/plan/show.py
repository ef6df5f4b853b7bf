"""Graphs, profiles, clusters and strategies as text, and graphs as dot.

The content says of which kind a file is: the schema of our own JSON, else a PipeDream
graph.txt, else one of the foreign strategy formats.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import json

from harness.domain.cluster import Cluster
from harness.domain.files import decode
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import ConfigError, GraphError, naming
from harness.inputs import decode_text, read_file
from harness.measure.text import cell, format_shape, table
from harness.plan.formats.detect import read_strategy_file
from harness.plan.formats.pipedream import parse_graph_txt
from harness.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
)

_MOST_LINKS = 20
_COLOURS = ("lightblue", "palegreen", "lightsalmon", "gold", "plum", "lightgrey", "beige")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = (
        "Print a graph, profile, cluster or strategy, in a format of the harness, PipeDream or "
        "FlexFlow. The file's content says which kind it is."
    )
    parser.add_argument("file", type=Path, help="file of any of these kinds")
    parser.add_argument("--dot", action="store_true", help="print a graph as Graphviz source")
    parser.add_argument(
        "--graph", type=Path, metavar="FILE", help="with --dot and a strategy: the strategy's graph"
    )


def run(args: argparse.Namespace) -> None:
    with naming(args.file):
        lines = show_file(args.file, dot=args.dot, graph_path=args.graph)
    print("\n".join(lines))


def show_file(path: Path, *, dot: bool = False, graph_path: Path | None = None) -> list[str]:
    """Lines that show a file.

    Args:
        dot: Graphviz source of a graph, or of a strategy over its graph.
        graph_path: the graph of a strategy that is drawn.

    Raises:
        ConfigError: missing, dot asked for something that cannot be drawn, or a graph without dot.
        HarnessError: malformed.
    """
    if graph_path is not None and not dot:
        raise ConfigError(f"--graph {graph_path} is for drawing a strategy: give --dot too")
    data = read_file(path, "file", is_given=True)
    schema = _schema(data)
    if schema == "harness-graph":
        graph = Graph.from_json(data, source=str(path))
        return graph_dot(graph) if dot else graph_lines(graph)
    if _is_graph_txt(data):
        graph, profile = _parse_graph_txt(data, path)
        return graph_dot(graph) if dot else graph_lines(graph, profile)
    if dot and schema == "harness-strategy" and graph_path is not None:
        return strategy_dot(Strategy.from_json(data, source=str(path)), load_graph(graph_path))
    if dot:
        raise ConfigError(
            f"{path} is not a graph: --dot draws graphs, and with --graph FILE strategies"
        )
    if schema == "harness-profile":
        return profile_lines(Profile.from_json(data, source=str(path)))
    if schema == "harness-cluster":
        return cluster_lines(Cluster.from_json(data, source=str(path)))
    imported = read_strategy_file(path)
    if isinstance(imported.content, Strategy):
        return strategy_lines(imported.content)
    note = f"{imported.format} ({imported.note})" if imported.note else imported.format
    lines = [note, imported.describe()]
    if isinstance(imported.content, list):
        rows = [
            [e.name, ",".join(map(str, e.dims)), ",".join(map(str, e.devices))]
            for e in imported.content
        ]
        return [*lines, *table(["operator", "dims", "devices"], rows)]
    return lines + json.format(json.encode(imported.content), indent=1).decode().splitlines()


class _SchemaTag(msgspec.Struct, frozen=True):
    schema: str = ""


def _schema(data: bytes) -> str:
    """The `schema` of a JSON object; empty for anything else."""
    try:
        return decode(data, _SchemaTag, source="", error=ConfigError).schema
    except ConfigError:
        return ""


def _is_graph_txt(data: bytes) -> bool:
    first = data.replace(b"\0", b"").lstrip().partition(b"\n")[0]  # UTF-16 has zeros between
    return b" -- " in first and b"_compute_time=" in first


def _parse_graph_txt(data: bytes, path: Path) -> tuple[Graph, Profile]:
    text = decode_text(data, str(path), GraphError)
    return parse_graph_txt(text, name=path.stem, source=str(path))


def graph_lines(graph: Graph, profile: Profile | None = None) -> list[str]:
    """A header and a row per operator; with times when a profile of whole operators is given."""
    times = {p.operator: p for p in profile.measurements} if profile is not None else {}
    batch = "unknown minibatch" if graph.batch is None else f"minibatch {graph.batch}"
    lines = [
        f"graph {graph.name}: {len(graph.operators)} operators, {batch}, "
        f"{format_bytes(graph.parameter_bytes)} of parameters, hash {graph.content_hash()}"
    ]
    total_s = sum(p.forward_s + p.backward_s for p in times.values())
    if times:
        lines.append(f"forward and backward of all operators: {format_duration(total_s)}")
    rows = []
    for operator in graph.operators:
        point = times.get(operator.profile_key)
        row = [operator.name, operator.kind, ", ".join(operator.inputs) or "-"]
        row += [format_bytes(operator.parameter_bytes), format_bytes(operator.activation_bytes)]
        if times:
            seconds = [point.forward_s, point.backward_s] if point else []
            row += [format_duration(each) for each in seconds] or ["-", "-"]
        else:
            row += [format_shape(operator.shape), f"{operator.forward_flops:.3g}"]
        rows.append(row)
    header = ["operator", "kind", "inputs", "parameters", "output bytes"]
    header += ["forward", "backward"] if times else ["output", "forward FLOPs"]
    return [*lines, *table(header, rows)]


def strategy_dot(strategy: Strategy, graph: Graph) -> list[str]:
    """Graphviz source of the graph, coloured by stage, with each operator's cuts and devices.

    Raises:
        ConfigError: the strategy places an operator that the graph does not have.
    """
    foreign = set(strategy.operators) - set(graph.index())
    if foreign:
        raise ConfigError(
            f"strategy {strategy.name!r} places {min(foreign)!r}, which graph {graph.name!r} does "
            "not have: give the graph that it is for"
        )
    notes = {
        name: f"{_cuts(plan)} on {','.join(map(str, plan.devices))}"
        for name, plan in strategy.operators.items()
    }
    stage_of = {name: plan.stage for name, plan in strategy.operators.items()}
    return graph_dot(graph, stage_of, notes)


def graph_dot(
    graph: Graph, stage_of: Mapping[str, int] | None = None, notes: Mapping[str, str] | None = None
) -> list[str]:
    """Graphviz source; coloured by stage when stages are known; notes stand under the names."""
    known = stage_of or {
        operator.name: stage
        for operator in graph.operators
        if isinstance(stage := operator.attrs.get("stage_id"), int)
    }
    lines = [f"digraph {_quote(graph.name)} {{", "  node [shape=box];"]
    for operator in graph.operators:
        note = (notes or {}).get(operator.name, format_bytes(operator.activation_bytes))
        label = f"{operator.name}\\n{operator.kind}\\n{note}"
        fill = ""
        if operator.name in known:
            colour = _COLOURS[known[operator.name] % len(_COLOURS)]
            fill = f", style=filled, fillcolor={colour}"
        lines.append(f"  {_quote(operator.name)} [label={_quote(label)}{fill}];")
    for operator in graph.operators:
        lines += [f"  {_quote(name)} -> {_quote(operator.name)};" for name in operator.inputs]
    return [*lines, "}"]


def _quote(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def profile_lines(profile: Profile) -> list[str]:
    """A header, how faithful the sum over operators is, and a row per measurement."""
    lines = [
        f"profile of {profile.model}: {len(profile.measurements)} measurements on "
        f"{', '.join(profile.device_kinds) or 'nothing'}, hash {profile.content_hash()}"
    ]
    lines += [
        f"{step.device_kind}, batch {step.batch}, {step.dtype}: the whole step takes "
        f"{format_duration(step.step_s)}, its operators add up to "
        f"{format_duration(step.operators_s)}: calibration {step.calibration:.2f}"
        for step in profile.whole_steps
    ]
    rows = [
        [
            point.operator,
            point.device_kind,
            format_shape(point.shape),
            point.dtype,
            format_duration(point.forward_s),
            format_duration(point.backward_s),
            cell(point.saved_bytes, format_bytes),
            cell(point.spread, ".1%"),
        ]
        for point in profile.measurements
    ]
    header = ["operator", "device", "output", "dtype", "forward", "backward", "kept", "spread"]
    return [*lines, *table(header, rows)]


def cluster_lines(cluster: Cluster) -> list[str]:
    """Devices, and links: one line each when few, else the range."""
    lines = [f"cluster: {len(cluster.nodes)} nodes, {cluster.n_devices} devices"]
    rows = [
        [
            device.name,
            device.kind,
            format_bytes(device.memory_bytes),
            f"{device.speed:g}",
            ", ".join(f"{k} {format_flops(v)}" for k, v in device.flops_per_s.items()) or "-",
            cell(node.nic_bytes_per_s, format_bandwidth),
        ]
        for node in cluster.nodes
        for device in node.devices
    ]
    lines += table(["device", "kind", "memory", "speed", "matmul", "NIC"], rows)
    if len(cluster.links) <= _MOST_LINKS:
        lines += [
            f"link {link.source} -> {link.target}: {format_bandwidth(link.bandwidth_bytes_per_s)}, "
            f"latency {format_duration(link.latency_s)}"
            for link in cluster.links
        ]
    else:
        rates = [link.bandwidth_bytes_per_s for link in cluster.links]
        lines.append(
            f"{len(rates)} links: {format_bandwidth(min(rates))} to "
            f"{format_bandwidth(max(rates))}, median {format_bandwidth(statistics.median(rates))}"
        )
    if cluster.collectives:
        measured = sorted({(p.operation, p.n_ranks) for p in cluster.collectives})
        curves = ", ".join(f"{operation} on {n}" for operation, n in measured)
        lines.append(f"measured collectives: {curves}")
    return lines


def strategy_lines(strategy: Strategy) -> list[str]:
    """A header and a row per operator."""
    lines = [
        f"strategy {strategy.name}: batch {strategy.batch}, "
        f"{format_count(strategy.n_microbatches, 'microbatch')}, {strategy.schedule}, "
        f"{format_count(len(strategy.stages), 'stage')}"
    ]
    if strategy.shard_state != "none":
        lines.append(f"shards {strategy.shard_state}")
    if again := [str(k) for k, stage in enumerate(strategy.stages) if stage.recompute]:
        lines.append(f"recomputes stage {', '.join(again)}")
    if strategy.made_for.model:
        lines.append(f"made for {strategy.made_for.model}, graph {strategy.made_for.graph_hash}")
    rows = [
        [name, str(plan.stage), _cuts(plan) or "whole", ",".join(map(str, plan.devices))]
        for name, plan in strategy.operators.items()
    ]
    return [*lines, *table(["operator", "stage", "partition", "devices"], rows)]


def _cuts(plan: OperatorPlan) -> str:
    cuts = ", ".join(f"{dim} {cut}" for dim, cut in plan.partition.items())
    return cuts if plan.keys == "input" else f"{cuts}, keys {plan.keys}"


def load_graph(path: Path) -> Graph:
    """A graph file, ours or PipeDream's.

    Raises:
        GraphError: missing or malformed.
    """
    data = read_file(path, "graph file", GraphError, is_given=True)
    if _is_graph_txt(data):
        return _parse_graph_txt(data, path)[0]
    return Graph.from_json(data, source=str(path))
