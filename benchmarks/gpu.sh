#!/usr/bin/env bash
# Check and measure what needs a GPU, on a machine with one. Usage: bash benchmarks/gpu.sh OUT [PART...]
# Parts: facts tests smoke matmul batches single channels_last fits compiled bench comparison
# equivalence; all by default, in this order.
# Writes OUT/PART.log and OUT/results.tar.gz, and prints the end of each log with its seconds. Exits
# with 1 if a part fails.
# shellcheck disable=SC2329  # the loop calls the functions by name
set -uo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"
    exit $(($# ? 0 : 2))
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
out=$(realpath -m "$1")
shift
mkdir -p "$out"
parts=("$@")
((${#parts[@]})) || parts=(facts tests smoke matmul batches single channels_last fits compiled bench comparison equivalence)
export PATH=$root/.venv/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
results=$out/results
vision=(--model "${VISION:-resnet50}" --per-device-batch "${VISION_BATCH:-128}" --steps 20 --warm-up 5)
text=(--model "${TEXT:-gpt2}" --per-device-batch "${TEXT_BATCH:-8}" --steps 20 --warm-up 5)

facts() {
    git describe --always --dirty
    nvidia-smi
    python -c 'import torch, sys; print(sys.version, torch.__version__, torch.cuda.nccl.version())'
    nproc
}

tests() {
    OMP_NUM_THREADS=2 python -m pytest -q -m gpu -n 4 --tb=short tests/test_trainer.py tests/main \
        tests/runtime/executor
}

# A short training by each flag that has code of its own for GPUs, on one rank and on two that share it.
smoke() {
    local -a tiny=(--model lenet --batch-size 64 --dtype bf16 --results "$out/smoke") quick=(--shards 1 --time-budget-s 0.01)
    local -a steps=("${tiny[@]}" --steps 6 --warm-up 1) own
    local code=0
    own=("${steps[@]}" --engine executor --strategy single)
    ./entry.sh profile "${tiny[@]}" "${quick[@]}" + profile "${tiny[@]}" --compile "${quick[@]}" \
        + profile "${tiny[@]/bf16/fp16}" "${quick[@]}" \
        + train "${own[@]/bf16/fp16}" + train "${own[@]}" --compile + train "${own[@]}" --channels-last --n-workers 2 \
        + train "${own[@]}" --recompute --ema 0.9 --weight-decay 0.1 --no-decay 1d --max-grad-norm 1 \
        + train "${tiny[@]}" --engine executor --strategy single --data digits --epochs 1 --evaluate --save-every 9 --save-model \
        + train "${own[@]}" --data digits --freeze schedule --freeze-interval 2 \
        + train "${steps[@]}" --strategy zero2 zero3 --reduce-dtype bf16 || code=1
    own=("${steps[@]}" --engine executor)
    mpirun --oversubscribe -np 2 ./entry.sh links --time-budget-s 0.01 --results "$out/smoke" \
        + train "${own[@]}" --strategy ddp pipeline tp=2 --recompute --reduce-dtype bf16 + train "${own[@]}" --strategy ddp --drift \
        + train "${own[@]}" --strategy ddp --shard-state parameters --reduce-dtype bf16 --survive --save-every 2 \
        + train "${own[@]}" --strategy pipeline --schedule zero_bubble || code=1
    return "$code"
}

matmul() { ./entry.sh matmul --sizes 1024 4096 8192 16384 --dtype fp32 tf32 bf16 fp16 --results "$results"; }

batches() { python benchmarks/batches.py --json; }

# One device: plain PyTorch, the executor and DeepSpeed, with what was predicted for it.
single() {
    local -a same=(--results "$results" --strategy single --dtype bf16) quick=(--shards 1)
    ./entry.sh profile "${vision[@]:0:2}" --batch-size "${vision[3]}" --dtype bf16 --results "$results" "${quick[@]}" \
        + train "${vision[@]}" --engine torch "${same[@]}" --predict \
        + train "${vision[@]}" --engine executor "${same[@]}" --predict \
        + train "${vision[@]}" --strategy ddp --dtype bf16 --results "$results" \
        + profile "${text[@]:0:2}" --batch-size "${text[3]}" --dtype bf16 --results "$results" "${quick[@]}" \
        + train "${text[@]}" --engine torch "${same[@]}" --predict \
        + train "${text[@]}" --engine executor "${same[@]}" --predict \
        + train "${text[@]}" --strategy zero2 zero3 --dtype bf16 --results "$results"
}

# The same in channels-last order, and a search that tries its plans.
channels_last() {
    local -a same=(--results "$results" --dtype bf16 --channels-last)
    ./entry.sh profile "${vision[@]:0:2}" --batch-size "${vision[3]}" "${same[@]}" --shards 1 \
        + train "${vision[@]}" --strategy single --engine torch "${same[@]}" --predict \
        + train "${vision[@]}" --strategy single --engine executor "${same[@]}" --predict \
        + search "${vision[@]:0:2}" --batch-size "${vision[3]}" "${same[@]}" --search-budget 200
}

# After `single`: the largest batch that `advise` lets a GPU hold trains there, and where a GPU cannot
# hold a step, the profile times parts of the model.
fits() {
    local fraction=PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction batch
    ./entry.sh links --results "$results"
    batch=$(python -m harness.plan advise "$results" --dtype bf16 "${text[@]:0:2}" --batch-size "${text[3]}" --json \
        | python -c 'import json, sys; print(json.load(sys.stdin)["largest_batch"][0]["batch"])') || return 1
    echo "largest batch of ${text[1]}: $batch"
    env "$fraction:0.03" ./entry.sh profile "${text[@]:0:2}" --batch-size 8 --dtype bf16 --shards 1 --results "$out/small" || return 1
    ./entry.sh train "${text[@]:0:2}" --per-device-batch "$batch" --steps 3 --warm-up 1 --strategy single --engine torch \
        --dtype bf16 --results "$results"
}

# The same by torch.compile; the steps first, because a profile compiles each batch size for minutes.
compiled() {
    local -a same=(--results "$results" --strategy single --dtype bf16 --compile) quick=(--shards 1)
    ./entry.sh train "${vision[@]}" --engine torch "${same[@]}" + train "${text[@]}" --engine torch "${same[@]}"
    ./entry.sh profile "${vision[@]:0:2}" --batch-size "${vision[3]}" --dtype bf16 --compile --results "$results" "${quick[@]}" \
        + train "${vision[@]}" --engine executor "${same[@]}" \
        + profile "${text[@]:0:2}" --batch-size "${text[3]}" --dtype bf16 --compile --results "$results" "${quick[@]}" \
        + train "${text[@]}" --engine executor "${same[@]}"
}

bench() {
    set -e
    python benchmarks/executor.py --builds 2 --pairs 20 --json
    python benchmarks/matmul_vs_plain.py --json
    python benchmarks/overhead.py --model resnet50 --image-size 224 --batch 64 --dtype bf16 --pairs 60 --json
}

comparison() { ./entry.sh --results "$results"; }

equivalence() {
    local seed code=0
    for seed in 1 2 3 4; do
        python benchmarks/executor_equivalence.py --device cuda:0 --series any --cases 12 --seed "$seed" \
            --output "$out/equivalence$seed.json" &
    done
    python benchmarks/change_equivalence.py --device cuda:0 --any --cases 8 --changes 0 &
    for seed in 1 2 3 4 change; do wait -n || code=1; done
    return "$code"
}

status=0
for part in "${parts[@]}"; do
    start=$SECONDS code=0
    timeout -k 5 "${LIMIT:-300}" bash -c "$(declare -p out results vision text); $(declare -f "$part"); $part" \
        >"$out/$part.log" 2>&1 || code=$? status=1
    echo "== $part: exit code $code, $((SECONDS - start)) s"
    tail -n "${LINES_SHOWN:-12}" "$out/$part.log" | cut -c1-240
done
[[ ! -d $results ]] || tar -czf "$out/results.tar.gz" -C "$out" results
exit "$status"
