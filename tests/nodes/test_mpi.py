import asyncio
import sys
from collections.abc import Callable

import pytest
from launching import write_program

from harness.nodes.facts import Facts, InterfaceFacts, PeerRoute
from harness.nodes.mpi import common_networks, explain_mpirun, find_mpirun, mpi_command, run_hello
from harness.nodes.ssh import remote_text


def facts(address, *, prefix=24):
    return Facts(
        interfaces=(
            InterfaceFacts(name="eth0", networks=(f"{address}/{prefix}", "fe80::1/64")),
            InterfaceFacts(name="docker0", networks=("172.17.0.1/16",)),
        ),
        routes=(PeerRoute(address="10.0.0.99", interface="eth0", source=address),),
    )


def test_the_network_that_all_hosts_share_is_the_one_mpi_uses():
    assert common_networks({"a": facts("10.0.0.1"), "b": facts("10.0.0.2")}) == ["10.0.0.0/24"]


def test_hosts_on_unlike_networks_leave_the_choice_to_mpi():
    assert common_networks({"a": facts("10.0.0.1"), "b": facts("10.0.1.2")}) == []
    assert common_networks({"a": facts("10.0.0.1"), "b": Facts()}) == []


def test_the_command_names_hosts_once_and_never_asks():
    command = mpi_command(
        "/e/bin/mpirun", ["a", "b"], python="/e/bin/python", network="10.0.0.0/24", timeout_s=9
    )
    assert command[:7] == ["/e/bin/mpirun", "--timeout", "9", "-np", "2", "--host", "a:1,b:1"]
    assert "BatchMode=yes" in command[command.index("plm_rsh_args") + 1]
    assert command[command.index("btl_tcp_if_include") + 1] == "10.0.0.0/24"
    unnamed = mpi_command("m", ["a", "b"], python="p", timeout_s=9)
    assert "btl_tcp_if_include" not in unnamed
    assert "oob_tcp_if_include" not in unnamed


def mpirun_that(tmp_path, condition):
    """A stand-in that gathers the names a and b where a condition on its words `$*` holds."""
    answer = '@harness:hello {"names": ["a", "b"]}'
    script = f"case $* in {condition}) echo '{answer}' ;; *) echo no >&2; exit 1 ;; esac"
    return str(write_program(tmp_path / "mpirun", f"#!/bin/sh\n{script}\n"))


def hello_over_two(mpirun):
    both = {"a": facts("10.0.0.1"), "b": facts("10.0.0.2")}
    return asyncio.run(run_hello(mpirun, both, python="p", timeout_s=9))


def test_a_job_is_started_as_a_run_is_before_a_network_is_named(tmp_path):
    hello = hello_over_two(mpirun_that(tmp_path, "*"))
    assert (hello.names, hello.network) == (("a", "b"), "")


def test_a_job_that_needs_the_networks_name_says_so(tmp_path):
    hello = hello_over_two(mpirun_that(tmp_path, "*oob_tcp_if_include\\ 10.0.0.0/24*"))
    assert (hello.names, hello.network, hello.error) == (("a", "b"), "10.0.0.0/24", "")


def test_a_job_that_no_network_helps_names_its_culprits(tmp_path):
    hello = hello_over_two(mpirun_that(tmp_path, "*--host\\ b:1*"))
    assert (hello.names, hello.network, hello.culprits) == ((), "", {"a": "no"})


def test_a_job_that_mpirun_ends_at_the_time_limit_says_so(tmp_path):
    said = "The user-provided time limit for job execution has been reached:"
    program = write_program(tmp_path / "mpirun", f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    hello = hello_over_two(str(program))
    assert (hello.error, hello.culprits["a"]) == ("no end within 9 s", "no end within 4 s")


def test_the_hello_leaves_the_same_bridges_out_as_entry_sh(tmp_path):
    for path in ("br-1/bridge", "br-1/lower_veth0", "br0/bridge", "br0/lower_eth0/device"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("br1/bridge", "br1/lower_bond0/lower_eth0/device", "eth0/device"):
        (tmp_path / path).mkdir(parents=True)
    program, _, _ = remote_text("remote/hello.py").partition('if "OMPI')
    names: dict[str, Callable[[str], list[str]]] = {}
    exec(program, names)
    assert names["inner_bridges"](str(tmp_path)) == ["br-1"]


def test_mpiruns_telling_sentence_is_found():
    text = """--------------------------------------------------------------------------
ssh: connect to host n1 port 22: No route to host
--------------------------------------------------------------------------
ORTE was unable to reliably start one or more daemons.
"""
    assert explain_mpirun(text) == "ssh: connect to host n1 port 22: No route to host"
    assert explain_mpirun("Sorry!  You were supposed to get help about:\nno slots\n") == "no slots"
    assert explain_mpirun("") == ""
    ended = "error: n1: the MPI daemon ended with exit code 1"
    stderr = f"{ended}; run: bash setup/check_nodes.sh HOSTFILE\n"
    assert explain_mpirun(stderr, "Welcome\n") == ended
    cut = "A process or daemon was unable to complete a TCP connection"
    assert explain_mpirun(stderr, f"Welcome\n{cut}\nto another process:\n") == cut
    raced = "[a:1] plm:rsh: Warning: setpgid(2,2) failed in parent with errno=Permission denied(13)"
    assert explain_mpirun(f"{raced}\nno slots\n") == "no slots"


@pytest.mark.mpi
@pytest.mark.parametrize(("python", "starts"), [(sys.executable, True), ("/no/such/python", False)])
def test_the_real_mpirun_says_hello_here_or_why_not(python, starts):
    mpirun = find_mpirun(sys.prefix)
    if mpirun is None:
        pytest.skip("no mpirun")
    hello = asyncio.run(run_hello(mpirun, {"localhost": Facts()}, python=python, timeout_s=60))
    assert (len(hello.names), hello.error == "") == (int(starts), starts)
