"""`python -m harness.plot results/` draws figures and a report; `compare` compares two results
directories; `import` reads logs of other programs; `trace` writes one run for Perfetto."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError, ResultsError, run_command
from harness.inputs import CommandParser, one_line, parse_flags
from harness.measure.places import make_directory

if TYPE_CHECKING:
    from harness.measure.store import Problem
    from harness.plot.headlines import Answer
    from harness.plot.render import Rendered

EXIT_CODES = """exit codes:
  0  every figure that has data is drawn; stderr names unusable runs, files and lines
  1  a figure could not be drawn from its data
  2  no figure could be drawn"""
COMPARE_EXIT_CODES = """exit codes:
  0  no measurement is slower
  1  a measurement is slower by 10 % or more, or fails
  2  the directories cannot be compared"""
MAX_LISTED = 20
MAX_ANSWERS = 3
FAILED = 1


def _parser() -> argparse.ArgumentParser:
    from harness.plot.figures import FIGURES

    figures = "".join(f"  {name:17} {title}\n" for name, title in FIGURES.items())
    parser = CommandParser(
        prog="python -m harness.plot",
        description="Draw figures and one self-contained HTML report from a results directory.\n"
        "The report begins with the fastest strategy, the verdicts and the warnings.\n\n"
        "python -m harness.plot compare --help  what became slower between two directories\n"
        "python -m harness.plot import --help   logs of other programs\n"
        "python -m harness.plot trace --help    a trace of one run for Perfetto",
        epilog=f"figures:\n{figures}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="results directory, or one run's directory")
    parser.add_argument(
        "--output", type=Path, default=Path("plots"), help="output directory (default: plots)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help="draw these figures only"
    )
    parser.add_argument(
        "--format",
        choices=["png", "svg", "pdf"],
        default="png",
        help="format of the image files (default: png)",
    )
    parser.add_argument(
        "--timings", action="store_true", help="print the duration of each part on stderr"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: answers, warnings, files, tables, skipped runs and lines",
    )
    return parser


def _trace_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m harness.plot trace",
        description="Write one run as a trace for https://ui.perfetto.dev or chrome://tracing: all "
        "ranks on one clock, with the predicted step next to the measured step.",
    )
    parser.add_argument("run", type=Path, help="one run's directory, such as results/<run>")
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write (default: plots/<run>.trace.json)"
    )
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m harness.plot compare",
        description="Compare two results directories: which devices, links, collectives and\n"
        "trainings became slower or faster, and which versions and settings differ.",
        epilog=COMPARE_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="results directory, or one run's directory")
    parser.add_argument("after", type=Path, help="the same, measured later")
    parser.add_argument(
        "--all", action="store_true", help="list measurements that are the same or unclear, too"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with all of them"
    )
    return parser


def _chosen(names: Sequence[str]) -> list[str]:
    from harness.plot.figures import FIGURES

    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ConfigError(f"no figure is called {unknown[0]!r}: choose from {', '.join(FIGURES)}")
    return [name for name in FIGURES if not names or name in names]


def _plot(args: argparse.Namespace) -> int:
    names = _chosen(args.only)
    from harness.measure.store import find_runs, without_samples, write_atomically
    from harness.plot.catalog import read_catalog, read_validations
    from harness.plot.headlines import answers, warnings
    from harness.plot.render import Timings, render
    from harness.plot.report import build_report

    timings = Timings()
    found, problems = find_runs(args.results)
    timings.end("headers")
    validations, malformed = read_validations(args.results)
    problems += malformed
    if not found and not validations:
        _complain([f"skipped {path}: {one_line(reason)}" for path, reason in problems])
        beside = f", but {len(problems)} other entries" if problems else ""
        raise ResultsError(
            f"{args.results} holds no run{beside}: make one with ./entry.sh, or import logs"
        )
    make_directory("--output", args.output)
    drawn, left_out = without_samples(found)
    catalog = read_catalog(drawn, problems, validations)
    timings.end("records")
    rendered = render(catalog, names, args.output, args.format, timings)
    report = args.output / "report.html"
    answered = rendered.attempt("answers", lambda: answers(catalog)) or []
    doubts = rendered.attempt("warnings", lambda: warnings(catalog)) or {}
    page = build_report(catalog, rendered, answered, doubts, args.results)
    write_atomically(report, page.encode(errors="replace"))
    timings.end("report")
    if args.timings:
        for name, seconds in timings.seconds.items():
            print(f"{name}: {seconds:.2f} s", file=sys.stderr)
    skipped = [*left_out, *catalog.skipped]
    _complain([f"skipped {path}: {one_line(reason)}" for path, reason in skipped])
    _complain([f"failed: {name}: {one_line(reason)}" for name, reason in rendered.failed])
    if args.json:
        _print_json(report, skipped, rendered, answered, doubts)
    else:
        _print_drawn(report, rendered, answered)
    return FAILED if rendered.failed else 0


def _print_json(
    report: Path,
    skipped: Sequence[Problem],
    rendered: Rendered,
    answered: Sequence[Answer],
    doubts: Mapping[str, Sequence[str]],
) -> None:
    document = {
        "report": str(report),
        "answers": [
            {
                "cell": answer.cell,
                "sentence": answer.sentence,
                "strategies": [
                    {"cell": cell, "strategy": row.strategy} | dataclasses.asdict(row)
                    for cell, row in answer.rows
                ],
            }
            for answer in answered
        ],
        "warnings": doubts,
        "files": [str(file) for d in rendered.drawn for file in d.files],
        "missing": rendered.missing,
        "failed": rendered.failed,
        "skipped": [(str(path), reason) for path, reason in skipped],
        "tables": {
            d.figure.name: json.loads(d.table.to_json(orient="records")) for d in rendered.drawn
        },
    }
    print(json.dumps(document, indent=1))


def _print_drawn(report: Path, rendered: Rendered, answered: Sequence[Answer]) -> None:
    for name, reason in rendered.missing:
        print(f"not drawn: {name}: {reason}")
    made = ", ".join(d.figure.name for d in rendered.drawn)
    print(f"drawn into {report.parent}: {made or 'no figure'}")
    compared = [answer for answer in answered if answer.cell]
    for answer in compared[:MAX_ANSWERS]:
        print(one_line(f"{answer.cell}: {answer.sentence}", 1000))
    print(f"report: {report}")


def _complain(lines: Sequence[str]) -> None:
    """Print skipped and failed parts on stderr; the report has all of them."""
    shown = lines if len(lines) <= MAX_LISTED + 1 else lines[:MAX_LISTED]
    for line in shown:
        print(one_line(line, 1000), file=sys.stderr)
    if len(lines) > len(shown):
        print(f"... and {len(lines) - len(shown)} more ({len(lines)} in all)", file=sys.stderr)


def _import(words: Sequence[str]) -> None:
    from harness.plot.imports import READERS, ImportOptions, import_logs

    facts = parse_flags(ImportOptions, words, "python -m harness.plot import")
    if not facts.paths:
        raise ConfigError("name a log, or a directory of logs; see --help")
    for name in ("batch_per_device", "epoch_samples", "weak_share"):
        if not 0 < getattr(facts, name) <= 2**31:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(facts, name)} must be above 0, and at most 2**31")
    if facts.weak_share > 1:
        raise ConfigError(f"--weak-share {facts.weak_share} is a share: give one up to 1")
    imported, problems = import_logs(facts.paths, facts.into, facts)
    for path, reason in problems:
        print(f"skipped {one_line(str(path))}: {reason}", file=sys.stderr)
    for run_dir in imported:
        print(f"wrote {run_dir}")
    if imported and (words := _assumed(facts)):
        print(f"assumed where a log does not say it: {' '.join(words)}")
    if not imported:
        paths = one_line(", ".join(map(str, facts.paths)))
        raise ResultsError(f"no log could be imported from {paths}: give a {' or '.join(READERS)}")


def _assumed(facts: Any) -> list[str]:
    """The flags whose defaults label the runs, because nobody gave them."""
    from harness.plot.imports import ImportFacts

    default = {field.name: field.default for field in dataclasses.fields(ImportFacts)}
    return [
        f"--{name.replace('_', '-')} {value}"
        for name, value in default.items()
        if value and getattr(facts, name) == value
    ]


def _trace(args: argparse.Namespace) -> None:
    from harness.measure.store import read_header, read_run, write_atomically
    from harness.plot.numbers import read_plan
    from harness.plot.trace import trace_bytes

    try:
        run, skipped = read_run(args.run, read_header(args.run))
    except ResultsError as error:
        raise ResultsError(f"{error}: give one run's directory, not all results") from None
    plan, problems = read_plan(args.run)
    _complain([f"skipped {path}: {one_line(r)}" for path, r in [*skipped, *problems]])
    out: Path = args.output or Path("plots") / f"{run.header.run_id}.trace.json"
    make_directory("--output", out.parent)
    data = trace_bytes(run, plan)
    write_atomically(out, data)
    print(f"wrote {out}: open it in https://ui.perfetto.dev or chrome://tracing")


def _compare(args: argparse.Namespace) -> int:
    from harness.plot.compare import as_json, as_text, compare

    found = compare(args.before, args.after)
    _complain([f"skipped {path}: {one_line(reason)}" for path, reason in found.problems])
    print(as_json(found) if args.json else as_text(found, is_whole=args.all))
    return FAILED if found.is_worse else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        if words[:1] == ["import"]:
            _import(words[1:])
        elif words[:1] == ["compare"]:
            return _compare(_compare_parser().parse_args(words[1:]))
        elif words[:1] == ["trace"]:
            _trace(_trace_parser().parse_args(words[1:]))
        else:
            return _plot(_parser().parse_args(words))
        return 0

    return run_command("error", run, "interrupted; figures that are written are whole")


if __name__ == "__main__":
    sys.exit(main())
