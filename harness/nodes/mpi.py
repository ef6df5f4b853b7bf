"""An MPI hello: the real mpirun starts one rank on each host, and each says where it is."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import ConfigError
from harness.inputs import parse_json
from harness.nodes import processes, ssh
from harness.nodes.facts import Facts
from harness.nodes.remote_text import remote_text

_HELLO = "@harness:hello "
_N_ALONE_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The outcome.

    Attributes:
        hosts: that took part, in rank order.
        names: what the ranks call their machines; empty when the job failed.
        error: the launcher's own words; empty when it ended well.
        culprits: hosts on which a rank does not even start alone, and why (looked for after a
            failure only).
        network: without which, named on the command line, mpirun fails; empty: it needs none.
    """

    hosts: tuple[str, ...]
    names: tuple[str, ...] = ()
    error: str = ""
    culprits: dict[str, str] = field(default_factory=dict)
    network: str = ""
    duration_s: float = 0.0


def find_mpirun(env_dir: str) -> str | None:
    """The environment's mpirun, else that of PATH."""
    path = Path(env_dir) / "bin" / "mpirun"
    return str(path) if os.access(path, os.X_OK) else shutil.which("mpirun")


def common_network(facts: Mapping[str, Facts]) -> str | None:
    """The IPv4 network in which all hosts' cluster interfaces stand; None when there is none."""
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
    network = networks.pop() if len(networks) == 1 else ""
    return network or None


def network_flags(network: str) -> list[str]:
    """What keeps mpirun and its ranks to a network."""
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
    """Start one rank on each host and wait for all, as a run does; on failure, over the hosts'
    common network, and each host alone.

    Args:
        shared: directory of connections that may be used; a host alone is logged into anew.
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
    network = common_network(facts)
    if network and not (named := await run_over(network)).error:
        return named
    return replace(hello, culprits=await _find_culprits(mpirun, hosts, python, timeout_s / 2))


async def _run(command: Sequence[str], hosts: tuple[str, ...], timeout_s: float) -> Hello:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    # mpirun ends by itself at its own limit and cleans up better than a signal from here.
    done = await processes.run(command, timeout_s=timeout_s + 5, env=_root_consent(), grace_s=2.0)
    duration_s = loop.time() - start_s
    names = parse_hello(done.stdout)
    if done.returncode == 0 and names:
        return Hello(hosts=hosts, names=names, duration_s=duration_s)
    error = explain_mpirun(done.stderr) or f"mpirun ended with status {done.returncode}"
    return Hello(hosts=hosts, error=error, duration_s=duration_s)


async def _find_culprits(
    mpirun: str, hosts: Sequence[str], python: str, timeout_s: float
) -> dict[str, str]:
    gate = asyncio.Semaphore(_N_ALONE_AT_ONCE)

    async def run_alone(host: str) -> str:
        command = mpi_command(mpirun, [host], python=python, timeout_s=timeout_s)
        async with gate:
            return (await _run(command, (host,), timeout_s)).error

    errors = await asyncio.gather(*(run_alone(host) for host in hosts))
    return {host: error for host, error in zip(hosts, errors, strict=True) if error}


def _root_consent() -> dict[str, str]:
    """Variables without which Open MPI refuses root; a user who logs in as root has decided."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return {}
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def parse_hello(text: str) -> tuple[str, ...]:
    """The names that rank 0 gathered; none when it did not print them.

    Where mpirun and the library do not fit, each rank is 0 of 1 and prints its own name alone:
    the first of those is returned, and too short.
    """
    for line in text.splitlines():
        if line.startswith(_HELLO):
            with contextlib.suppress(ConfigError):  # ranks may print into one another's lines
                answer = parse_json(line.removeprefix(_HELLO), "hello")
                names = answer.get("names") if isinstance(answer, dict) else None
                if isinstance(names, list):
                    return tuple(map(str, names))
    return ()


_NOISE = re.compile(r"^-+$|^\s*$|^Sorry!|supposed to get help|help file|^\[.*\] \d+ more process")


def explain_mpirun(stderr: str) -> str:
    """The sentence of mpirun's message that says most."""
    lines = [line.strip() for line in stderr.splitlines() if not _NOISE.search(line)]
    telling = [
        line
        for line in lines
        if re.search(r"^ssh: |denied|verification|rror:|not found|unable|timed out|refused", line)
    ]
    return (telling or lines or [""])[0]
