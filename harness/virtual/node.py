"""One node: its files in /etc, its sshd, and commands that run on it.

Logins need the cluster's key, and host keys are distributed beforehand and verified, as an
administrator would set up real hosts under /etc/ssh.
"""

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from harness.errors import ConfigError, EnvironmentSetupError
from harness.virtual import limits, system
from harness.virtual.plan import ClusterPlan
from harness.virtual.state import Saved, State
from harness.virtual.system import in_network, run

READY_TIMEOUT_S = 15.0
SSH_PORT = 22
HOST_KEY = "ssh_host_ed25519_key"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp
_BOOT = Path(__file__).with_name("boot.sh")


def environment(project: Path, path: str = SYSTEM_PATH) -> dict[str, str]:
    """Variables of every process on a node; `path` is the caller's PATH for `exec`.

    Ranks are not bound to cores, because the nodes share all cores and Open MPI would bind the
    first rank of each node to core 0.
    """
    variables = {
        "PATH": f"{project / '.venv' / 'bin'}:{path}",
        "LANG": "C.UTF-8",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def hosts_text(plan: ClusterPlan) -> str:
    """/etc/hosts; no node's name maps to loopback, because gloo would bind to that address."""
    lines = [f"{node.address}\t{node.name}" for node in plan.nodes]
    return "\n".join(["127.0.0.1\tlocalhost", *lines]) + "\n"


def ssh_config_text(login_key: Path) -> str:
    return (
        "Host *\n"
        f'    IdentityFile "{login_key}"\n'
        "    IdentitiesOnly yes\n"
        "    StrictHostKeyChecking yes\n"
        "    GlobalKnownHostsFile /etc/ssh/ssh_known_hosts\n"
        "    PreferredAuthentications publickey\n"
        "    LogLevel ERROR\n"
    )


def sshd_config_text(authorized_keys: Path, variables: Mapping[str, str]) -> str:
    assignments = " ".join(f'{name}="{value}"' for name, value in variables.items())
    user = pwd.getpwuid(os.geteuid()).pw_name
    return (
        f"Port {SSH_PORT}\n"
        f"HostKey /etc/ssh/{HOST_KEY}\n"
        f'AuthorizedKeysFile "{authorized_keys}"\n'
        f"AllowUsers {user}\n"
        "AuthenticationMethods publickey\n"
        "PermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
        "UsePAM no\n"
        "StrictModes no\n"  # others may own a parent of the state directory
        "UseDNS no\n"
        "PidFile none\n"
        "PrintMotd no\n"
        "MaxStartups 1000\n"  # mpirun and check_nodes log in to all nodes at once
        "MaxSessions 1000\n"
        "Subsystem sftp internal-sftp\n"
        f"SetEnv {assignments}\n"
    )


def make_key(path: Path, comment: str) -> None:
    """Make an ed25519 key pair; replaces an existing one."""
    for old in (path, path.with_suffix(".pub")):
        old.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def known_hosts_text(plan: ClusterPlan, state: State) -> str:
    """A known_hosts file with all nodes' names and addresses; their keys must exist."""
    lines = []
    for node in plan.nodes:
        kind, key, *_ = host_key_file(state, node.name).with_suffix(".pub").read_text().split()
        lines.append(f"{node.name},{node.address} {kind} {key}\n")
    return "".join(lines)


def host_key_file(state: State, node: str) -> Path:
    return state.node(node) / "etc" / "ssh" / HOST_KEY


def write_files(state: State, saved: Saved) -> None:
    """Write keys and configuration of all nodes, before any node starts."""
    plan = saved.plan
    state.ssh.mkdir(mode=0o700)
    make_key(state.login_key, f"virtual cluster {plan.name}")
    authorized = state.ssh / "authorized_keys"
    shutil.copy(state.login_key.with_suffix(".pub"), authorized)
    for node in plan.nodes:
        for directory in ("etc/ssh", "dot_ssh", "cgroup"):
            (state.node(node.name) / directory).mkdir(parents=True, mode=0o755)
        (state.node(node.name) / "dot_ssh").chmod(0o700)
        make_key(host_key_file(state, node.name), node.name)
    known_hosts = known_hosts_text(plan, state)
    (state.ssh / "known_hosts").write_text(known_hosts)
    sshd_config = sshd_config_text(authorized, environment(saved.project))
    for node in plan.nodes:
        etc = state.node(node.name) / "etc"
        (etc / "hosts").write_text(hosts_text(plan))
        (etc / "hostname").write_text(f"{node.name}\n")
        (etc / "ssh" / "ssh_known_hosts").write_text(known_hosts)
        (etc / "ssh" / "ssh_config").write_text(ssh_config_text(state.login_key))
        (etc / "ssh" / "sshd_config").write_text(sshd_config)


def boot(state: State, name: str) -> None:
    """Start a node's sshd in its namespaces and cgroups; `wait_until_ready` waits for it."""
    home = pwd.getpwuid(os.geteuid()).pw_dir
    joined = limits.join_files(state.name, name)
    command = ["unshare", "--uts", "--mount", "--ipc", "--", "/bin/sh", str(_BOOT)]
    # preexec_fn is safe, because it only writes the pid and the parent has one thread.
    with (state.node(name) / "sshd.log").open("ab") as log:
        child = subprocess.Popen(
            [*in_network(state.namespace(name)), *command, name, str(state.node(name)), home],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            preexec_fn=partial(limits.join, joined),
        )
    state.pid_file(name).write_text(system.describe(child.pid))


def _listens_in(namespace: Path, pid: int) -> bool:
    """Whether the process has entered the namespace (port 22 is not the machine's) and listens."""
    try:
        entered = os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), namespace.stat())
        sockets = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False  # it has ended, which the caller sees by its pid
    states = ((local, status) for _, local, _, status, *_ in map(str.split, sockets))
    return entered and any(
        status == _LISTENING and int(local.rpartition(":")[2], 16) == SSH_PORT
        for local, status in states
    )


def wait_until_ready(state: State, name: str) -> None:
    """Block until the node accepts logins.

    Raises:
        EnvironmentSetupError: its sshd ended or did not start in time; has the log's last line.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        pid = system.read_alive(state.pid_file(name))
        if pid is None:
            break
        if _listens_in(state.namespace(name), pid):
            return
        time.sleep(0.01)
    log = (state.node(name) / "sshd.log").read_text().strip().splitlines()
    raise EnvironmentSetupError(
        f"sshd of {name} did not start: {log[-1] if log else 'it left no message'}"
    )


def command_on(state: State, name: str, argv: Sequence[str], directory: Path) -> list[str]:
    """The command line for this machine that runs `argv` on a node.

    Raises:
        ConfigError: the node is powered off.
    """
    pid = system.read_alive(state.pid_file(name))
    if pid is None:
        raise ConfigError(
            f"{name} is off: `bash setup/virtual_cluster.sh fault {name} --kind heal` starts it"
        )
    enter = ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--ipc", "--"]
    return [*enter, "env", f"--chdir={directory}", "--", *argv]
