"""The survey and its findings as text for people and as JSON for programs."""

import dataclasses
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness.domain.hostfile import numbered_runs
from harness.nodes.facts import Facts, Finding, Status, worst
from harness.nodes.judge.gpu import describe_gpus
from harness.nodes.survey import HostReport, Survey
from harness.units import format_bytes

SCHEMA = "harness-nodes"
SCHEMA_VERSION = 1
_COLOURS = {Status.OK: "32", Status.WARN: "33", Status.CRITICAL: "1;31", Status.UNKNOWN: "35"}
_ORDER = [Status.CRITICAL, Status.UNKNOWN, Status.WARN]
_MARGIN = len("CRITICAL  ")


@dataclass(frozen=True, kw_only=True)
class Look:
    """Format of the text: the terminal's width (None: no limit) and whether to use colour."""

    width: int | None = None
    is_coloured: bool = False

    def paint(self, text: str, status: Status) -> str:
        return f"\033[{_COLOURS[status]}m{text}\033[0m" if self.is_coloured else text


def plain(text: str) -> str:
    """Replace control characters, so that a host's output cannot control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def render(survey: Survey, findings: Sequence[Finding], checks: Sequence[str], look: Look) -> str:
    """The whole text: table, kinds of hosts, findings with remedies, verdict."""
    parts = [
        _render_table(survey, findings, checks, look),
        _render_machines(survey, look),
        _render_findings(findings, look),
        _render_verdict(survey, findings, look),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _render_table(
    survey: Survey, findings: Sequence[Finding], checks: Sequence[str], look: Look
) -> str:
    statuses: defaultdict[tuple[str, str], list[Status]] = defaultdict(list)
    for finding in findings:
        statuses[finding.host, finding.check].append(finding.status)
    cells = {place: worst(found) for place, found in statuses.items()}
    hosts = [report.name for report in survey.reports]
    margin = max(len(name) for name in ("host", *hosts))
    widths = {
        check: max(len(check), *(len(cells[host, check].name) for host in hosts))
        for check in checks
    }
    texts = []
    for block in _split_columns(checks, widths, (look.width or sys.maxsize) - margin):
        header = "  ".join(check.ljust(widths[check]) for check in block)
        rows = ["host".ljust(margin) + "  " + header]
        for host in hosts:
            painted = (
                look.paint(cells[host, check].name.ljust(widths[check]), cells[host, check])
                for check in block
            )
            rows.append(host.ljust(margin) + "  " + "  ".join(painted))
        texts.append("\n".join(row.rstrip() for row in rows))
    return "\n\n".join(texts)


def _split_columns(checks: Sequence[str], widths: dict[str, int], room: int) -> list[list[str]]:
    """Split the columns into blocks that fit the terminal's width."""
    blocks: list[list[str]] = [[]]
    used = 0
    for check in checks:
        if blocks[-1] and used + widths[check] + 2 > room:
            blocks.append([])
            used = 0
        blocks[-1].append(check)
        used += widths[check] + 2
    return blocks


def _render_machines(survey: Survey, look: Look) -> str:
    """One line for each kind of machine, with its hosts."""
    kinds: dict[str, list[str]] = {}
    for report in survey.answered:
        kinds.setdefault(plain(describe_machine(report.facts)), []).append(report.name)
    return "\n".join(_wrap(f"{host_list(hosts)}: {kind}", look, 2) for kind, hosts in kinds.items())


def describe_machine(facts: Facts) -> str:
    """A description that is the same for machines of the same kind."""
    cores = facts.usable_cores
    interface = facts.cluster_interface
    speed = interface.speed_mbit_per_s if interface else None
    usable_bytes = facts.usable_memory_bytes
    parts = [
        facts.os_name or facts.kernel,
        f"{cores:.3g} cores {facts.cpu_model}".rstrip() if cores is not None else "",
        format_bytes(usable_bytes) if usable_bytes is not None else "",
        interface.name + (f" {speed} Mbit/s" if speed else "") if interface else "",
        describe_gpus(facts.gpu) if facts.gpu.gpus else "no GPU",
    ]
    return ", ".join(part for part in parts if part)


def _render_findings(findings: Sequence[Finding], look: Look) -> str:
    """Findings by severity, one entry for equal ones, without mere consequences."""
    shown = [f for f in findings if f.status is not Status.OK]
    explained = {finding.host for finding in shown if not finding.follows}
    shown = [f for f in shown if not (f.follows and f.host in explained)]
    groups: dict[tuple[Status, str, str, str], list[Finding]] = {}
    for f in sorted(shown, key=lambda f: _ORDER.index(f.status)):
        # Findings that differ only in the host's name count as equal.
        pattern = (_without_name(f.detail, f.host), _without_name(f.remedy, f.host))
        groups.setdefault((f.status, f.check, *pattern), []).append(f)
    lines = []
    for (status, check, detail, remedy), group in groups.items():
        if len(group) == 1:
            detail, remedy = group[0].detail, group[0].remedy
        text = plain(f"{host_list([f.host for f in group])}: {check}: {detail}")
        lines.append(look.paint(status.name.ljust(_MARGIN), status) + _wrap(text, look, _MARGIN))
        if remedy:
            lines.append(" " * _MARGIN + _wrap("remedy: " + plain(remedy), look, _MARGIN))
    return "\n".join(lines)


def _without_name(text: str, host: str) -> str:
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)", "HOST", text)


def host_list(names: Sequence[str]) -> str:
    """Join names in order; three or more consecutive numbers become a range: `node[0-4], gpu7`."""
    parts: list[str] = []
    for prefix, numbers in numbered_runs(names):
        if len(numbers) > 2:
            parts.append(f"{prefix}[{numbers[0]}-{numbers[-1]}]")
        else:
            parts += [prefix + number for number in numbers]
    return ", ".join(parts)


def _wrap(text: str, look: Look, indent: int) -> str:
    """Wrap to the terminal's width with a hanging indent; never breaks within a word."""
    if look.width is None:
        return text
    lines = textwrap.wrap(
        text, max(look.width - indent, 40), break_long_words=False, break_on_hyphens=False
    )
    return ("\n" + " " * indent).join(lines)


def _render_verdict(survey: Survey, findings: Sequence[Finding], look: Look) -> str:
    status = worst(finding.status for finding in findings)
    of_hosts = [
        worst(finding.status for finding in findings if finding.host == report.name)
        for report in survey.reports
    ]
    n_good = sum(found in (Status.OK, Status.WARN) for found in of_hosts)
    return f"{look.paint(status.name, status)}: {n_good} of {len(of_hosts)} hosts are ready."


def to_json(
    survey: Survey, findings: Sequence[Finding], *, started_utc: str, duration_s: float
) -> str:
    """The report as one JSON object; docs/checks.md describes its format."""
    pairs = survey.pairs
    connections = pairs.connections if pairs else {}
    document = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "started_utc": started_utc,
        "duration_s": duration_s,
        "hostfile": survey.order.hostfile,
        "status": worst(finding.status for finding in findings).name,
        "hosts": [_host_json(report, findings) for report in survey.reports],
        "pairs": [
            {"source": source, "target": target, **dataclasses.asdict(connection)}
            for (source, target), connection in connections.items()
        ],
        "mpi": dataclasses.asdict(survey.hello) if survey.hello else None,
        "allreduce": dataclasses.asdict(survey.reduction) if survey.reduction else None,
    }
    return json.dumps(document, indent=1)


def _host_json(report: HostReport, findings: Sequence[Finding]) -> dict[str, object]:
    mine = [finding for finding in findings if finding.host == report.name]
    probe = report.probe
    return {
        "host": report.name,
        "slots": probe.host.slots,
        "status": worst(finding.status for finding in mine).name,
        "addresses": probe.addresses,
        "duration_s": probe.duration_s,
        "clock": dataclasses.asdict(probe.clock) if probe.clock else None,
        "findings": [
            {
                "check": finding.check,
                "status": finding.status.name,
                "detail": finding.detail,
                "remedy": finding.remedy,
            }
            for finding in mine
        ],
        "facts": dataclasses.asdict(report.facts) if report.is_in else None,
    }
