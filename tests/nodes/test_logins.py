"""Whatever a login prints, asks or drops, over a stand-in for ssh that runs a real login shell."""

import asyncio
import os
import shutil
from contextlib import AsyncExitStack

import pytest
from launching import ROOT, completed, write_program

from harness.domain.hostfile import Host
from harness.nodes import ssh
from harness.nodes.facts import Status
from harness.nodes.judge.access import judge_login
from harness.nodes.parse import parse_facts
from harness.nodes.probe import N_THROUGH_PROXY, Order, probe, proxy_gates
from harness.nodes.ssh import Login
from harness.nodes.survey import HostReport, Survey

# Like sshd: the login shell reads its own file, then the command; a proxy spares the port.
FAKE_SSH = """#!/bin/bash
while [ "$1" != -- ]; do
    [ "$1" = -G ] && asked=1
    shift
done
host=$2 remote=$3
here={here}
if [ -n "$asked" ]; then
    printf 'hostname %s\\nport 2222\\nuser ada\\nproxyjump jump.lab\\n' "$host"
    exit 0
fi
echo "$host" >>"$here/logins"
if [ -e "$here/drops" ]; then
    n=$(cat "$here/drops")
    if [ "$n" -gt 0 ]; then
        echo $((n - 1)) >"$here/drops"
        echo "kex_exchange_identification: Connection closed by remote host" >&2
        echo "Connection closed by UNKNOWN port 65535" >&2
        exit 255
    fi
fi
exec {shell}
"""


def look(tmp_path, shell, monkeypatch, *, timeout_s=30):
    """Probe a host whose login shell is this; `$remote` is what it is told to run."""
    text = FAKE_SSH.replace("{here}", str(tmp_path)).replace("{shell}", shell)
    path = write_program(tmp_path / "bin" / "ssh", text)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    async def run():
        order = Order(peers=("n0",), env_dir="/no", repo_dir="/no", timeout_s=timeout_s)
        async with AsyncExitStack() as stack:
            found, _ = await probe(Host("n0"), order, stack, proxy_gates())
        return found

    return asyncio.run(run())


def finding_of(found):
    report = HostReport(probe=found, facts=parse_facts(found.text))
    order = Order(peers=("n0",), env_dir="/no", repo_dir="/no", timeout_s=30)
    (verdict,) = judge_login(report, Survey(order=order, reports=(report,)))
    return verdict


def bash_with(rc, tmp_path):
    (tmp_path / "rc").write_text(f"unset BASH_ENV\n{rc}\n")
    return f'env BASH_ENV={tmp_path}/rc bash -c "$remote"'


@pytest.mark.parametrize(
    "rc",
    [
        "echo Welcome; echo; echo '  * Documentation: https://help'",
        "printf 'no end of line'",
        "printf '\\033[1;31mred\\033[0m \\033]0;title\\007'",
        "printf '@harness:memory\\nMemTotal: 1 kB\\n'",
        "echo 'stty: standard input: Inappropriate ioctl for device' >&2",
        "stty erase ^H",
        "/opt/missing/setup.sh",
        "(sleep 0.2; echo late; echo 12345; sleep 0.3; echo '{}') &",
        "printf '\\r\\nhello\\r\\n'",
        "echo \xe9\xff",
    ],
    ids=lambda rc: rc[:24].encode("ascii", "replace").decode(),
)
def test_the_probe_finds_its_own_lines(rc, tmp_path, monkeypatch):
    found = look(tmp_path, bash_with(rc, tmp_path), monkeypatch)
    assert (found.login, found.is_complete) == (Login.OK, True)
    assert abs(found.clock.offset_s) < 5
    facts = parse_facts(found.text)
    assert facts.hostname == os.uname().nodename
    assert facts.memory_total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", ["tcsh", "fish", "zsh", "ksh", "dash"])
def test_other_login_shells_are_left_for_a_posix_one(name, tmp_path, monkeypatch):
    if shutil.which(name) is None:
        pytest.skip(f"needs {name} on this machine: apt-get install {name}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".tcshrc").write_text("stty erase ^H\necho banner\n")
    (tmp_path / ".config/fish").mkdir(parents=True)
    (tmp_path / ".config/fish/config.fish").write_text("echo banner\n")
    found = look(tmp_path, f'{name} -c "$remote"', monkeypatch)
    assert (found.login, found.is_complete, found.clock is None) == (Login.OK, True, False)


@pytest.mark.parametrize(
    ("rc", "login", "words"),
    [
        ("echo maintenance; exit 3", Login.LEFT, "ends before the command: maintenance"),
        ("exit 0", Login.LEFT, "ends before the command: status 0"),
        ("exec echo bye", Login.LEFT, "ends before the command: bye"),
        ("PATH=/none", Login.OK, "ended at its first line: bash: line 1: exec: sh: not found"),
        ("echo 'This account is currently not available.'; exit 1", Login.NO_SHELL, "no shell"),
        ("echo 'Choose: 1) gpu'; read choice", Login.WAITING, "prints 'Choose: 1) gpu', and"),
        ("read choice", Login.TIMED_OUT, "hangs: no login"),
    ],
)  # fmt: skip
def test_a_login_that_does_not_reach_the_command_says_why(rc, login, words, tmp_path, monkeypatch):
    waits = login in {Login.WAITING, Login.TIMED_OUT}
    found = look(tmp_path, bash_with(rc, tmp_path), monkeypatch, timeout_s=5 if waits else 30)
    assert found.login is login
    verdict = finding_of(found)
    assert verdict.status is Status.CRITICAL
    assert words in verdict.detail
    assert verdict.remedy


def test_a_login_that_was_dropped_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "drops").write_text("2")
    found = look(tmp_path, 'sh -c "$remote"', monkeypatch)
    assert (found.login, found.is_complete) == (Login.OK, True)
    assert (tmp_path / "logins").read_text().count("n0") == 3


def test_a_login_that_is_always_dropped_ends_within_its_time(tmp_path, monkeypatch):
    (tmp_path / "drops").write_text("1000")
    found = look(tmp_path, 'sh -c "$remote"', monkeypatch, timeout_s=8)
    assert found.login is Login.CLOSED
    assert found.duration_s < 12
    assert "MaxStartups" in finding_of(found).remedy


@pytest.mark.parametrize(("pause_s", "login"), [(3.5, Login.CLOSED), (0.1, Login.TIMED_OUT)])
def test_only_an_attempt_with_enough_time_hangs(pause_s, login, tmp_path, monkeypatch):
    (tmp_path / "drops").write_text("1")
    monkeypatch.setattr(f"{probe.__module__}._PAUSES_S", (pause_s,))
    monkeypatch.setattr(f"{probe.__module__}.random.uniform", lambda *_: 1.0)
    found = look(tmp_path, "sleep 20", monkeypatch, timeout_s=5)
    assert found.login is login


def test_only_so_many_log_in_through_one_jump_host_at_once(tmp_path, monkeypatch):
    """The stand-in's login takes a while, and notes how many there are."""
    shell = (
        f'sh -c "mkdir {tmp_path}/now.$$; ls -d {tmp_path}/now.* | wc -l >>{tmp_path}/counts; '
        f'sleep 0.3; rmdir {tmp_path}/now.$$; $remote"'
    )
    look(tmp_path, shell, monkeypatch)
    (tmp_path / "counts").unlink()

    async def run():
        order = Order(peers=("n0",), env_dir="/no", repo_dir="/no", timeout_s=120)
        gates = proxy_gates()
        async with AsyncExitStack() as stack:
            hosts = [Host(f"n{i}") for i in range(2 * N_THROUGH_PROXY)]
            found = await asyncio.gather(*(probe(host, order, stack, gates) for host in hosts))
        return [one for one, _ in found]

    found = asyncio.run(run())
    assert {one.login for one in found} == {Login.OK}
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 2 * N_THROUGH_PROXY
    assert max(counts) <= N_THROUGH_PROXY


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs an ssh client")
def test_odd_ports_and_jump_hosts_are_read_from_sshs_configuration(tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text(
        "Host odd\n  HostName 10.0.0.7\n  Port 2222\n  User bob\n"
        "Host far\n  HostName far.lab\n  ProxyJump ada@jump:2200\n"
        "Host tunnel\n  ProxyCommand nc %h %p\nHost direct\n  ProxyJump none\n"
        "Host *\n  RemoteCommand tmux\n  LocalForward 9999 localhost:22\n"
    )
    real = shutil.which("ssh")
    program = write_program(tmp_path / "bin" / "ssh", f'#!/bin/sh\nexec {real} -F {config} "$@"\n')
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    targets = {name: asyncio.run(ssh.target(name)) for name in ("odd", "far", "tunnel", "direct")}
    assert targets["odd"] == ssh.Target(
        hostname="10.0.0.7", port=2222, user="bob", is_proxied=False
    )
    assert targets["far"].proxy == "ada@jump:2200"
    assert targets["tunnel"].is_proxied
    assert not targets["direct"].is_proxied
    # Neither tmux nor the tunnel of a person's configuration is started.
    options = ssh.options(1)
    done = completed("ssh", *options, "-G", "--", "odd")
    assert "tmux" not in done.stdout
    assert "clearallforwardings yes" in done.stdout


@pytest.mark.parametrize("banner", ["", "echo Welcome", "printf partial"])
def test_scripts_take_their_answers_from_below_the_banner(banner, tmp_path, monkeypatch):
    (tmp_path / "rc").write_text(banner + "\n")
    write_program(
        tmp_path / "ssh",
        '#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done\n'
        f'exec env BASH_ENV={tmp_path}/rc bash -c "$3"\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = f"root={ROOT} work={tmp_path}; set -euo pipefail; source {ROOT}/setup/lib.sh; "
    for command, answer in (
        ("echo 'echo answer; exit 0' | ask 20 n0", "answer\n"),
        ("ask 20 n0 'echo reached'", "reached\n"),
        ("ask 20 n0 'exit 3' || echo $?", "3\n"),
    ):
        done = completed("bash", "-c", script + command)
        assert (done.stdout, done.stderr) == (answer, "")
