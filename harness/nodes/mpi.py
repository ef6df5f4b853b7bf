"""An MPI hello: the real mpirun starts one rank on each host, and each rank reports its host."""

import asyncio
import contextlib
import ipaddress
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import ConfigError
from harness.inputs import parse_json
from harness.nodes import processes, ssh
from harness.nodes.facts import Facts
from harness.nodes.ssh import remote_text

_HELLO = "@harness:hello "
_TIME_OVER = "time limit for job execution has been reached"
_N_SINGLE_AT_ONCE = 8
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The outcome.

    Attributes:
        hosts: participants, in rank order.
        names: host names by the ranks; empty if the job failed.
        error: the launcher's message; empty on success.
        culprits: hosts on which even a job of one rank fails, with the reason (sought only after
            a failure).
        network: network that mpirun must be given to succeed; empty: none needed.
    """

    hosts: tuple[str, ...]
    names: tuple[str, ...] = ()
    error: str = ""
    culprits: dict[str, str] = field(default_factory=dict)
    network: str = ""
    duration_s: float = 0.0


def find_mpirun(env_dir: str) -> str | None:
    """The environment's mpirun, else the one in PATH."""
    path = Path(env_dir) / "bin" / "mpirun"
    return str(path) if os.access(path, os.X_OK) else shutil.which("mpirun")


def common_networks(facts: Mapping[str, Facts]) -> list[str]:
    """The IPv4 networks that all hosts share: that of the interfaces which runs take, and that of
    the hosts' names."""
    by_name = {
        host: replace(found, run_interface="", run_address="") for host, found in facts.items()
    }
    return [*dict.fromkeys(filter(None, map(_common_network, (facts, by_name))))]


def _common_network(facts: Mapping[str, Facts]) -> str:
    """The IPv4 network of all hosts' cluster interfaces; empty if they differ."""
    networks: set[str] = set()
    for host in facts.values():
        interface = host.cluster_interface
        found = [
            str(ipaddress.ip_interface(text).network)
            for text in (interface.networks if interface else ())
            if ipaddress.ip_interface(text).version == 4
            and text.split("/")[0] == host.cluster_address
        ]
        networks.update(found or [""])
    return networks.pop() if len(networks) == 1 else ""


def network_flags(network: str) -> list[str]:
    """Options that restrict mpirun and its ranks to a network."""
    parameters = ("btl_tcp_if_include", "oob_tcp_if_include")
    return [word for name in parameters for word in ("--mca", name, network)]


def mpi_command(
    mpirun: str,
    hosts: Sequence[str],
    *,
    python: str,
    timeout_s: float,
    network: str = "",
    shared: str = "",
) -> list[str]:
    """The argument list of a hello over `hosts`, one rank each."""
    limit_s = max(1, round(timeout_s))
    return [
        mpirun,
        *("--timeout", str(limit_s)),
        *("-np", str(len(hosts))),
        *("--host", ",".join(f"{host}:1" for host in hosts)),
        *("--mca", "plm_rsh_args", " ".join(ssh.options(timeout_s, shared=shared))),
        *(network_flags(network) if network else []),
        *("--wdir", "/"),
        *(python, "-c", remote_text("remote/hello.py"), str(limit_s)),
    ]


async def run_hello(
    mpirun: str, facts: Mapping[str, Facts], *, python: str, timeout_s: float, shared: str = ""
) -> Hello:
    """Start one rank on each host and wait for all, as a run does; after a failure, try again over
    networks that the hosts share, then with each host as a job of its own.

    Args:
        shared: directory of ssh connections to reuse; the jobs of one host do not use it.
    """
    hosts = tuple(facts)

    async def run_over(network: str) -> Hello:
        command = mpi_command(
            mpirun, hosts, python=python, timeout_s=timeout_s, network=network, shared=shared
        )
        return replace(await _run(command, hosts, timeout_s), network=network)

    hello = await run_over("")
    if not hello.error or len(hosts) == 1:
        return hello
    for network in common_networks(facts):
        if not (named := await run_over(network)).error:
            return named
    return replace(hello, culprits=await _find_culprits(mpirun, hosts, python, timeout_s / 2))


async def _run(command: Sequence[str], hosts: tuple[str, ...], timeout_s: float) -> Hello:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    env = _AS_ROOT if os.geteuid() == 0 else {}
    # mpirun's own time limit comes first, because mpirun then cleans up its ranks.
    done = await processes.run(command, timeout_s=timeout_s + 5, env=env, grace_s=2.0)
    duration_s = loop.time() - start_s
    names = parse_hello(done.stdout)
    if done.returncode == 0 and names:
        return Hello(hosts=hosts, names=names, duration_s=duration_s)
    error = (
        explain_mpirun(done.stderr, done.stdout) or f"mpirun ended with status {done.returncode}"
    )
    if _TIME_OVER in error:
        error = f"no end within {timeout_s:.0f} s"
    return Hello(hosts=hosts, error=error, duration_s=duration_s)


async def _find_culprits(
    mpirun: str, hosts: Sequence[str], python: str, timeout_s: float
) -> dict[str, str]:
    gate = asyncio.Semaphore(_N_SINGLE_AT_ONCE)

    async def run_single(host: str) -> str:
        command = mpi_command(mpirun, [host], python=python, timeout_s=timeout_s)
        async with gate:
            return (await _run(command, (host,), timeout_s)).error

    errors = await asyncio.gather(*(run_single(host) for host in hosts))
    return {host: error for host, error in zip(hosts, errors, strict=True) if error}


def parse_hello(text: str) -> tuple[str, ...]:
    """The names that rank 0 gathered; empty if it did not print them.

    If mpirun and mpi4py's library are of different MPIs, each rank is rank 0 of 1 and prints only
    its own name; the first such line is returned.
    """
    for line in text.splitlines():
        if line.startswith(_HELLO):
            with contextlib.suppress(ConfigError):  # ranks may print into one another's lines
                answer = parse_json(line.removeprefix(_HELLO), "hello")
                names = answer.get("names") if isinstance(answer, dict) else None
                if isinstance(names, list):
                    return tuple(map(str, names))
    return ()


_NOISE = re.compile(
    r"^-+$|^\s*$|^Sorry!|supposed to get help|help file|^\[.*\] \d+ more process|: setpgid\("
)


def explain_mpirun(stderr: str, stdout: str = "") -> str:
    """The most informative line of mpirun's message; remote daemons write theirs to stdout."""
    lines = [line.strip() for line in stderr.splitlines() if not _NOISE.search(line)]
    informative = [
        line.removesuffix("; run: bash setup/check_nodes.sh HOSTFILE")
        for line in [*map(str.strip, stdout.splitlines()), *lines]
        if re.search(r"^ssh: |denied|verification|rror:|not found|unable|timed out|refused", line)
    ]
    return (informative or lines or [""])[0]
