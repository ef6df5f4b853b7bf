#!/usr/bin/env bash
# Are these hosts ready to train together? `bash setup/check_nodes.sh --help` says more.
# Runs before anything is installed: any Python from 3.11 on will do.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"
python=$(find_any_python) || exit 2
# -P: not the current directory, which may hold another package of our name.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m harness.nodes "$@"
