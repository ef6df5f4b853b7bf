"""change_shell and sync_env against real logins on a virtual cluster."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, on_virtual_cluster

NAME = f"s{os.getpid()}"
NODES = [f"{NAME}-node{i}" for i in range(3)]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def _cluster(command, *words, cwd=ROOT):
    return on_virtual_cluster(NAME, command, *words, cwd=cwd, timeout_s=120)


@pytest.fixture(scope="module")
def hostfile(tmp_path_factory):
    """Three nodes, the last one powered off."""
    hosts_dir = tmp_path_factory.mktemp("hosts")
    done = _cluster("up", "--nodes", "3", "--hosts-dir", str(hosts_dir))
    try:
        assert done.returncode == 0, done.stderr
        _cluster("fault", "2", "--kind", "off")
        yield str(hosts_dir / f"virtual-{NAME}.txt")
    finally:
        _cluster("down")


def _rows(done):
    """Each host's line of the table, without its name."""
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(NAME)]
    return dict(rows)


def _shell(node):
    done = _cluster("exec", str(node), "--", "sh", "-c", 'getent passwd "$(id -un)"')
    return done.stdout.strip().rpartition(":")[2]


def test_shells_are_shown_then_changed_then_verified(hostfile):
    before = Path("/etc/passwd").read_bytes()
    wanted = "/bin/sh" if _shell(0) != "/bin/sh" else "/bin/bash"
    script = ["bash", "setup/change_shell.sh", hostfile, "--shell", wanted]

    shown = _cluster("run", "--", *script)
    assert shown.returncode == 1
    told = [f"--apply changes it to {wanted}" in _rows(shown)[node] for node in NODES]
    assert told == [True, True, False]
    assert "UNREACHABLE" in _rows(shown)[NODES[2]]
    assert _shell(1) != wanted

    applied = _cluster("run", "--", *script, "--apply")
    assert [_rows(applied)[node].split() for node in NODES[:2]] == [[wanted, "OK"]] * 2
    assert applied.returncode == 1  # one host could not be reached
    assert _shell(1) == wanted
    assert Path("/etc/passwd").read_bytes() == before


def test_a_shell_that_a_host_lacks_is_never_set(hostfile):
    script = ["bash", "setup/change_shell.sh", hostfile, "--shell", "/bin/no-such-shell", "--apply"]
    done = _cluster("run", "--", *script)
    assert "has no /bin/no-such-shell; install it" in _rows(done)[NODES[0]]
    assert _shell(0) != "/bin/no-such-shell"


@pytest.fixture
def live_hostfile(hostfile, tmp_path_factory):
    """The two nodes that are up: waiting for the third is tested elsewhere."""
    path = tmp_path_factory.mktemp("hosts") / "live.txt"
    path.write_text("".join(f"{node}\n" for node in NODES[:2]))
    return str(path)


@pytest.fixture
def checkout(tmp_path):
    """A small checkout whose environment is a link to this one, installed by a script of a line."""
    (tmp_path / "setup").mkdir()
    for name in ("sync_env.sh", "lib.sh", "versions.py"):
        (tmp_path / "setup" / name).write_bytes((ROOT / "setup" / name).read_bytes())
    link = f'#!/bin/sh\nln -sfn "{ROOT}/.venv" "$(dirname "$0")/../.venv"\n'
    (tmp_path / "setup" / "install.sh").write_text(link)
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=unwanted)
    (tmp_path / "code.py").write_text("first = 1\n")
    if not (ROOT / ".venv").exists():
        pytest.skip("the environment under test is not .venv")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    return tmp_path


def _sync(checkout, hostfile, *flags):
    return _cluster("run", "--", "bash", "setup/sync_env.sh", hostfile, *flags, cwd=checkout)


def test_a_shared_disk_needs_nothing_sent(hostfile, checkout):
    done = _sync(checkout, hostfile)
    assert [_rows(done)[node].split() for node in NODES[:2]] == [["shared", "OK"]] * 2
    assert "UNREACHABLE" in _rows(done)[NODES[2]]
    assert f"run: bash setup/check_nodes.sh {hostfile}" in _rows(done)[NODES[2]]
    assert "--apply" not in done.stdout  # it could not reach the host either
    assert done.returncode == 1


def test_an_own_disk_gets_the_code_and_an_installation(live_hostfile, checkout):
    # Node 1 alone sees an empty directory where the others see the checkout.
    _cluster("exec", "1", "--", "mount", "-n", "-t", "tmpfs", "tmpfs", str(checkout), cwd=Path("/"))
    place = str(checkout / "code.py")

    shown = _sync(checkout, live_hostfile)
    assert "DIFFERS: code not sent from here; --apply brings it" in _rows(shown)[NODES[1]]
    assert _cluster("exec", "1", "--", "test", "-e", place).returncode == 1

    applied = _sync(checkout, live_hostfile, "--apply")
    assert _rows(applied)[NODES[1]].split() == ["own", "OK"], applied.stdout
    assert _cluster("exec", "1", "--", "cat", place).stdout == "first = 1\n"

    (checkout / "code.py").write_text("second = 2\n")
    assert "code of another state" in _rows(_sync(checkout, live_hostfile))[NODES[1]]
    _sync(checkout, live_hostfile, "--apply")
    assert _cluster("exec", "1", "--", "cat", place).stdout == "second = 2\n"
    assert sorted(path.name for path in checkout.glob(".sync*")) == []

    remount = ("mount", "-n", "-o", "remount,ro", str(checkout))
    assert _cluster("exec", "1", "--", *remount, cwd=Path("/")).returncode == 0
    row = _rows(_sync(checkout, live_hostfile, "--apply"))[NODES[1]]
    assert "NOT WRITABLE: " in row
    assert row.endswith(f"Read-only file system; make {checkout} writable there")


def test_a_copied_environment_replaces_the_one_there_and_is_checked_to_be_whole(
    live_hostfile, checkout
):
    environment = checkout / ".venv"
    environment.unlink()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (environment / ".installed").touch()
    _cluster("exec", "1", "--", "mount", "-n", "-t", "tmpfs", "tmpfs", str(checkout), cwd=Path("/"))
    _cluster("exec", "1", "--", "mkdir", "-p", str(environment / "lib/of_another_torch"))

    applied = _sync(checkout, live_hostfile, "--apply", "--copy-venv")
    assert _rows(applied)[NODES[1]].split() == ["own", "OK"], applied.stdout
    left = _cluster("exec", "1", "--", "ls", str(environment / "lib")).stdout
    assert "of_another_torch" not in left

    _cluster("exec", "1", "--", "rm", str(environment / ".installed"))  # as after an interruption
    row = _rows(_sync(checkout, live_hostfile))[NODES[1]]
    assert "DIFFERS: versions there are: unfinished, python 3." in row
    _cluster("exec", "1", "--", "rm", "-r", str(environment))  # the code is that of here
    row = _rows(_sync(checkout, live_hostfile))[NODES[1]]
    assert "DIFFERS: versions there are: missing; --apply brings it" in row


def test_programs_edited_or_left_over_on_a_host_are_found_and_replaced(
    live_hostfile, checkout, tmp_path_factory
):
    target = tmp_path_factory.mktemp("shared") / "copy"
    flags = ("--dir", str(target), "--apply")
    assert _sync(checkout, live_hostfile, *flags).returncode == 0
    results = target / "results" / "run.json"
    results.parent.mkdir()
    results.write_text("{}")
    (target / "harness" / "renamed_since.py").write_text("")
    (target / "harness" / "run.py").write_text("edited = True\n")

    shown = _sync(checkout, live_hostfile, *flags[:2])
    assert "code of another state" in _rows(shown)[NODES[0]]
    assert _sync(checkout, live_hostfile, *flags).returncode == 0
    assert not (target / "harness" / "renamed_since.py").exists()
    assert (target / "harness/run.py").read_bytes() == (checkout / "harness/run.py").read_bytes()
    assert results.exists()


def test_hosts_that_share_a_disk_are_brought_once_and_again_for_another_torch(
    live_hostfile, checkout, tmp_path_factory
):
    target = tmp_path_factory.mktemp("shared") / "copy"
    install = checkout / "setup" / "install.sh"
    install.write_text(install.read_text() + 'echo "$*" >>"$(dirname "$0")/../installed"\n')
    flags = ("--dir", str(target), "--apply")
    for more in ([], [], ["--torch", "2.9.1", "--python", "python3.12"]):
        done = _sync(checkout, live_hostfile, *flags, *more)
        assert [_rows(done)[node].split() for node in NODES[:2]] == [["own", "OK"]] * 2, done.stdout
    assert (target / "installed").read_text().splitlines() == [
        "--no-system",
        "--no-system --torch 2.9.1 --python python3.12",
    ]
