"""The table of checks, and the functions that run them. User documentation: docs/checks.md."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from harness.errors import ConfigError
from harness.nodes.between import ALLREDUCE, MPI, TCP
from harness.nodes.facts import Finding, Judgement, Status
from harness.nodes.judge import access, between, gpu, machine
from harness.nodes.survey import HostReport, Survey

Judge = Callable[[HostReport, Survey], list[Judgement]]


@dataclass(frozen=True)
class Check:
    """A column of the table.

    Attributes:
        title: its subject, for --help.
        until: the section of the probe's text after the last one that this check reads. If the
            probe hung before it, the check is UNKNOWN. Empty: the check does not read the text.
    """

    judge: Judge
    title: str
    until: str = ""


CHECKS: dict[str, Check] = {
    "resolve": Check(access.judge_resolve, "its name has an address"),
    "port": Check(access.judge_port, "its ssh port takes connections"),
    "login": Check(access.judge_login, "a login without password, its host key known"),
    "shell": Check(access.judge_shell, "the login shell is a POSIX one", "cpus_allowed"),
    "clock": Check(access.judge_clock, "its clock agrees with this machine's"),
    "os": Check(machine.judge_os, "Linux, one architecture, no machine twice", "cpus_allowed"),
    "cpu": Check(machine.judge_cpu, "cores within quotas, and their load", "net_dev"),
    "memory": Check(machine.judge_memory, "free memory within limits", "net_dev"),
    "disk": Check(machine.judge_disk, "room in home, /tmp, /dev/shm and the checkout", "cgroup"),
    "nic": Check(
        machine.judge_nic, "the interface that reaches the others, and its speed", "python"
    ),
    "env": Check(
        machine.judge_environment,
        "Python, torch, mpi4py, MPI, harness: equal everywhere",
        "nvidia_cards",
    ),
    "gpu": Check(gpu.judge_gpu, "driver, memory, users, clocks, throttling, ECC, MIG", "end"),
    "cuda": Check(
        gpu.judge_torch_cuda, "torch has code for each GPU (--deep: runs a kernel)", "end"
    ),
    TCP: Check(between.judge_tcp, "connections to every other host"),
    MPI: Check(between.judge_mpi, "the real mpirun starts a rank on every host"),
    ALLREDUCE: Check(between.judge_allreduce, "torch.distributed sums over all hosts"),
}


def select(only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """The checks to show, in the table's order.

    Raises:
        ConfigError: unknown name, or no check is left.
    """
    wrong = [name for name in (*only, *skip) if name not in CHECKS]
    if wrong:
        raise ConfigError(f"there is no check {wrong[0]!r}: choose from {', '.join(CHECKS)}")
    chosen = [name for name in CHECKS if (not only or name in only) and name not in skip]
    if not chosen:
        raise ConfigError("--only and --skip leave no check: name fewer in --skip")
    return chosen


def judge_all(survey: Survey, names: Collection[str]) -> list[Finding]:
    """All findings by host, in the table's order; at least one per host and check."""
    return [
        finding
        for report in survey.reports
        for finding in _judge_host(report, survey)
        if finding.check in names
    ]


def _judge_host(report: HostReport, survey: Survey) -> list[Finding]:
    findings: list[Finding] = []
    barrier = ""
    for name, check in CHECKS.items():
        if barrier:
            findings.append(_consequence(report, name, f"{barrier} failed"))
        elif check.until and not (
            report.probe.is_complete or f"@harness:{check.until}" in report.probe.text.splitlines()
        ):
            findings.append(_consequence(report, name, "the probe hung before"))
        else:
            verdicts = check.judge(report, survey)
            findings += [Finding(report.name, name, *verdict) for verdict in verdicts]
            barrier = name if _is_barrier(name, report) else ""
    return findings


def _is_barrier(name: str, report: HostReport) -> bool:
    """Whether this check failed so that no later one can run on the host."""
    probe = report.probe
    is_proxied = probe.target is not None and probe.target.is_proxied
    if name == "resolve":
        return probe.target is None or bool(probe.resolve_error and not is_proxied)
    if name == "port":
        return bool(probe.port_error)
    return name == "login" and not report.is_in


def _consequence(report: HostReport, name: str, cause: str) -> Finding:
    return Finding(report.name, name, Status.UNKNOWN, f"not looked at: {cause}", "", True)
