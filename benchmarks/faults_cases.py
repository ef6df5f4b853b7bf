"""The table of faults: target, injection, and expected outcome of the launch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults_cluster import ROOT, Cluster

HEARTBEAT_S, COLLECTIVE_S, RUN_S = 15.0, 20.0, 90.0
# Time on a busy machine to detect that a process has ended, report it to all ranks, and shut down.
AT_ONCE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Bed:
    """The target of an injection.

    Attributes:
        trigger: a file that the user's model reads (`faults_model.py`).
        results: results directory, by its path on the nodes.
        launch: mpirun; None before it is started.
    """

    cluster: Cluster
    trigger: Path
    results: Path
    launch: subprocess.Popen[bytes] | None = None


Act = Callable[[Bed], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        words: the workload's command line.
        limit_s: the launch must end within this time after the injection, because of `limit`.
        node: the target; the message must name its host.
        before: inject before mpirun starts.
        reason: regular expressions that run.json's reason must match.
        message: regular expressions that the output must match.
        statuses: accepted statuses in run.json; None stands for no run.json.
        exit_codes: accepted exit codes of mpirun; empty: any but 0.
        cuts_off: whether the node is unreachable until healed.
        flags: of the virtual cluster.
        private: nodes with a separate small disk for results.
        at: the workload whose run is struck; default: that of the command.
    """

    name: str
    title: str
    words: tuple[str, ...]
    inject: Act
    limit_s: float = AT_ONCE_S
    limit: str = "at once"
    node: int | None = 1
    heal: Act | None = None
    before: bool = False
    reason: tuple[str, ...] = ()
    message: tuple[str, ...] = ()
    statuses: tuple[str | None, ...] = ("crash",)
    exit_codes: tuple[int, ...] = ()
    cuts_off: bool = False
    flags: tuple[str, ...] = ()
    private: tuple[int, ...] = ()
    at: str = ""

    @property
    def workload(self) -> str:
        return self.at or self.words[0]


def train(strategy: str, *more: str) -> tuple[str, ...]:
    """The command line of an endless training of the user's model."""
    model = ("--model", "benchmarks.faults_model:model", "--image-size", "8", "--n-classes", "3")
    steps = ("--batch-size", "12", "--steps", "1000000", "--warm-up", "1", "--no-sync-steps", "0")
    return ("train", *model, *steps, "--strategy", strategy, *more)


DDP = train("ddp")
LINKS = ("links", "--time-budget-s", "0.5")
MATMUL = ("matmul", "--sizes", "256", "384", "512", "640", "768", "--time-budget-s", "5")
PROFILE = ("profile", "--model", "alexnet", "--time-budget-s", "5")
SEARCH = ("search", *train("")[1:7], "--batch-size", "12", "--trials", "50")


def _fault(kind: str, node: int = 1) -> Act:
    return lambda bed: bed.cluster.fault(node, kind)


def _signal(find: Callable[[Cluster, int], int], number: signal.Signals, rank: int = 1) -> Act:
    return lambda bed: os.kill(find(bed.cluster, rank), number)


def _signal_mpirun(number: signal.Signals) -> Act:
    def act(bed: Bed) -> None:
        assert bed.launch is not None
        os.killpg(bed.launch.pid, number)

    return act


def _continue(bed: Bed) -> None:
    for pid in bed.cluster.pids(1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _model(fault: str, rank: int = 1) -> Act:
    return lambda bed: bed.trigger.write_text(f"{fault} {rank}")


def _nothing(bed: Bed) -> None:
    """No injection, because the cluster's limits are the fault."""


def _kill_sshd(node: int) -> Act:
    """Kill a node's sshd and its sessions, but no rank."""

    def act(bed: Bed) -> None:
        cluster = bed.cluster
        sessions = [pid for pid in cluster.pids(node) if _name(pid).startswith("sshd")]
        for pid in [cluster.sshd(node), *sessions]:
            os.kill(pid, signal.SIGKILL)

    return act


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _fill(node: int) -> Act:
    def act(bed: Bed) -> None:
        command = f"dd if=/dev/zero of={bed.results}/.filler bs=1k; true"
        bed.cluster.in_node(node, "sh", "-c", command)

    return act


def _empty(node: int) -> Act:
    return lambda bed: bed.cluster.in_node(node, "rm", "-f", f"{bed.results}/.filler")


def _hide(node: int, program: str) -> Act:
    """Replace a program of the environment by an empty file, on one node only."""

    def act(bed: Bed) -> None:
        path = (ROOT / ".venv/bin" / program).resolve()
        bed.cluster.in_node(node, "mount", "--bind", "/dev/null", str(path))

    return act


def _show(node: int, program: str) -> Act:
    path = (ROOT / ".venv/bin" / program).resolve()
    return lambda bed: bed.cluster.in_node(node, "umount", str(path))


def _remove_header(bed: Bed) -> None:
    for path in bed.results.glob("*-train-*/run.json"):
        path.unlink()


def _cut_for_a_while(bed: Bed) -> None:
    bed.cluster.fault(1, "cut")
    subprocess.run(["sleep", "4"], check=True)
    bed.cluster.fault(1, "heal")


_SILENT = (r"silent|last heard|no heartbeat|no sign",)
_CHECK = (r"check_nodes\.sh",)
_FULL = ("No space left on device",)


def _silent(
    name: str, title: str, words: tuple[str, ...], inject: Act, heal: Act, **more: object
) -> Fault:
    """A rank is no longer heard."""
    return Fault(
        name=name, title=title, words=words, inject=inject, heal=heal, limit_s=HEARTBEAT_S,
        limit="heartbeat", **{"reason": _SILENT, "statuses": ("timeout",), **more},
    )  # type: ignore[arg-type]  # fmt: skip


def _cut(workload: str, words: tuple[str, ...], *, node: int = 1) -> Fault:
    where = "rank 0's node" if node == 0 else "a node"
    return _silent(
        f"cut-{workload}" if node else f"cut-first-{workload}",
        f"the link of {where} is cut for good", words, _fault("cut", node), _fault("heal", node),
        node=node or None, cuts_off=True,
    )  # fmt: skip


def _frozen(name: str, words: tuple[str, ...]) -> Fault:
    title = "every process of a host stops"
    return _silent(name, title, words, _fault("freeze"), _fault("heal"), cuts_off=True)


def _stopped(name: str, words: tuple[str, ...]) -> Fault:
    return _silent(
        name, "a rank's first process is stopped", words,
        _signal(Cluster.first_process, signal.SIGSTOP), _continue, reason=(r"rank 1\b",),
        statuses=("timeout", "crash"),
    )  # fmt: skip


def _broken(name: str, title: str, act: Act, *reason: str, **more: object) -> Fault:
    """A fault of rank 1's processes."""
    given = {"words": DDP, "reason": (r"rank 1\b", *reason), **more}
    return Fault(name=name, title=title, inject=act, **given)  # type: ignore[arg-type]


FAULTS = [
    _cut("ddp", DDP),
    _cut("pipeline", train("pipeline", "--microbatches", "3")),
    _cut("searched", train("searched")),
    _cut("links", LINKS),
    _cut("matmul", MATMUL),
    _cut("profile", PROFILE),
    _cut("search", SEARCH),
    _cut("ddp", DDP, node=0),
    Fault(
        name="cut-and-back", title="the link of a node is cut for 4 s",
        words=train("ddp", "--steps", "50"),
        inject=_cut_for_a_while, limit_s=RUN_S, limit="run timeout", statuses=("ok",),
        exit_codes=(0,), node=None,
    ),
    _frozen("frozen-host", DDP),
    _frozen("frozen-host-links", LINKS),
    _stopped("first-stopped", DDP),
    _stopped("first-stopped-links", LINKS),
    _broken("training-stopped", "a rank's training process is stopped",
            _signal(Cluster.training_process, signal.SIGSTOP), limit_s=COLLECTIVE_S,
            limit="collective timeout"),
    _broken("asleep", "a rank sleeps in the user's model", _model("sleep"),
            limit_s=COLLECTIVE_S, limit="collective timeout"),
    _broken("asleep-pipeline", "a rank sleeps in the user's model", _model("sleep"),
            limit_s=COLLECTIVE_S, limit="collective timeout", words=train("pipeline")),
    _broken("first-killed", "a rank's first process is killed",
            _signal(Cluster.first_process, signal.SIGKILL), "SIGKILL|signal 9"),
    Fault(
        name="first-killed-rank0", title="rank 0's first process is killed", words=DDP, node=0,
        inject=_signal(Cluster.first_process, signal.SIGKILL, 0),
    ),
    _silent("agent-stopped", "a rank's agent is stopped", DDP,
            _signal(Cluster.agent, signal.SIGSTOP), _continue),
    _broken("agent-killed", "a rank's agent is killed", _signal(Cluster.agent, signal.SIGKILL),
            "killed"),
    _broken("training-killed", "a rank's training process is killed",
            _signal(Cluster.training_process, signal.SIGKILL), "SIGKILL"),
    _broken("raises", "a rank raises in the user's model", _model("raise"), "has a bug"),
    _broken("raises-at-build", "a rank raises while the user's model is built", _model("build"),
            "cannot be built", before=True, limit_s=60.0, limit="start-up",
            statuses=("crash", "invalid")),
    _broken("exits", "a rank's training process leaves by os._exit(3)", _model("exit"),
            "exit code 3"),
    Fault(
        name="nan", title="a rank's part of the loss becomes NaN",
        words=train("ddp", "--steps", "200"), inject=_model("nan"), limit_s=RUN_S,
        limit="run timeout", statuses=("invalid",), reason=("the loss is nan",), node=None,
    ),
    _broken("training-memory", "a rank's training process outgrows its node's 1.5 GiB",
            _model("memory"), "memory", statuses=("oom",), limit_s=30.0, exit_codes=(0,),
            limit="as long as filling takes", flags=("--memory", "4GiB,1536MiB,4GiB")),
    Fault(
        name="sshd-killed", title="sshd of a host and its sessions are killed during a run",
        words=DDP, inject=_kill_sshd(1), message=_CHECK,
    ),
    Fault(
        name="sshd-dead", title="sshd of a host is dead before the launch", words=DDP,
        inject=_kill_sshd(1), before=True, limit_s=20.0, limit="connection refused",
        statuses=(None,), message=_CHECK,
    ),
    Fault(
        name="host-cut-before", title="a host cannot be reached at the launch", words=DDP,
        inject=_fault("cut"), heal=_fault("heal"), before=True, limit_s=25.0,
        limit="ssh's ConnectTimeout", statuses=(None,), message=_CHECK, cuts_off=True,
    ),
    Fault(
        name="python-missing", title="one host has no Python in its environment", words=DDP,
        inject=_hide(1, "python"), heal=_show(1, "python"), before=True, limit_s=30.0, node=None,
        limit="start-up", statuses=("crash",), message=("node1 has no environment", "install.sh"),
        reason=("another rank could not start",),
    ),
    Fault(
        name="orted-missing", title="one host has no MPI daemon", words=DDP,
        inject=_hide(1, "orted"), heal=_show(1, "orted"), before=True, limit_s=20.0,
        limit="start-up", statuses=(None,), message=_CHECK,
    ),
    Fault(
        name="disk-full-rank0", title="rank 0's disk fills up while records are written",
        words=DDP, inject=_fill(0), heal=_empty(0), private=(0,), node=0,
        reason=_FULL, message=_FULL,
    ),
    Fault(
        name="disk-full", title="another rank's disk fills up", words=DDP, inject=_fill(1),
        heal=_empty(1), private=(1,), reason=_FULL, message=_FULL,
    ),
    Fault(
        name="disk-full-links", title="rank 0's disk fills up during links", words=LINKS,
        inject=_fill(0), heal=_empty(0), private=(0,), node=0, limit_s=RUN_S,
        limit="run timeout", reason=_FULL, message=_FULL,
    ),
    Fault(
        name="memory-small", title="a node has 150 MiB, too few for a rank's first process",
        words=DDP, inject=_nothing, before=True, flags=("--memory", "4GiB,150MiB,4GiB"),
        limit_s=45.0, limit="start-up", statuses=("oom",), message=("memory",),
    ),
    Fault(
        name="memory-profile", title="nodes of 900 MiB profile a pipeline of AlexNet",
        words=("train", "--model", "alexnet", "--strategy", "pipeline", "--batch-size", "64",
               "--steps", "3"),
        inject=_nothing, before=True, flags=("--memory", "900MiB"), limit_s=300.0,
        limit="as long as links take", statuses=("oom",), message=("memory",), node=None,
        exit_codes=(0,), at="profile",
    ),
    Fault(
        name="ctrl-c", title="Ctrl-C", words=DDP, inject=_signal_mpirun(signal.SIGINT),
        statuses=("interrupted",), node=None,
    ),
    Fault(
        name="sigterm", title="SIGTERM to mpirun", words=DDP,
        inject=_signal_mpirun(signal.SIGTERM), statuses=("interrupted",), node=None,
    ),
    Fault(
        name="header-removed", title="run.json is deleted during the run",
        words=train("ddp", "--steps", "40"), inject=_remove_header, limit_s=RUN_S,
        limit="run timeout", statuses=("ok",), exit_codes=(0,), node=None,
    ),
]  # fmt: skip
# Of --quick.
QUICK = {
    "cut-ddp", "cut-links", "cut-first-ddp", "first-stopped", "training-stopped", "first-killed",
    "first-killed-rank0", "training-killed", "raises", "training-memory", "sshd-killed",
    "sshd-dead", "host-cut-before", "python-missing", "disk-full-rank0", "memory-small", "ctrl-c",
}  # fmt: skip
