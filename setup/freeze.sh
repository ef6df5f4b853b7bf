#!/usr/bin/env bash
# Write setup/constraints.txt from the packages in .venv. Run this script after a dependency has
# changed and the tests pass with the new versions. Usage: bash setup/freeze.sh
set -euo pipefail

if (($#)); then
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"
    [[ $1 == -h || $1 == --help ]] && exit 0
    exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/setup/constraints.txt

{
    echo "# Every version that the tests passed with; made by setup/freeze.sh, used by setup/install.sh."
    echo "# torch is pinned without its build tag: each machine takes its own CPU or CUDA build."
    "$root/.venv/bin/python" -m pip freeze --exclude-editable |
        grep -E '^[A-Za-z0-9_.-]+==' |
        grep -vE '^(pip|uv|setuptools|wheel|nvidia-[a-z]+-cu[0-9]+|nvidia-cu|cuda-|triton)' |
        sed -E 's/\+[a-z0-9.]+$//'
} >"$target.tmp"
mv "$target.tmp" "$target"
echo "wrote $target: $(grep -c == "$target") versions"
