#!/usr/bin/env bash
# Run the whole comparison on this machine, from installation to report.
# Usage: bash setup/demo.sh [FLAGS of entry.sh]
# Runs on a virtual cluster of five nodes as root, otherwise on two local ranks. Installs if needed.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
n_nodes=5
n_local=2
# A distinct name, so that the user's own virtual cluster is left alone.
name=demo
cluster=(bash setup/virtual_cluster.sh)

say() { echo "demo: $*"; }

# shellcheck disable=SC2317,SC2329  # called by the trap
take_down() {
    trap - EXIT
    # Finish even if interrupted twice.
    trap '' INT TERM
    [[ -z $figure ]] || kill "$figure" 2>/dev/null || true
    "${cluster[@]}" down --name "$name" >/dev/null
}

# 90 % of the cores shared evenly, at most one each: beyond that, nodes compete and timings vary.
cores_per_node() {
    local hundredths=$((90 * $(nproc) / n_nodes))
    if ((hundredths >= 100)); then echo 1; else printf '0.%02d\n' "$hundredths"; fi
}

run_on_cluster() {
    say "mpirun -np $n_nodes --hostfile hosts/virtual-$name.txt ./entry.sh $*"
    "${cluster[@]}" run --name "$name" -- \
        mpirun -np "$n_nodes" --hostfile "hosts/virtual-$name.txt" ./entry.sh "$@"
}

# Draw the first workload as soon as it is done, on what the nodes leave of the cores.
draw_first_figure() {
    until [[ -n $(find results -path '*-matmul-*/run.json' -newer "$1" -exec grep -l '"status": "ok"' {} +) ]]; do
        sleep 2
    done
    nice -n 19 .venv/bin/python -m harness.plot results/ --only matmul >/dev/null 2>&1 || return 0
    say "first figure: plots/matmul.png"
}

run_locally() {
    local -a launch=(mpirun --oversubscribe -np "$n_local" ./entry.sh "$@")
    say "${launch[*]}"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    PATH=$root/.venv/bin:$PATH "${launch[@]}"
}

bash setup/install.sh
# Refuses wrong flags before there is a cluster.
(($# == 0)) || [[ " $* " == *" + "* ]] || ./entry.sh "$@" --dry-run >/dev/null
status=0
figure='' # process that draws it
trap take_down EXIT
trap 'exit 130' INT TERM
if "${cluster[@]}" up --name "$name" --replace --nodes "$n_nodes" --bandwidth 1gbit --cpu "$(cores_per_node)"; then
    if (($# == 0)); then
        draw_first_figure "hosts/virtual-$name.txt" &
        figure=$!
    fi
    run_on_cluster "$@" || status=$?
    say "its nodes are taken down: bash setup/virtual_cluster.sh up makes others, to train as advised"
else
    trap - EXIT # there is no cluster
    say "going on with $n_local ranks on this machine"
    run_locally "$@" || status=$?
fi

# A successful comparison has already printed its tables and drawn its report.
if ((status != 0)); then
    say "the comparison ended with exit code $status; its measurements until then:"
    .venv/bin/python -m harness.plot results/ || true
fi
exit "$status"
