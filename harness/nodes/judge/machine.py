"""Verdicts on the machine and its software."""

import shlex
from collections import Counter

from harness.domain.torch_builds import torch_problem
from harness.nodes.facts import Facts, InterfaceFacts, Judgement, critical, ok, unknown, warn
from harness.nodes.survey import HostReport, Survey
from harness.units import format_bytes

_REQUIRED = ("torch", "mpi4py")
# Whose versions change how fast a run is, or its numbers, but not whether it works.
_MAY_DIFFER = ("Python", "numpy", "torchvision", "deepspeed")


def judge_environment(report: HostReport, survey: Survey) -> list[Judgement]:
    """The environment exists at the common path, is complete, and equals that of other hosts."""
    facts, path = report.facts, survey.order.env_dir
    remedy = f"bash setup/sync_env.sh {survey.order.hostfile}"
    if facts.python is None and facts.python_error:
        return critical(f"its Python fails: {facts.python_error}", remedy)
    if facts.python_home:
        return critical(
            f"the environment at {path} needs the Python in {facts.python_home}, which this "
            "account cannot run there",
            "install that Python there for every account, or make the environment from one that "
            "all hosts have: bash setup/install.sh --python PYTHON",
        )
    if not facts.environment:
        if not any(other.facts.environment for other in survey.answered):
            remedy = f"bash setup/install.sh, then {remedy}"
        system = f" (its own Python is {facts.python.version})" if facts.python else ""
        return critical(f"no environment at {path}{system}", remedy)
    if facts.python is None:
        return unknown("its Python did not answer", f"ssh {report.name} {path}/bin/python -V")
    missing = [name for name in _REQUIRED if not facts.has_package(name)]
    if not facts.mpi:
        missing.append("mpirun")
    if missing:
        return critical(f"lacks {', '.join(missing)}", remedy)
    return _judge_versions(report, survey, remedy) or ok(_describe_software(facts))


def versions(facts: Facts) -> dict[str, str]:
    """Versions that must be equal on all hosts, by name; unknown ones are left out."""
    python = facts.python
    if python is None or not facts.environment:
        return {}
    found = {
        "Python": ".".join(python.version.split(".")[:2]),
        # Hosts with and without GPUs work together: `+cpu` and `+cu130` of one release match.
        **{
            name: python.packages.get(name, "").split("+")[0]
            for name in ("torch", "mpi4py", *_MAY_DIFFER[1:])
        },
        "MPI": facts.mpi,
        "harness": python.packages.get("training-harness", ""),
        "harness source": python.harness_hash or "",
    }
    return {name: value for name, value in found.items() if value}


def _judge_versions(report: HostReport, survey: Survey, remedy: str) -> list[Judgement]:
    """Compare with the version that most hosts have, or in a tie the first host's."""
    own = versions(report.facts)
    problem = torch_problem(own.get("torch", ""))
    verdicts = critical(problem, f"bash setup/install.sh, then {remedy}") if problem else []
    for name, value in own.items():
        values = [v[name] for o in survey.answered if name in (v := versions(o.facts))]
        usual, n_usual = Counter(values).most_common(1)[0]
        if value == usual:
            continue
        text = f"{name} {value}, while {n_usual} of {len(values)} hosts have {usual}"
        severe = warn if name in _MAY_DIFFER else critical
        verdicts += severe(text, remedy)
    return verdicts


def _describe_software(facts: Facts) -> str:
    assert facts.python is not None
    packages = facts.python.packages
    source = f" ({facts.python.harness_hash})" if facts.python.harness_hash else ""
    return (
        f"Python {facts.python.version}, torch {packages['torch']}, mpi4py {packages['mpi4py']}, "
        f"{facts.mpi}, harness {packages.get('training-harness', 'not installed')}{source}"
    )


# A job that uses half of the cores distorts measurements.
LOAD_PER_CORE_WARN = 0.5
MEMORY_WARN_BYTES = 2 * 2**30
MEMORY_CRITICAL_BYTES = 2**29
DISK_WARN_BYTES = 2**30
DISK_CRITICAL_BYTES = 100 * 2**20
# Docker's default of 64 MiB is too small for data loader workers and NCCL.
SHM_WARN_BYTES = 256 * 2**20
SPEED_WARN_MBIT_PER_S = 1000
_NOT_REPORTED = "the host did not report it"


def judge_os(report: HostReport, survey: Survey) -> list[Judgement]:
    """The host runs Linux on the same architecture as the others and is not listed twice."""
    facts = report.facts
    system, _, rest = facts.kernel.partition(" ")
    if not facts.kernel:
        return unknown(_NOT_REPORTED, f"ssh {report.name} uname -a")
    if system != "Linux":
        return critical(f"runs {system}: only Linux is supported", "take it out of the hostfile")
    verdicts = []
    namesakes = [
        other
        for other in survey.answered
        if other.facts.hostname == facts.hostname and other.name != report.name
    ]
    if namesakes and facts.hostname:
        text = f"calls itself {facts.hostname}, as {', '.join(o.name for o in namesakes)} does"
        if all(other.facts.boot_id == facts.boot_id for other in namesakes):
            remedy = "take the second name out of the hostfile, or give the hosts different names"
            verdicts += warn(text, remedy)
        else:
            remedy = f"ssh -t {shlex.quote(report.name)} sudo hostnamectl set-hostname NAME"
            verdicts += critical(f"{text}, which is another machine", remedy)
    machine = facts.kernel.split(" ")[-1]
    machines = Counter(other.facts.kernel.split(" ")[-1] for other in survey.answered)
    usual = machines.most_common(1)[0][0]
    if machine != usual:
        verdicts += critical(
            f"is {machine}, the others are {usual}: one environment does not fit both",
            f"take {report.name} out of the hostfile",
        )
    return verdicts or ok(f"{facts.os_name or 'Linux'}, {rest}")


def judge_cpu(report: HostReport, survey: Survey) -> list[Judgement]:
    """The usable cores are idle."""
    facts = report.facts
    if facts.n_cores is None:
        return unknown(_NOT_REPORTED, f"ssh {report.name} nproc")
    text = f"{facts.n_cores} cores" if facts.n_cores != 1 else "1 core"
    if facts.quota_cores is not None and facts.quota_cores < facts.n_cores:
        text += f", limited to {facts.quota_cores:.3g}"
    if facts.cpu_model:
        text += f", {facts.cpu_model}"
    load = facts.load_1min
    if load is not None and load > LOAD_PER_CORE_WARN * facts.n_cores:
        return warn(
            f"load {load:.3g} on {text}: other work disturbs what is measured",
            f"ssh {report.name} top -b -n 1, and wait or ask its owner",
        )
    return ok(text if load is None else f"{text}, load {load:.3g}")


def judge_memory(report: HostReport, survey: Survey) -> list[Judgement]:
    """Enough memory is free."""
    facts = report.facts
    usable, available = facts.usable_memory_bytes, facts.memory_available_bytes
    if usable is None or available is None:
        return unknown(_NOT_REPORTED, f"ssh {report.name} cat /proc/meminfo")
    free = min(usable, available)
    text = f"{format_bytes(free)} free of {format_bytes(usable)}"
    remedy = f"ssh {report.name} ps aux --sort -rss, and end what is not needed"
    if free < MEMORY_CRITICAL_BYTES:
        return critical(f"only {text}", remedy)
    if free < MEMORY_WARN_BYTES:
        return warn(f"only {text}", remedy)
    return ok(text)


def judge_disk(report: HostReport, survey: Survey) -> list[Judgement]:
    """Enough space is free in the home directory, /tmp, /dev/shm and the checkout."""
    verdicts = []
    for disk in report.facts.disks:
        text = f"{disk.mount} has {format_bytes(disk.free_bytes)} free"
        if disk.mount == "/dev/shm":
            if disk.free_bytes < SHM_WARN_BYTES:
                remedy = f"ssh {report.name} sudo mount -o remount,size=50% /dev/shm"
                verdicts += warn(text, remedy)
            continue
        remedy = f"ssh {report.name} du -xsh {disk.mount} (delete what is not needed)"
        if disk.free_bytes < DISK_CRITICAL_BYTES:
            verdicts += critical(f"{text}: results cannot be written", remedy)
        elif disk.free_bytes < DISK_WARN_BYTES:
            verdicts += warn(text, remedy)
    if not report.facts.disks:
        return unknown("df does not answer", f"ssh {report.name} df (a stale network mount?)")
    free = [f"{disk.mount} {format_bytes(disk.free_bytes)}" for disk in report.facts.disks]
    return verdicts or ok(", ".join(free) + " free")


def judge_nic(report: HostReport, survey: Survey) -> list[Judgement]:
    """All other hosts are reached through one interface, as fast as theirs."""
    facts = report.facts
    if len({(one.facts.hostname, one.facts.boot_id) for one in survey.reports}) == 1:
        return ok("no other machine to reach")
    interface = facts.cluster_interface
    if interface is None:
        others = " ".join(one.probe.hostname for one in survey.reports if one.name != report.name)
        return critical(
            "no route to any of the other hosts by their names",
            f"ssh {report.name} getent hosts {others}; add the names to its /etc/hosts",
        )
    if not facts.run_interface and len(survey.answered) > 1:
        return critical(
            "no interface by which a run, over IPv4, would reach the other hosts",
            f"give {interface.name} an IPv4 address on the other hosts' network; or correct "
            f"GLOO_SOCKET_IFNAME in hosts/{facts.hostname}.env or hosts/cluster.env here",
        )
    return _judge_interface(report, interface, survey) or ok(_describe(interface, facts))


def _describe(interface: InterfaceFacts, facts: Facts) -> str:
    speed = interface.speed_mbit_per_s
    rate = f", {speed} Mbit/s" if speed else ", speed unknown"
    others = [
        other.name
        for other in facts.interfaces
        if other.name not in (interface.name, "lo") and other.networks
    ]
    unused = f"; not used: {', '.join(others)}" if others else ""
    return f"{interface.name} {facts.cluster_address}{rate}{unused}{_own_name(facts)}"


def _own_name(facts: Facts) -> str:
    """A note if the host name resolves to loopback, a common default; runs do not depend on it."""
    loopback = [a for a in facts.own_addresses if a.startswith("127.") or a == "::1"]
    if not loopback:
        return ""
    return (
        f"; its own name is {loopback[0]} there (programs other than this harness may want "
        f"{facts.cluster_address} in its place in /etc/hosts)"
    )


def _judge_interface(
    report: HostReport, interface: InterfaceFacts, survey: Survey
) -> list[Judgement]:
    verdicts = []
    names = sorted({route.interface for route in report.facts.peer_routes})
    if len(names) > 1:
        verdicts += warn(
            f"reaches the others through {' and '.join(names)}",
            f"entry.sh takes {interface.name}; put the others' addresses on its network, or "
            "set the interface per host",
        )
    speed = interface.speed_mbit_per_s
    all_nics = [other.facts.cluster_interface for other in survey.answered]
    fastest = max((nic.speed_mbit_per_s or 0 for nic in all_nics if nic), default=0)
    cable = f"replace the cable, or: ssh {report.name} sudo ethtool -s {interface.name} autoneg on"
    if interface.kind == "wireless":
        verdicts += warn(f"{interface.name} is wireless", "plug in a cable")
    if interface.duplex == "half":
        verdicts += warn(f"{interface.name} runs half duplex", cable)
    if speed is not None and speed < max(fastest, SPEED_WARN_MBIT_PER_S):
        others = f", others {fastest}" if fastest > speed else ""
        verdicts += warn(f"{interface.name} runs at {speed} Mbit/s{others}", cable)
    sizes = Counter(nic.mtu_bytes for nic in all_nics if nic and nic.mtu_bytes)
    usual = sizes.most_common(1)[0][0] if sizes else None
    if interface.mtu_bytes and usual and interface.mtu_bytes != usual:
        verdicts += warn(
            f"{interface.name} has an MTU of {interface.mtu_bytes} B, most others {usual} B: "
            "large packets may vanish",
            f"ssh {report.name} sudo ip link set {interface.name} mtu {usual}",
        )
    return verdicts
