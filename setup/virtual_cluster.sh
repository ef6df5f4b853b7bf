#!/usr/bin/env bash
# A cluster of real nodes on this machine: `bash setup/virtual_cluster.sh --help`.
# Needs no installation: the standard library of Python 3.11 is enough.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"
python=$(find_any_python) || exit 2

# The module is found by this path alone: neither the caller's directory nor PYTHONPATH may
# decide, and nothing of it may reach the commands which run on the nodes.
exec "$python" -P -c '
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("harness.virtual", run_name="__main__", alter_sys=True)
' "$root" "$@"
