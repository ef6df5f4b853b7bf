"""Inject faults into runs on a virtual cluster of three nodes, and report how each launch ends.

    python benchmarks/faults.py [--quick] [--only NAME...] [--json] [--name CLUSTER]
    python benchmarks/faults.py --table FILE.jsonl >docs/faults.md

Needs root. Builds a cluster for each fault, starts a run, injects the fault, and starts another
run. A row has the time until mpirun ends, its last output, the outcome in run.json, numbers of
records, and remaining processes; `problems` lists deviations. Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison import provenance
from faults_cases import COLLECTIVE_S, FAULTS, HEARTBEAT_S, QUICK, RUN_S, Bed, Fault, train
from faults_cluster import N_NODES, ROOT, Cluster, end, wait_until_gone

from harness.measure.store import read_header, read_records

_LIMITS = {
    "--run-timeout-s": RUN_S,
    "--collective-timeout-s": COLLECTIVE_S,
    "--heartbeat-timeout-s": HEARTBEAT_S,
}
_START_S = 240.0
# Added to each limit for polling, shutdown, tables, and other load on the machine.
_GRACE_S = 20.0
_ABANDON_S = 60.0
_LEFT_S = 10.0
_MANY_LINES = 40
_SCREEN_LINES = 60
# Python's own warnings about killed processes; they contain paths of the machine.
_WARNING = re.compile(r"resource_tracker")


class Trial:
    """The trial of one fault, from building the cluster to the next run."""

    def __init__(
        self, fault: Fault, cluster: Cluster, prepared: Path | None, *, is_quick: bool
    ) -> None:
        self.fault, self.cluster, self._is_quick = fault, cluster, is_quick
        self._work = Path(tempfile.mkdtemp(prefix=f"faults-{fault.name}-"))
        self._log = self._work / "log"
        self._prepared = prepared
        self.bed = Bed(
            cluster=cluster, trigger=self._work / "trigger", results=self._work / "results"
        )

    def run(self) -> dict[str, Any]:
        """Inject the fault; returns its row."""
        try:
            self._build()
            return self._row()
        finally:
            self.cluster.down()
            shutil.rmtree(self._work, ignore_errors=True)

    def _build(self) -> None:
        fault, results = self.fault, self.bed.results
        self.cluster.up(*fault.flags)
        results.mkdir()
        for node in fault.private:
            mount = ("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(results))
            self.cluster.in_node(node, *mount)
        if self._prepared is not None and not fault.private:
            shutil.copytree(self._prepared, results, dirs_exist_ok=True)

    def _start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        limits = [word for flag, s in _LIMITS.items() for word in (flag, str(s))]
        flags = [*words, "--results", str(self.bed.results), *limits]
        variables = {"FAULT_TRIGGER": str(self.bed.trigger), "OMP_NUM_THREADS": "1"}
        return self.cluster.start(flags, log, variables)

    @property
    def _seen_results(self) -> Path:
        return self.cluster.seen_by(0, self.bed.results)

    def _run_dir(self) -> Path | None:
        """Directory of the run that the fault strikes: the latest one that was not prepared."""
        found = sorted(self._seen_results.glob(f"*-{self.fault.workload}-*"))
        before = {path.name for path in self._prepared.iterdir()} if self._prepared else set()
        return next((path for path in reversed(found) if path.name not in before), None)

    def _is_under_way(self) -> bool:
        run_dir = self._run_dir()
        if run_dir is None:
            return False
        path = run_dir / "rank0.jsonl"
        n_lines = path.read_bytes().count(b"\n") if path.exists() else 0
        return n_lines >= (_MANY_LINES if self.fault.workload == "train" else 1)

    def _row(self) -> dict[str, Any]:
        fault = self.fault
        if fault.before:
            fault.inject(self.bed)
        launch = self._start(fault.words, self._log)
        is_struck = fault.before or self._strike(launch)
        start_s = time.monotonic()
        try:
            code: int | None = launch.wait(fault.limit_s + _ABANDON_S if is_struck else 1.0)
        except subprocess.TimeoutExpired:
            code = None
        row = {
            "name": fault.name, "what": fault.title, "workload": " ".join(_short(fault.words)),
            "limit": fault.limit, "limit_s": fault.limit_s, "is_struck": is_struck,
            "time_s": round(time.monotonic() - start_s, 1), "exit_code": code,
        }  # fmt: skip
        # mpirun is on the first node, so if that is cut off, it can reach no other.
        cut_off = [] if not fault.cuts_off else [fault.node] if fault.node else [1, 2]
        reachable = [n for n in range(N_NODES) if n not in cut_off]
        row["left_s"], row["left_running"] = self._left(reachable)
        row |= self._read()
        if code is None:
            end(launch)
        if fault.heal is not None:
            fault.heal(self.bed)
            row["left_after_heal_s"], row["left_after_heal"] = self._left(range(N_NODES))
        row["next_run"] = "not tried" if self._is_quick else self._run_again()
        row["problems"] = problems(fault, self.cluster, row)
        return row

    def _strike(self, launch: subprocess.Popen[bytes]) -> bool:
        """Wait until the run has records, then inject the fault; False if the run ended before."""
        deadline_s = time.monotonic() + _START_S
        while not self._is_under_way():
            if launch.poll() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(0.2)
        time.sleep(2.0)
        self.fault.inject(replace(self.bed, launch=launch))
        return True

    def _left(self, nodes: Sequence[int]) -> tuple[float, list[str]]:
        """Wait for the processes on these nodes to end; returns seconds, and remaining ones."""

        def found() -> list[str]:
            return [f"{self.cluster.host(n)}: {words}" for n in nodes
                    for words in self.cluster.describe(self.cluster.pids(n))]  # fmt: skip

        left_s = wait_until_gone(found, _LEFT_S)
        return (round(left_s, 1), []) if left_s < _LEFT_S else (_LEFT_S, found())

    def _read(self) -> dict[str, Any]:
        log = self._log.read_text(errors="replace").replace(str(ROOT), "ROOT")
        lines = [line for line in log.splitlines() if line.strip() and not _WARNING.search(line)]
        run_dir = self._run_dir()
        row: dict[str, Any] = {"message": [line[:400] for line in lines[-_SCREEN_LINES:]]}
        if run_dir is None:
            return row | {"status": None, "reason": "", "kept": {}}
        try:
            header = read_header(run_dir)
            reason = header.reason.replace(str(ROOT), "ROOT")
            row |= {"status": header.status, "reason": reason[:600]}
        except Exception as error:
            row |= {"status": "unreadable", "reason": str(error)}
        return row | {"kept": self._kept(run_dir)}

    def _kept(self, run_dir: Path) -> dict[str, list[int]]:
        """Numbers of readable records and of broken lines, by rank."""
        kept = {}
        for rank in range(N_NODES):
            own = self.cluster.seen_by(rank, self.bed.results) / run_dir.name
            for path in (run_dir / f"rank{rank}.jsonl", own / f"rank{rank}.jsonl"):
                if path.exists():
                    records, bad = read_records(path)
                    kept[str(rank)] = [len(records), len(bad)]
                    break
        return kept

    def _run_again(self) -> str:
        """Start a short run on the same cluster and results directory; returns its outcome."""
        self.bed.trigger.unlink(missing_ok=True)
        if self.fault.flags or self.fault.name.startswith("sshd"):
            self.cluster.up()  # because its limits or its killed sshd were the fault
        log = self._work / "next"
        launch = self._start(train("ddp", "--steps", "3", "--resume"), log)
        try:
            code = launch.wait(_START_S)
        except subprocess.TimeoutExpired:
            end(launch)
            return f"did not end within {_START_S:.0f} s"
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return "ok" if code == 0 else f"exit code {code}: {' '.join(last)}"


def _short(words: Sequence[str]) -> list[str]:
    """Workload and strategy of a command line."""
    strategy = [words[words.index("--strategy") + 1]] if "--strategy" in words else []
    return [words[0], *strategy]


def problems(fault: Fault, cluster: Cluster, row: dict[str, Any]) -> list[str]:
    """Deviations of a row from the fault's expected outcome."""
    if not row["is_struck"]:
        return ["the run did not get to the injection"]
    found = []
    if row["exit_code"] is None:
        found.append(f"mpirun had not ended after {row['time_s']:.0f} s")
    elif row["time_s"] > fault.limit_s + _GRACE_S:
        found.append(f"mpirun took {row['time_s']:.0f} s, the limit is {fault.limit_s:.0f} s")
    is_expected = row["exit_code"] in fault.exit_codes if fault.exit_codes else row["exit_code"]
    if row["exit_code"] is not None and not is_expected:
        found.append(f"exit code {row['exit_code']}")
    if row["status"] not in fault.statuses:
        found.append(f"status {row['status']}, not {fault.statuses[0]}")
    host = [] if fault.node is None else [re.escape(cluster.host(fault.node))]
    if fault.statuses != (None,):
        absent = [words for words in (*host, *fault.reason) if not re.search(words, row["reason"])]
        found += [f"the reason does not say {words!r}" for words in absent]
    seen = "\n".join(row["message"])
    absent = [words for words in (*host, *fault.message) if not re.search(words, seen)]
    found += [f"the message does not say {words!r}" for words in absent]
    found += [f"left running: {words}" for words in row["left_running"]]
    found += [f"left after it came back: {words}" for words in row.get("left_after_heal", [])]
    if any(n_bad > 1 for _, n_bad in row["kept"].values()):
        found.append("more than the line being written is broken")
    if row["next_run"] not in ("ok", "not tried"):
        found.append(f"the next run: {row['next_run']}")
    return found


def prepare(cluster: Cluster, directory: Path) -> Path:
    """Measure links and operators once, for planned strategies; returns the results directory."""
    results = directory / "prepared"
    results.mkdir()
    cluster.up()
    try:
        words = train("searched", "--steps", "2")
        log = directory / "prepare"
        variables = {"FAULT_TRIGGER": str(directory / "never"), "OMP_NUM_THREADS": "1"}
        launch = cluster.start([*words, "--results", str(results)], log, variables)
        if launch.wait(900) != 0:
            raise SystemExit(f"faults: cannot prepare: {log.read_text()[-2000:]}")
    finally:
        cluster.down()
    return results


def _chosen(args: argparse.Namespace) -> list[Fault]:
    if args.only:
        if unknown := set(args.only) - {fault.name for fault in FAULTS}:
            raise SystemExit(f"faults: there is no {', '.join(sorted(unknown))}")
        return [fault for fault in FAULTS if fault.name in args.only]
    return [fault for fault in FAULTS if fault.name in QUICK or not args.quick]


def _needs_plans(fault: Fault) -> bool:
    """Whether the fault's run needs measured links and operators of others."""
    is_planned = _short(fault.words)[-1] in ("pipeline", "searched", "search")
    return is_planned and (not fault.before or fault.at != "")


def _say(row: dict[str, Any]) -> str:
    verdict = "as stated" if not row["problems"] else "; ".join(row["problems"])
    return f"{row['name']}: {row['time_s']} s, {row['status']}: {verdict}"


_PAGE = """\
# Faults

This page says how a launch ends if a host, a link, a process, a disk or a memory limit fails
during a run. Each row is one fault, which `python benchmarks/faults.py` has injected into a run of
three ranks on a virtual cluster of three nodes (commits {commits}; {machine},
2 cores without a GPU, which other programs used, too). Limits: `--run-timeout-s {run:.0f}
--collective-timeout-s {collective:.0f} --heartbeat-timeout-s {heartbeat:.0f}`. The time is from the
injection to mpirun's prompt. A launch ends as stated if it ends in the expected way, at most
{grace:.0f} s after the limit. Records are those of ranks 0, 1, 2 that can be read afterwards. The
next run is another run on the same hosts.
`python benchmarks/faults.py --table benchmarks/figures/faults.jsonl` makes this page.

| fault | run | time | limit | exit | run.json | records | left running | next run | as stated |
|---|---|---|---|---|---|---|---|---|---|
"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The text of docs/faults.md."""
    commits = ", ".join(dict.fromkeys(row["commit"].removesuffix("-dirty") for row in rows))
    lines = [_PAGE.format(
        run=RUN_S, collective=COLLECTIVE_S, heartbeat=HEARTBEAT_S, grace=_GRACE_S,
        commits=commits, machine=" and ".join(dict.fromkeys(row["machine"] for row in rows)),
    )]  # fmt: skip
    for row in rows:
        reason = row["reason"].split("\n")[0]
        reason = reason if len(reason) <= 160 else f"{reason[:157]}..."
        ended = "none" if row["status"] is None else f"{row['status']}: {reason}".rstrip(": ")
        kept = ", ".join(str(n) for n, _ in row["kept"].values()) or "-"
        cells = [
            row["what"], row["workload"], f"{row['time_s']:.0f} s",
            f"{row['limit_s']:.0f} s ({row['limit']})", str(row["exit_code"]), ended, kept,
            str(len(row["left_running"]) + len(row.get("left_after_heal", []))),
            row["next_run"], "; ".join(row["problems"]) or "yes",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n")
    return "".join(lines)


def main() -> int:
    """Inject the selected faults and print one row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object per fault")
    parser.add_argument(
        "--quick", action="store_true", help="a selection in ten minutes, without next runs"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these faults")
    parser.add_argument("--name", default="faults", help="name of the virtual cluster")
    parser.add_argument("--table", type=Path, help="print docs/faults.md from these rows")
    args = parser.parse_args()
    if args.table:
        print(page([json.loads(line) for line in args.table.read_text().splitlines()]), end="")
        return 0
    chosen, n_wrong = _chosen(args), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        cluster = Cluster(args.name, Path(directory))
        prepared: Path | None = None
        for number, fault in enumerate(chosen, start=1):
            print(f"[{number}/{len(chosen)}] {fault.name}: {fault.title}", file=sys.stderr)
            if _needs_plans(fault):
                prepared = prepared or prepare(cluster, Path(directory))
            row = Trial(fault, cluster, prepared, is_quick=args.quick).run()
            n_wrong += bool(row["problems"])
            print(_say(row), file=sys.stderr, flush=True)
            row |= provenance() | {"command": shlex.join(["python", *sys.argv])}
            if args.json:
                print(json.dumps(row), flush=True)
    print(f"{len(chosen) - n_wrong} of {len(chosen)} as stated", file=sys.stderr)
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
