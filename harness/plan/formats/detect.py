"""Read a strategy file of any known format, and say which format and order of dims was taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.domain.files import decode
from harness.domain.strategy import SCHEMA, Strategy
from harness.errors import StrategyError
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
        note: what was assumed in reading it.
    """

    format: str
    content: Strategy | list[Entry] | PipeDreamPlan
    note: str = ""

    def describe(self, order: DimOrder = "innermost_first") -> str:
        """One line: what the strategy is.

        Args:
            order: of the dims of a FlexFlow file.
        """
        if isinstance(self.content, Strategy):
            return self.content.name
        if isinstance(self.content, PipeDreamPlan):
            counts = "-".join(str(len(ranks)) for ranks in self.content.ranks())
            return f"pipeline of {len(self.content.ranks())} stages with {counts} replicas"
        return describe_entries(self.content, order)


_INNERMOST = "dims taken innermost first, samples last, as FlexFlow writes them"


def read_strategy_file(path: Path) -> Imported:
    """Read a strategy of any format.

    Raises:
        StrategyError: missing, or of no known format; names the path.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StrategyError(f"strategy file {path}: {error.strerror}") from None
    return detect(data, source=str(path))


def detect(data: bytes, *, source: str) -> Imported:
    """Tell the format by content, not by the file's name.

    Raises:
        StrategyError: of no known format, or broken; names `source`.
    """
    if data.lstrip().startswith(b"{"):
        return _detect_json(data, source)
    text = _text(data)
    if text is None:
        generation, entries = parse_protobuf(data, source=source)
        return Imported(f"flexflow protobuf {generation}", entries, _INNERMOST)
    if text.lstrip()[:1].isdigit():
        return Imported("flexflow text", parse_text(text, source=source), _INNERMOST)
    return Imported("flexflow console", parse_console(text, source=source), _INNERMOST)


def _text(data: bytes) -> str | None:
    """The file as text; None when it holds bytes that no text has."""
    if any(byte < 32 and byte not in b"\t\r\n" for byte in data):
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _detect_json(data: bytes, source: str) -> Imported:
    keys = decode(data, dict[str, msgspec.Raw], source=source, error=StrategyError)
    if "module_to_stage_map" in keys:
        plan = PipeDreamPlan.from_json(data, source=source)
        note = "replicas share each microbatch; which operators a module has is not in the file"
        return Imported("pipedream plan", plan, note)
    if "schema" in keys:
        return Imported("harness", Strategy.from_json(data, source=source))
    raise StrategyError(
        f"{source} is neither {SCHEMA} nor a PipeDream plan: it has {sorted(keys)[:4]}"
    )
