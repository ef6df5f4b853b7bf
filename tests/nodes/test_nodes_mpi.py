from __future__ import annotations

import asyncio
import sys

import pytest

from harness.nodes.facts import Facts, Interface, Route
from harness.nodes.mpi import (
    common_network,
    explain_mpirun,
    find_mpirun,
    mpi_command,
    parse_hello,
    run_hello,
)


def facts(address: str, *, prefix: int = 24) -> Facts:
    return Facts(
        interfaces=(
            Interface(name="eth0", networks=(f"{address}/{prefix}", "fe80::1/64")),
            Interface(name="docker0", networks=("172.17.0.1/16",)),
        ),
        routes=(Route(address="10.0.0.99", interface="eth0", source=address),),
    )


def test_the_network_that_all_hosts_share_is_the_one_mpi_uses() -> None:
    assert common_network({"a": facts("10.0.0.1"), "b": facts("10.0.0.2")}) == "10.0.0.0/24"


def test_hosts_on_unlike_networks_leave_the_choice_to_mpi() -> None:
    assert common_network({"a": facts("10.0.0.1"), "b": facts("10.0.1.2")}) is None
    assert common_network({"a": facts("10.0.0.1"), "b": Facts()}) is None


def test_the_command_names_hosts_once_and_never_asks() -> None:
    command = mpi_command(
        "/e/bin/mpirun", ["a", "b"], python="/e/bin/python", network="10.0.0.0/24", timeout_s=9
    )
    assert command[:7] == ["/e/bin/mpirun", "--timeout", "9", "-np", "2", "--host", "a:1,b:1"]
    assert "BatchMode=yes" in command[command.index("plm_rsh_args") + 1]
    assert command[command.index("btl_tcp_if_include") + 1] == "10.0.0.0/24"
    alone = mpi_command("m", ["a"], python="p", network=None, timeout_s=9)
    assert "btl_tcp_if_include" not in alone


def test_rank_zeros_line_is_found_among_others() -> None:
    text = 'banner\n@harness:hello {"size": 2, "names": ["a", "b"]}\n'
    assert parse_hello(text) == ("a", "b")
    assert parse_hello("banner\n") == ()


def test_mpiruns_telling_sentence_is_found() -> None:
    text = """--------------------------------------------------------------------------
ssh: connect to host n1 port 22: No route to host
--------------------------------------------------------------------------
ORTE was unable to reliably start one or more daemons.
"""
    assert explain_mpirun(text) == "ssh: connect to host n1 port 22: No route to host"
    assert explain_mpirun("Sorry!  You were supposed to get help about:\nno slots\n") == "no slots"
    assert explain_mpirun("") == ""


@pytest.mark.mpi
def test_the_real_mpirun_says_hello_here() -> None:
    mpirun = find_mpirun(sys.prefix)
    if mpirun is None:
        pytest.skip("no mpirun")
    hello = asyncio.run(
        run_hello(mpirun, {"localhost": Facts()}, python=sys.executable, timeout_s=60)
    )
    assert hello.error == ""
    assert len(hello.names) == 1


@pytest.mark.mpi
def test_a_rank_that_cannot_start_is_told_in_mpiruns_words() -> None:
    mpirun = find_mpirun(sys.prefix)
    if mpirun is None:
        pytest.skip("no mpirun")
    hello = asyncio.run(
        run_hello(mpirun, {"localhost": Facts()}, python="/no/such/python", timeout_s=30)
    )
    assert hello.names == ()
    assert hello.error
