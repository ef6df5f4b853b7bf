#!/usr/bin/env bash
# Start a training again when a host is lost: `bash setup/keep_training.sh --help`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"
python=$(find_any_python) || exit 2
# -P: do not import from the current directory, which may have another package named harness.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m harness.nodes.keep_training "$@"
