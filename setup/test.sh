#!/usr/bin/env bash
# Run the tests. Usage: bash setup/test.sh [PYTEST ARGUMENTS]
# Installs if needed. Runs all tests that this machine supports: virtual clusters as root, GPU tests
# with a GPU. Prints which tests are left out or skipped and why (slow tests: -m slow). Ends with
# pytest's summary. Without arguments, tests that may share the machine run in several processes.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { echo "test: $*"; }

bash setup/install.sh

markers='not slow'
if [[ ! -e /dev/nvidiactl ]] || ! nvidia-smi -L >/dev/null 2>&1; then
    markers+=' and not gpu'
    say "left out: tests marked gpu, this machine has no CUDA device"
fi
# Whether cluster tests can run: building the smallest cluster tests rights, tools and kernel.
if reason=$(bash setup/virtual_cluster.sh up --name testable --replace --nodes 1 2>&1 >/dev/null); then
    bash setup/virtual_cluster.sh down --name testable >/dev/null
else
    say "left out: tests marked cluster, ${reason#error: }"
    markers+=' and not cluster'
fi

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PATH=$root/.venv/bin:$PATH
if (($#)); then exec python -m pytest -m "$markers" "$@"; fi
status=0
if [[ $markers != *cluster* ]]; then
    # They bound times of processes and links, so nothing else runs beside them.
    mapfile -t files < <(grep -rl 'mark\.alone' tests)
    python -m pytest -m "$markers and alone" -rs --durations=10 "${files[@]}" || status=$?
fi
markers+=' and not alone'
# One more worker than cores, because many tests wait.
workers=$(($(nproc) < 8 ? $(nproc) + 1 : 8))
python -m pytest -m "$markers" -rs --durations=10 -n "$workers" --dist loadfile \
    --no-loadscope-reorder || status=$?
exit "$status"
