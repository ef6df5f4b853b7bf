"""Virtual clusters of the tests' own, each under a name that nothing else has."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from launching import ROOT, completed

_numbers = itertools.count()


class VirtualCluster:
    """A cluster driven by its command line, as users drive it."""

    def __init__(self, name, hosts_dir):
        self.name = name
        self.hosts_dir = hosts_dir
        self.hostfile = hosts_dir / f"virtual-{name}.txt"
        self.state = Path("/run/harness-virtual") / name

    def argv(self, command, *words):
        script = str(ROOT / "setup/virtual_cluster.sh")
        return ["bash", script, command, "--name", self.name, *words]

    def __call__(self, command, *words, cwd=ROOT, timeout_s=60):
        """Run a command to its end."""
        return completed(*self.argv(command, *words), cwd=cwd, timeout_s=timeout_s)

    def up_words(self, *flags):
        return ["--hosts-dir", str(self.hosts_dir), *flags]

    def up(self, *flags):
        done = self("up", *self.up_words(*flags))
        assert done.returncode == 0, done.stderr

    def on(self, node, *argv, timeout_s=60):
        return self("exec", str(node), "--", *argv, timeout_s=timeout_s)

    def traces(self):
        """What of the cluster is in the system: files, cgroups, mounts, processes."""
        places = [self.state, self.hostfile, self.hostfile.with_suffix(".json")]
        found = [str(path) for path in places if path.exists()]
        found += map(str, Path("/sys/fs/cgroup").rglob(f"harness-virtual.{self.name}.*"))
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [line for line in mounts if f"{self.state}/" in line]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
            except OSError:
                continue
            if f"{self.state}/".encode() in command:
                found.append(f"{path}: {command!r}")
        return found


@pytest.fixture(scope="module")
def new_cluster(tmp_path_factory):
    """Makes clusters that are not up yet; all are taken down in the end."""
    made: list[VirtualCluster] = []

    def make():
        name = f"t{os.getpid()}x{next(_numbers)}"
        made.append(VirtualCluster(name, tmp_path_factory.mktemp("hosts")))
        return made[-1]

    yield make
    for cluster in made:
        cluster("down")
