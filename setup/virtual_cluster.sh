#!/usr/bin/env bash
# Manage a virtual cluster on this machine: `bash setup/virtual_cluster.sh --help`.
# Needs no installation, only Python 3.11 or later.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"
run_module harness.virtual "$@"
