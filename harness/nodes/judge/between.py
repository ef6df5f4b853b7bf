"""Verdicts on checks between hosts: TCP between pairs, an MPI hello, an all-reduce."""

from collections import Counter

from harness.nodes.between import Connection, Pairs
from harness.nodes.facts import Judgement, critical, ok, unknown, warn
from harness.nodes.mpi import network_flags
from harness.nodes.survey import HostReport, Survey
from harness.units import format_duration

_REASONS = {
    "resolve": "does not resolve there",
    "timeout": "no answer",
    "refused": "refused",
    "impostor": "another machine answers",
    "interface": "no answer at the address that runs take",
}
# By which torch and Open MPI take another interface; entry.sh reads them from a file.
_INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include",
)  # fmt: skip


def judge_tcp(report: HostReport, survey: Survey) -> list[Judgement]:
    """This host can connect to every other one, on an arbitrary port."""
    pairs = survey.pairs
    if len(survey.reports) == 1:
        return ok("no other host to connect to")
    if excluded := _excluded(report, survey):
        return excluded
    if pairs is None:
        return unknown("no other host answered", "repair the other hosts")
    if report.name in pairs.silent:
        return unknown(
            f"its test program failed: {pairs.silent[report.name]}",
            f"ssh {report.name} python3 -V (the test needs any Python 3)",
        )
    mine = {target: c for (source, target), c in pairs.connections.items() if source == report.name}
    failed = {target: c for target, c in mine.items() if c.error}
    if failed:
        return _explain_failures(report, mine, failed, survey, pairs)
    slowest_s = max((c.rtt_s or 0.0 for c in mine.values()), default=0.0)
    text = f"reaches {len(mine)} of {len(mine)}, round trip up to {format_duration(slowest_s)}"
    return ok(text + _without(survey, (*mine, report.name)))


def _excluded(report: HostReport, survey: Survey) -> list[Judgement]:
    if not report.probe.is_complete:
        return unknown("left out: its probe did not end", "see login")
    if report.name in survey.late:
        return unknown(
            f"answered after {report.probe.duration_s:.1f} s, too late to take part",
            f"raise --timeout above {2 * report.probe.duration_s:.0f}",
        )
    return []


def _explain_failures(
    report: HostReport,
    mine: dict[str, Connection],
    failed: dict[str, Connection],
    survey: Survey,
    pairs: Pairs,
) -> list[Judgement]:
    name = report.name
    reasons = [
        f"{target} ({_REASONS.get(c.error, c.error)}{': ' + c.detail if c.detail else ''})"
        for target, c in failed.items()
    ]
    text = f"reaches {len(mine) - len(failed)} of {len(mine)}; not {', '.join(reasons)}"
    errors = {connection.error for connection in failed.values()}
    if errors & {"resolve", "impostor"}:
        targets = " ".join(one.probe.hostname for one in survey.reports if one.name in failed)
        return critical(text, f"ssh {name} getent hosts {targets}; correct its /etc/hosts")
    if errors == {"interface"}:
        return critical(text, _other_interface(report))
    blamed = [target for target in failed if _is_shut(target, pairs)]
    guilty = blamed[0] if blamed else name
    return critical(
        text,
        f"open all TCP ports between the hosts in the firewall of {guilty}: "
        f"ssh {guilty} sudo iptables -L -n (or ufw status)",
    )


def _other_interface(report: HostReport) -> str:
    """The settings by which runs take the interface of the hosts' names."""
    named = next((route.interface for route in report.facts.peer_routes), "INTERFACE")
    lines = (f"{name}={named}" for name in _INTERFACE_VARIABLES)
    return (
        f"repair the network of {report.facts.run_interface}; or, if it is to lead nowhere, write "
        f"into hosts/{report.facts.hostname}.env, each on a line, {', '.join(lines)}"
    )


def _is_shut(target: str, pairs: Pairs) -> bool:
    """Whether all connections to the target fail, so that its firewall is the likely cause."""
    into = [c for (_, end), c in pairs.connections.items() if end == target]
    return all(connection.error for connection in into)


def _without(survey: Survey, hosts: tuple[str, ...]) -> str:
    """A note that names the hosts which a check between hosts could not include."""
    missing = [report.name for report in survey.reports if report.name not in hosts]
    return f"; without {', '.join(missing)}" if missing else ""


def judge_mpi(report: HostReport, survey: Survey) -> list[Judgement]:
    """mpirun starts a rank on this host, and the job has the expected size and machines."""
    hello = survey.hello
    if excluded := _excluded(report, survey):
        return excluded
    if not survey.has_mpirun:
        return unknown("no mpirun on this machine", "bash setup/install.sh")
    if hello is None or report.name not in hello.hosts:
        remedy = f"bash setup/sync_env.sh {survey.order.hostfile}"
        return unknown("left out: no MPI or mpi4py there", remedy)
    if report.name in hello.culprits:
        remedy = f"mpirun -np 1 --host {report.name} hostname"
        return critical(f"no rank starts: {hello.culprits[report.name]}", remedy)
    if hello.error and hello.culprits:
        culprits = ", ".join(hello.culprits)
        return unknown(f"one rank starts, but the whole job fails on {culprits}", "see there")
    if hello.error:
        where = f"--map-by node --hostfile {survey.order.hostfile}"
        program = f"{survey.order.env_dir}/bin/python -m mpi4py.bench helloworld"
        return critical(
            f"the job over {len(hello.hosts)} hosts fails: {hello.error}",
            "open all TCP ports between the hosts (ranks listen from 1024 on); then try "
            f"mpirun -np {len(hello.hosts)} {where} {program}",
        )
    return _judge_slots(report, survey) + _judge_names(report, survey)


def _judge_slots(report: HostReport, survey: Survey) -> list[Judgement]:
    has_slots = report.probe.host.slots is not None
    if has_slots or len(survey.reports) == 1 or report.facts.n_cores == 1:
        return []
    n_gpus = len(report.facts.gpu.gpus)
    return warn(
        "its line says no slots=: mpirun takes one for each core, and fills this host first",
        f"write `{report.name} slots={n_gpus or 1}` in the hostfile",
    )


def _judge_names(report: HostReport, survey: Survey) -> list[Judgement]:
    hello = survey.hello
    assert hello is not None
    n_ranks, n_expected = len(hello.names), len(hello.hosts)
    if n_ranks != n_expected:
        return critical(
            f"the job has {n_ranks} rank(s), {n_expected} were asked for: mpirun and mpi4py's "
            "library are of different MPIs",
            f"bash setup/install.sh, then bash setup/sync_env.sh {survey.order.hostfile}",
        )
    by_name = {other.name: other.facts.hostname for other in survey.reports}
    missing = Counter(by_name[host] for host in hello.hosts) - Counter(hello.names)
    if missing[report.facts.hostname]:
        return critical(
            f"no rank ran on {report.facts.hostname}; they ran on {', '.join(hello.names)}",
            f"mpirun -np 1 --host {report.name} hostname; correct /etc/hosts where it says another",
        )
    if hello.network:
        return warn(
            f"the job starts only if mpirun gets the network {hello.network}",
            f"mpirun {' '.join(network_flags(hello.network))} ... in every run: hosts have "
            "interfaces with addresses that lead nowhere",
        )
    spent = format_duration(hello.duration_s)
    text = f"{n_ranks} ranks on {n_ranks} hosts started and ended in {spent}"
    return ok(text + _without(survey, hello.hosts))


def judge_allreduce(report: HostReport, survey: Survey) -> list[Judgement]:
    """torch.distributed sums over all hosts, with the correct sum on this one."""
    reduction = survey.reduction
    if excluded := _excluded(report, survey):
        return excluded
    if not report.facts.has_package("torch"):
        remedy = f"bash setup/sync_env.sh {survey.order.hostfile}"
        return unknown("left out: no torch there", remedy)
    if reduction is None:
        return unknown("not run: no host was ready", "see environment")
    if report.name in reduction.left_out:
        return critical(
            f"torch does not get ready: {reduction.left_out[report.name]}",
            f"ssh {report.name} {survey.order.env_dir}/bin/python -c 'import torch'",
        )
    if report.name in reduction.errors:
        return _explain_rank(report, survey, reduction.errors[report.name])
    if reduction.errors:
        failed = ", ".join(reduction.errors)
        return warn(f"right here, but not on {failed}", "see there")
    spent = format_duration(reduction.duration_s or 0.0)
    text = f"{reduction.backend}, {len(reduction.hosts)} ranks, 1 MiB in {spent}"
    return ok(text + _without(survey, reduction.hosts))


def _explain_rank(report: HostReport, survey: Survey, error: str) -> list[Judgement]:
    assert survey.reduction is not None
    interface = report.facts.cluster_interface
    name = interface.name if interface else "the right interface"
    variable = "NCCL" if survey.reduction.backend == "nccl" else "GLOO"
    return critical(
        f"{survey.reduction.backend} over {len(survey.reduction.hosts)} hosts fails: {error}",
        f"repair tcp and nic first; then look with {variable}_SOCKET_IFNAME={name} and "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL",
    )
