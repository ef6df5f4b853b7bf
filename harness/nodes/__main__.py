"""`bash setup/check_nodes.sh [hostfile]`: are these hosts ready to train together?"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness.domain.hostfile import load_hostfile
from harness.errors import run_command
from harness.inputs import CommandParser
from harness.nodes.checks import CHECKS, judge_all, select
from harness.nodes.facts import worst
from harness.nodes.report import Look, render, to_json
from harness.nodes.survey import CHECKOUT, environment, login_seconds, survey_hosts


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, CHECKS))
    table = "\n".join(f"  {name.ljust(width)}  {check.title}" for name, check in CHECKS.items())
    parser = CommandParser(
        prog="setup/check_nodes.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Check all hosts of a hostfile over ssh in parallel and print a remedy for\n"
        "each problem. The hosts need no installation, and nothing on them is changed.",
        epilog=f"checks, in this order:\n{table}\n\n"
        "exit code: 0 all OK, 1 a WARN, 2 a CRITICAL (or a wrong call), 3 an UNKNOWN\n\n"
        "examples:\n"
        "  bash setup/check_nodes.sh                         hosts/tesla.txt\n"
        "  bash setup/check_nodes.sh my.txt --deep           also run a kernel on each GPU\n"
        "  bash setup/check_nodes.sh my.txt --only login,tcp\n"
        "  bash setup/check_nodes.sh my.txt --skip mpi,allreduce --timeout 5s\n"
        "  bash setup/check_nodes.sh my.txt --json | jq '.hosts[] | {host, status}'\n\n"
        "Meaning, thresholds and remedy of each check: docs/checks.md",
    )
    parser.add_argument(
        "hostfile", nargs="?", type=Path, default=CHECKOUT / "hosts" / "tesla.txt",
        help="file of hosts, as for mpirun --hostfile (default: hosts/tesla.txt)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", default="60s", metavar="TIME",
        help="time limit for one host (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--launch-timeout", default="60s", metavar="TIME",
        help="time limit of the MPI hello and of the all-reduce (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--deep", action="store_true", help="run a kernel on every GPU")
    for flag, what in (("--only", "run only these checks"), ("--skip", "skip these checks")):
        what += ", separated by commas"
        parser.add_argument(flag, default=[], type=_names, metavar="CHECKS", help=what)
    parser.add_argument(
        "--env", type=Path, default=environment(), metavar="PATH",
        help="the Python environment, at the same path on every host (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class _ProgressLine:
    """Shows the latest message on one line of stderr if stderr is a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __call__(self, message: str) -> None:
        if self._is_shown:
            print(f"\r\033[K{message} ...", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _run(arguments: argparse.Namespace) -> int:
    started_utc = datetime.now(UTC).isoformat(timespec="seconds")
    start_s = time.monotonic()
    checks = select(arguments.only, arguments.skip)
    progress = _ProgressLine()
    try:
        found = survey_hosts(
            load_hostfile(arguments.hostfile),
            hostfile=arguments.hostfile,
            env=arguments.env,
            between=checks,
            timeout_s=login_seconds(arguments.timeout, "--timeout"),
            launch_timeout_s=login_seconds(arguments.launch_timeout, "--launch-timeout"),
            deep=arguments.deep,
            progress=progress,
        )
    finally:
        progress.clear()
    findings = judge_all(found, checks)
    duration_s = time.monotonic() - start_s
    if arguments.json:
        print(to_json(found, findings, started_utc=started_utc, duration_s=duration_s))
    else:
        is_terminal = sys.stdout.isatty()
        wants_colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        look = Look(
            width=shutil.get_terminal_size().columns if is_terminal else None,
            is_coloured=is_terminal and wants_colour,
        )
        print(render(found, findings, checks, look), end="")
        print(f"Checked {len(found.reports)} hosts of {arguments.hostfile} in {duration_s:.1f} s.")
    return int(worst(finding.status for finding in findings))


def main(argv: Sequence[str] | None = None) -> int:
    """Check the hosts; returns the exit code."""
    return run_command("check_nodes", lambda: _run(_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
