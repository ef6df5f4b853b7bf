"""Everything together over a stand-in for ssh that runs commands on this machine.

The stand-in is first in PATH and fails as the host's name says; the real ssh, sshd and mpirun
between real nodes are tested in test_cluster.py.
"""

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from launching import ROOT, completed, write_program
from waiting import wait_until

from harness.nodes import probe
from harness.nodes.__main__ import main
from harness.nodes.between import ALLREDUCE, Talk, connect_pairs, get_ready, run_allreduce
from harness.nodes.facts import Facts, InterfaceFacts, PeerRoute, PythonFacts
from harness.nodes.probe import Order
from harness.nodes.ssh import open_session

FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do
    [ "$1" = -G ] && asked=1
    shift
done
host=$2 remote=$3
if [ -n "$asked" ]; then
    port={port}
    [ "$host" = off ] && port={closed_port}
    printf 'hostname 127.0.0.1\\nport %s\\nuser ada\\n' "$port"
    exit 0
fi
case $host in
denied) echo "ada@denied: Permission denied (publickey)." >&2; exit 255 ;;
unknown) echo "No ED25519 host key is known for unknown" >&2; exit 255 ;;
hang) exec sleep 60 ;;
127.0.0.3) sleep 3.5 ;;
wedged) echo @harness:ready; exec sleep 60 ;;
nologin) echo "This account is currently not available."; exit 1 ;;
esac
exec sh -c "$remote"
"""


@pytest.fixture
def listener():
    """Takes connections and greets as an sshd."""
    server = socket.create_server(("127.0.0.1", 0))

    def greet():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    yield server
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5)


@pytest.fixture
def fake_ssh(tmp_path, listener, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed_port = other.getsockname()[1]
    text = FAKE_SSH.replace("{port}", str(listener.getsockname()[1]))
    text = text.replace("{closed_port}", str(closed_port))
    path = write_program(tmp_path / "bin" / "ssh", text)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def check(capsys, tmp_path, names, *flags):
    """Run the program; returns its exit code and the worst status by host and check."""
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
    code = main([str(hostfile), "--json", "--env", str(tmp_path / "no-env"), *flags])
    document = json.loads(capsys.readouterr().out)
    return code, {
        host["host"]: {finding["check"]: finding["status"] for finding in host["findings"]}
        for host in document["hosts"]
    }


def test_every_host_gets_its_own_verdict_within_one_timeout(fake_ssh, capsys, tmp_path):
    before = children()
    names = ["good", "denied", "unknown", "hang", "wedged", "off", "nologin"]
    start_s = time.monotonic()
    code, seen = check(capsys, tmp_path, names, "--timeout", "8s", "--only", "port,login,shell,cpu")
    assert time.monotonic() - start_s < 8 + 4
    assert code == 2
    assert seen["good"]["login"] == "OK"
    assert seen["off"]["port"] == "CRITICAL"
    for name in ("denied", "unknown", "hang", "wedged", "nologin"):
        assert (name, seen[name]["port"], seen[name]["login"]) == (name, "OK", "CRITICAL")
    assert seen["hang"]["cpu"] == "UNKNOWN"
    wait_until(lambda: children() == before, 5)


def test_a_host_that_is_off_is_given_up_long_before_the_timeout(
    fake_ssh, capsys, tmp_path, monkeypatch
):
    async def connect_to_nobody(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", connect_to_nobody)
    monkeypatch.setattr(probe, "_LONGEST_KNOCK_S", 0.2)
    start_s = time.monotonic()
    code, seen = check(capsys, tmp_path, ["good"], "--only", "port")
    assert (code, seen["good"]["port"]) == (2, "CRITICAL")
    assert time.monotonic() - start_s < 30  # of 60


def test_a_hung_host_does_not_hold_up_the_others_connections(fake_ssh, capsys, tmp_path):
    # Their addresses are known to the configuration of ssh here, and to nothing on the hosts.
    names = ["alias-a.invalid", "alias-b.invalid", "hang"]
    code, seen = check(capsys, tmp_path, names, "--timeout", "8s", "--only", "login,tcp")
    assert code == 2
    assert [seen[name]["tcp"] for name in names] == ["OK", "OK", "UNKNOWN"]


def children():
    """Processes below this one, by /proc."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(path.read_text().split())


T = TypeVar("T")


def in_sessions(names, use):
    """What `use` makes of a session with each host."""

    async def go():
        async with AsyncExitStack() as stack:
            return await use(
                [
                    await stack.enter_async_context(open_session(name, connect_timeout_s=10))
                    for name in names
                ]
            )

    return asyncio.run(go())


def connect(names, **addresses):
    def test_pairs(some):
        return connect_pairs(some, names, addresses, pythons=[sys.executable], timeout_s=10)

    return in_sessions(names, test_pairs)


def test_pairs_meet_by_name_and_know_each_other(fake_ssh):
    names = ["localhost", "127.0.0.1"]
    pairs = connect(names)
    assert pairs.silent == {}
    assert set(pairs.connections) == {("localhost", "127.0.0.1"), ("127.0.0.1", "localhost")}
    for connection in pairs.connections.values():
        assert connection.error == ""
        assert 0 < connection.rtt_s < 1


def test_an_address_of_runs_that_does_not_answer_is_a_failed_pair(fake_ssh):
    pairs = connect(["localhost", "127.0.0.1"], localhost="255.255.255.255")
    assert pairs.connections["127.0.0.1", "localhost"].error == "interface"
    assert pairs.connections["localhost", "127.0.0.1"].error == ""


def test_a_name_that_does_not_resolve_there_is_a_failed_pair(fake_ssh):
    names = ["localhost", "no-such-name.invalid"]
    pairs = connect(names)
    assert pairs.connections["localhost", "no-such-name.invalid"].error == "resolve"
    assert pairs.connections["no-such-name.invalid", "localhost"].error == ""


def test_a_host_without_python_is_silent_and_the_rest_goes_on(fake_ssh):
    pairs = connect(["localhost", "denied"])
    assert set(pairs.silent) == {"denied"}
    assert "Permission denied" in pairs.silent["denied"]


def reduce_over(names, python, timeout_s):
    lo = InterfaceFacts(name="lo", networks=("127.0.0.1/8",))
    route = PeerRoute(address="127.0.0.1", interface="lo", source="127.0.0.1")
    facts = {name: Facts(interfaces=(lo,), routes=(route,)) for name in names}

    async def reduce(sessions):
        turn = asyncio.Semaphore(1)  # hosts of one machine
        starting = {
            session.host: get_ready(session, turn, python=python, limit_s=120)
            for session in sessions
        }
        return await run_allreduce(starting, facts, timeout_s=timeout_s)

    return in_sessions(names, reduce)


def test_a_slow_host_joins_those_that_were_quick(fake_ssh, capsys, tmp_path):
    names = ["localhost", "127.0.0.1", "127.0.0.3"]
    flags = ["--timeout", "12s", "--only", "login,tcp"]
    code, seen = check(capsys, tmp_path, names, *flags)
    assert [seen[name]["tcp"] for name in names] == ["OK"] * 3
    assert code == 0


def test_ranks_that_get_ready_sum_right_and_the_others_are_named(fake_ssh):
    reduction = reduce_over(["a", "b", "denied"], sys.executable, 60)
    assert (reduction.hosts, reduction.backend, reduction.errors) == (("a", "b"), "gloo", {})
    assert reduction.duration_s is not None
    assert "Permission denied" in reduction.left_out["denied"]


def test_a_python_without_torch_is_told_in_its_own_words(fake_ssh, tmp_path):
    bare = write_program(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    reduction = reduce_over(["a"], str(bare), 30)
    assert reduction.hosts == ()
    assert "No module named 'torch'" in reduction.left_out["a"]


def test_ctrl_c_says_nothing_of_the_ranks_that_it_ends(fake_ssh, caplog):
    """asyncio reports the error of a task that nobody reads."""
    python = PythonFacts(version="3.11", packages={"torch": "2.13"})
    order = Order(peers=("denied",), env_dir="/no-env", repo_dir="/no-repo", timeout_s=4.0)

    async def leave_early(sessions):
        talk = Talk(order, frozenset({ALLREDUCE}), 4.0, print)
        await talk.begin([(sessions[0], Facts(environment="/no-env", python=python))])
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=5)

    in_sessions(["denied"], leave_early)
    gc.collect()
    assert caplog.text == ""


def test_the_package_needs_only_the_standard_library():
    program = (
        "import sys, harness.nodes.__main__\n"
        "own = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(own - {'harness', '__main__'}))\n"
    )
    done = completed(sys.executable, "-S", "-c", program, PYTHONPATH=str(ROOT))
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/file"], "hostfile /no/such/file"),
        (["HOSTS", "--only", "gpus"], "there is no check 'gpus'"),
        (["HOSTS", "--timeout", "10 parsecs"], "unknown unit"),
        (["HOSTS", "--timeout", "0.1s"], "too short for an ssh login"),
        (["EVIL"], "is not a host name"),
        (["EMPTY"], "names no host"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_two(capsys, tmp_path, arguments, words):
    for name, text in {"HOSTS": "localhost\n", "EVIL": "-oProxyCommand=id\n", "EMPTY": ""}.items():
        (tmp_path / name).write_text(text)
    resolved = [str(tmp_path / a) if a in ("HOSTS", "EVIL", "EMPTY") else a for a in arguments]
    assert main(resolved) == 2
    error = capsys.readouterr().err
    assert error.startswith("check_nodes: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_missing_ssh_client_is_one_clear_error(capsys, tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("localhost\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(tmp_path / "hosts")]) == 2
    assert "no ssh client on this machine" in capsys.readouterr().err
