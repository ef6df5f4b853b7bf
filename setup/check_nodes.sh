#!/usr/bin/env bash
# Check that hosts are ready to train together: `bash setup/check_nodes.sh --help`.
# Needs no installation, only Python 3.11 or later.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"
run_module harness.nodes "$@"
