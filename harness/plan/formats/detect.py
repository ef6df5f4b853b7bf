"""Read a strategy file of any known format, and say which format and order of dims was taken.

Strategy files from one format to another, as `python -m harness.plan convert` does.
"""

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.files import decode
from harness.domain.graph import Graph
from harness.domain.strategy import SCHEMA, Strategy, check_names, validate
from harness.errors import ConfigError, StrategyError
from harness.inputs import decode_text, read_file, shorten
from harness.plan.formats.flexflow import (
    DimOrder,
    Entry,
    describe_entries,
    entries_from_strategy,
    parse_console,
    parse_text,
    print_console,
    print_text,
    strategy_from_entries,
)
from harness.plan.formats.flexflow_protobuf import parse_protobuf, print_protobuf
from harness.plan.formats.pipedream import PipeDreamPlan, from_strategy, to_strategy
from harness.units import format_count


@dataclass(frozen=True)
class Imported:
    """A file's content.

    Attributes:
        format: `harness`, `flexflow console`, `flexflow text`, `flexflow protobuf v1` or
            `... r21`, `pipedream plan`.
        note: assumptions made in reading it.
    """

    format: str
    content: Strategy | list[Entry] | PipeDreamPlan
    note: str = ""

    def describe(self, order: DimOrder = "innermost_first") -> str:
        if isinstance(self.content, Strategy):
            return self.content.name
        if isinstance(self.content, PipeDreamPlan):
            counts = [str(len(ranks)) for ranks in self.content.ranks()]
            stages = format_count(len(counts), "stage")
            return f"pipeline of {stages} with {'-'.join(counts)} replicas"
        return describe_entries(self.content, order)


_MOST_CHECKED = 4096  # devices
_NO_TEXT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_INNERMOST = "dims taken innermost first, samples last, as FlexFlow writes them"


def read_strategy_file(path: Path) -> Imported:
    """Read a strategy of any format.

    Raises:
        StrategyError: missing, or of no known format; names the path.
    """
    return detect(read_file(path, "strategy file", StrategyError, is_given=True), source=str(path))


def load_strategy_file(path: Path) -> Strategy:
    """Read a strategy in the harness's own format.

    Raises:
        StrategyError: missing, malformed, or of another format; names the path.
    """
    found = read_strategy_file(path)
    if not isinstance(found.content, Strategy):
        raise StrategyError(
            f"{path} is a {found.format}: convert it by `python -m harness.plan convert {path} "
            "--to harness --graph GRAPH --output OUT.json`, and train that"
        )
    return found.content


def detect(data: bytes, *, source: str) -> Imported:
    """Tell the format by content, not by the file's name.

    Raises:
        StrategyError: of no known format, or broken; names `source`.
    """
    if data.lstrip().startswith(b"{"):
        return _detect_json(data, source)
    text = _text(data, source)
    if text is None:
        generation, entries = parse_protobuf(data, source=source)
        return Imported(f"flexflow protobuf {generation}", entries, _INNERMOST)
    start = text.lstrip("\ufeff \t\r\n")[:1]
    if start == "{":
        return _detect_json(text.encode(), source)
    if start.isascii() and start.isdigit():
        return Imported("flexflow text", parse_text(text, source=source), _INNERMOST)
    if "num_dims" not in text:
        first = text.strip().partition("\n")[0]
        raise StrategyError(
            f"{source} is no strategy, its first line is {shorten(first)}: give JSON as search "
            "writes it, or FlexFlow's lines, [Dense_100] num_dims(2) dims[1,2] device_ids[0,1]"
        )
    return Imported("flexflow console", parse_console(text, source=source), _INNERMOST)


def _text(data: bytes, source: str) -> str | None:
    """The file as text, with its own ends of lines; None when it holds bytes that no text has."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return decode_text(data, source, StrategyError)
    if _NO_TEXT.search(data):
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _detect_json(data: bytes, source: str) -> Imported:
    keys = decode(data, dict[str, msgspec.Raw], source=source, error=StrategyError)
    if bytes(keys.get("module_to_stage_map", b"")) == b"null":
        raise StrategyError(
            f"{source} has no stages (module_to_stage_map is null, as for one worker): PipeDream's "
            "optimizer and convert_graph_to_model.py write a plan"
        )
    if "module_to_stage_map" in keys:
        plan = PipeDreamPlan.from_json(data, source=source)
        note = "replicas share each microbatch; which operators a module has is not in the file"
        return Imported("pipedream plan", plan, note)
    if "schema" in keys or "operators" in keys:
        return Imported("harness", Strategy.from_json(data, source=source))
    raise StrategyError(
        f"{source} is neither {SCHEMA} nor a PipeDream plan: it has {shorten(sorted(keys))}, and a "
        "strategy has name, batch and operators"
    )


_FLEXFLOW: dict[str, Callable[[list[Entry]], bytes]] = {
    "flexflow-console": lambda entries: print_console(entries).encode(),
    "flexflow-text": lambda entries: print_text(entries).encode(),
    "flexflow-v1": lambda entries: print_protobuf(entries, "v1"),
    "flexflow-r21": lambda entries: print_protobuf(entries, "r21"),
}
FORMATS = ("harness", *_FLEXFLOW, "pipedream")


def convert(
    imported: Imported,
    to: str,
    *,
    graph: Graph | None = None,
    batch: int | None = None,
    order: DimOrder = "innermost_first",
) -> bytes:
    """The file's bytes in another format.

    Args:
        graph: needed from or to harness; for a PipeDream plan it says each operator's stage.
        batch: of a strategy of another project; the graph's when None.
        order: of the dims of a FlexFlow file that is read.

    Raises:
        ConfigError: the graph or the batch is needed and missing, or the strategy has another.
        StrategyError: the format cannot hold the strategy, or it is for another graph.
    """
    content = imported.content
    if to in _FLEXFLOW and isinstance(content, list):
        turned = [msgspec.structs.replace(one, dims=one.dims[::-1]) for one in content]
        return _FLEXFLOW[to](turned if order == "samples_first" else content)
    if to == "pipedream" and isinstance(content, PipeDreamPlan):
        return content.to_json()
    strategy = strategy_from(imported, graph, batch, order)
    lost = {"recomputation": any(stage.recompute for stage in strategy.stages)}
    lost[f"sharded state ({strategy.shard_state})"] = strategy.shard_state != "none"
    if to != "harness" and any(lost.values()):
        what = " and ".join(name for name, is_there in lost.items() if is_there)
        raise StrategyError(
            f"strategy {strategy.name!r} has {what}, which --to {to} cannot hold: plan without"
        )
    if graph is not None and strategy is not content and strategy.n_devices <= _MOST_CHECKED:
        known = Cluster.uniform(1, strategy.n_devices, inside_bytes_per_s=1.0, memory_bytes=1)
        validate(strategy, graph, known)
    if to in _FLEXFLOW:
        return _FLEXFLOW[to](entries_from_strategy(strategy, _needed(graph, f"--to {to}")))
    return from_strategy(strategy).to_json() if to == "pipedream" else strategy.to_json()


def strategy_from(
    imported: Imported, graph: Graph | None, batch: int | None, order: DimOrder = "innermost_first"
) -> Strategy:
    """Convert a file of any format into a strategy; arguments and errors as for `convert`."""
    content = imported.content
    if isinstance(content, Strategy):
        if batch not in (None, content.batch):
            raise ConfigError(
                f"--batch-size {batch}: strategy {content.name!r} has a batch of {content.batch}: "
                "leave out --batch-size"
            )
        if graph is not None:
            check_names(content, graph)
        return content
    graph = _needed(graph, "a file of another project")
    stages = {op.name: op.attrs.get("stage_id") for op in graph.operators}
    stage_of = {name: stage for name, stage in stages.items() if isinstance(stage, int)}
    if isinstance(content, PipeDreamPlan) and not stage_of:
        raise ConfigError(
            "a PipeDream plan does not say which operators a stage has, and no operator of graph "
            f"{graph.name!r} has a stage_id: give --graph the graph.txt that PipeDream's optimizer "
            "writes beside the plan"
        )
    batch = batch or graph.batch
    if batch is None:
        raise ConfigError("the graph does not say its batch: give --batch-size B, samples per step")
    if isinstance(content, list):
        return strategy_from_entries(content, graph, batch=batch, order=order)
    return to_strategy(content, graph, stage_of, batch=batch)


def _needed(graph: Graph | None, what: str) -> Graph:
    if graph is None:
        raise ConfigError(f"{what} needs --graph FILE, the graph that the strategy is for")
    return graph


def as_strategy(given: Strategy | Path | str) -> Strategy:
    """The strategy that a program gives, or that of its file; errors as for `load_strategy_file`.

    Raises:
        StrategyError: it is neither.
    """
    if isinstance(given, Path | str):
        return load_strategy_file(Path(given))
    if isinstance(given, Strategy):
        return given
    raise StrategyError(
        f"strategy is of type {type(given).__name__}: give its file's path, or the Strategy itself"
    )
