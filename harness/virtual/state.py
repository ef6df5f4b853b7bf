"""The state of a virtual cluster: a private directory, found by the cluster's name.

ROOT/lock                     held while any cluster is built or removed
ROOT/NAME/cluster.json        the plan and the hostfile's path; written first
ROOT/NAME/ns/{switch,NODE}    network namespaces, bound to files
ROOT/NAME/ssh/                the cluster's login key and known hosts
ROOT/NAME/NODE/               the node's files in /etc, its sshd's pid and log
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.errors import ConfigError, EnvironmentSetupError
from harness.inputs import parse_json, read_file, shorten
from harness.virtual.plan import ClusterPlan
from harness.virtual.system import run

SWITCH = "switch"


def state_root() -> Path:
    """/run/harness-virtual, or below XDG_RUNTIME_DIR for a user who is not root."""
    base = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR", "/run")
    return Path(base) / "harness-virtual"


@dataclass(frozen=True)
class State:
    """The paths of one cluster's state."""

    root: Path
    name: str

    @property
    def directory(self) -> Path:
        return self.root / self.name

    @property
    def plan_file(self) -> Path:
        return self.directory / "cluster.json"

    @property
    def ssh(self) -> Path:
        return self.directory / "ssh"

    @property
    def login_key(self) -> Path:
        return self.ssh / "id_ed25519"

    def namespace(self, node: str) -> Path:
        return self.directory / "ns" / node

    def node(self, node: str) -> Path:
        return self.directory / node

    def pid_file(self, node: str) -> Path:
        return self.node(node) / "pid"

    def namespaces(self) -> list[Path]:
        directory = self.directory / "ns"
        return sorted(directory.iterdir()) if directory.is_dir() else []


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The content of cluster.json.

    Attributes:
        hostfile: path of the Open MPI hostfile; the JSON file is beside it.
        project: root of the checkout, whose .venv/bin is in the nodes' PATH.
    """

    plan: ClusterPlan
    hostfile: Path
    project: Path


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def save(state: State, saved: Saved) -> None:
    """Write cluster.json."""
    replace_file(state.plan_file, json.dumps(asdict(saved), indent=1, default=str) + "\n")


def load(state: State) -> Saved:
    """Read cluster.json.

    Raises:
        ConfigError: no such cluster.
        EnvironmentSetupError: the file is damaged, or this user may not read it.
    """
    try:
        is_up = state.plan_file.exists()
        others = [] if is_up else [other.name for other in existing(state.root)]
    except PermissionError:
        raise EnvironmentSetupError(f"no right to read {state.root}: run as root") from None
    if not is_up:
        up = f"give --name of one that is ({', '.join(others)}), or " if others else ""
        raise ConfigError(
            f"no virtual cluster named {state.name} is up: {up}"
            "make one with `bash setup/virtual_cluster.sh up --nodes 5`"
        )
    try:
        data = parse_json(read_file(state.plan_file, "plan"), "the plan")
        if not isinstance(data, dict):
            raise ConfigError("it is no object")
        for name in ("hostfile", "project"):
            if type(data.get(name)) is not str:
                raise ConfigError(f"its {name} is {shorten(data.get(name))}")
        return Saved(
            plan=ClusterPlan.from_dict(data.get("plan")),
            hostfile=Path(data["hostfile"]),
            project=Path(data["project"]),
        )
    except ConfigError as error:
        raise EnvironmentSetupError(
            f"{state.plan_file} is damaged ({error}): run `bash setup/virtual_cluster.sh down "
            f"--name {state.name}`"
        ) from None


def existing(root: Path) -> list[State]:
    """All clusters that have a state directory, complete or not."""
    if not root.is_dir():
        return []
    return [State(root, path.name) for path in sorted(root.iterdir()) if path.is_dir()]


def taken_subnets(root: Path) -> set[int]:
    """Subnet indices of the existing clusters, except damaged ones, which have no network."""
    taken = set()
    for state in existing(root):
        try:
            taken.add(load(state).plan.subnet_index)
        except (ConfigError, EnvironmentSetupError):
            continue
    return taken


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock for building and removing clusters; removes the root if no cluster is left."""
    descriptor = _acquire(root)
    try:
        yield
    finally:
        if not existing(root):
            shutil.rmtree(root, ignore_errors=True)
        os.close(descriptor)


def _acquire(root: Path) -> int:
    while True:
        path = root / "lock"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.chmod(0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # another process has just removed the root with its last cluster
        except PermissionError:
            raise EnvironmentSetupError(f"no right to write {root}: run as root") from None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)  # another process removed the root while this one waited


def remove(state: State) -> None:
    """Unbind the namespaces and delete the state directory; the processes must have ended."""
    for path in state.namespaces():
        while path.is_mount() or _is_bound(path):
            run(["umount", "--no-mtab", "--lazy", str(path)])
    if state.directory.exists():
        shutil.rmtree(state.directory)


def _is_bound(path: Path) -> bool:
    # is_mount works for directories only; a bound file appears only in the mount table.
    fields = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return str(path) in fields
