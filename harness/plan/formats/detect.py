"""Read a strategy file of any known format, and say which format and order of dims was taken."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.domain.files import decode
from harness.domain.strategy import SCHEMA, Strategy
from harness.errors import StrategyError
from harness.inputs import decode_text, read_file, shorten
from harness.plan.formats.convert import describe_entries
from harness.plan.formats.flexflow import DimOrder, Entry, parse_console, parse_text
from harness.plan.formats.flexflow_protobuf import parse_protobuf
from harness.plan.formats.pipedream_plan import PipeDreamPlan


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
        """Describe the strategy in one line.

        Args:
            order: of the dims of a FlexFlow file.
        """
        if isinstance(self.content, Strategy):
            return self.content.name
        if isinstance(self.content, PipeDreamPlan):
            counts = [str(len(ranks)) for ranks in self.content.ranks()]
            stages = "1 stage" if len(counts) == 1 else f"{len(counts)} stages"
            return f"pipeline of {stages} with {'-'.join(counts)} replicas"
        return describe_entries(self.content, order)


_NO_TEXT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_INNERMOST = "dims taken innermost first, samples last, as FlexFlow writes them"


def read_strategy_file(path: Path) -> Imported:
    """Read a strategy of any format.

    Raises:
        StrategyError: missing, or of no known format; names the path.
    """
    return detect(read_file(path, "strategy file", StrategyError, is_given=True), source=str(path))


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
    if "schema" in keys:
        return Imported("harness", Strategy.from_json(data, source=source))
    raise StrategyError(
        f"{source} is neither {SCHEMA} nor a PipeDream plan: it has {shorten(sorted(keys))}"
    )
