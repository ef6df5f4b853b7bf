#!/usr/bin/env bash
# Are these hosts ready to train together? `bash setup/check_nodes.sh --help` says more.
# Runs before anything is installed: any Python from 3.11 on will do.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=$(command -v python3 || true)
if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "check_nodes: needs Python 3.11 or later on this machine: run bash setup/install.sh" >&2
    exit 2
fi
# -P: not the current directory, which may hold another package of our name.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m harness.nodes "$@"
