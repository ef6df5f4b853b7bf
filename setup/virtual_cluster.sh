#!/usr/bin/env bash
# Manage a virtual cluster on this machine: `bash setup/virtual_cluster.sh --help`.
# Needs no installation, only Python 3.11 or later.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"
python=$(find_any_python) || exit 2

# Import the module by this path only, regardless of the current directory and PYTHONPATH, and leave
# the environment of commands on the nodes unchanged.
exec "$python" -P -c '
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("harness.virtual", run_name="__main__", alter_sys=True)
' "$root" "$@"
