#!/usr/bin/env bash
# Start a training again when a host is lost: `bash setup/keep_training.sh --help`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"
run_module harness.nodes.keep_training "$@"
