#!/usr/bin/env bash
# Start one rank, under mpirun, srun or torchrun: find the Python environment, set variables, and
# execute the rank's program. `./entry.sh --help` lists the workloads.
#
# Optional settings, one NAME=VALUE per line, which are never executed:
#   hosts/cluster.env      for all hosts
#   hosts/<hostname>.env   for one host; overrides cluster.env
# Variables that are already set (mpirun -x NAME=VALUE) override both.
set -euo pipefail

script=${BASH_SOURCE[0]}
[[ ! -L $script ]] || script=$(readlink -f -- "$script") # in a user's own directory
root=$(cd -- "$(dirname -- "$script")" && pwd)

# Exports each allowed NAME=VALUE of a file unless the variable is already set.
read_settings() {
    local file=$1 line name number=0 short LC_ALL=C # in Turkish, I is not of A-Z
    [[ -e $file ]] || return 0
    if [[ -d $file || ! -r $file ]] || (($(head -c 65537 -- "$file" | wc -c) > 65536)); then
        echo "error: $file is no file of at most 64 KiB that can be read: write lines of NAME=VALUE" >&2
        exit 2
    fi
    while IFS= read -r line || [[ -n $line ]]; do
        number=$((number + 1))
        line=${line%$'\r'} line=${line#$'\xef\xbb\xbf'} # as editors on Windows write them
        short=${line:0:60} && name=${short%%=*}
        [[ $short =~ ^[[:space:]]*(#.*)?$ && ($short == *#* || $short == "$line") ]] && continue
        if [[ ! $short =~ ^[A-Z][A-Za-z0-9_]{0,40}= ]]; then
            echo "error: $file:$number: ${short@Q} is not NAME=VALUE" >&2
            exit 2
        fi
        case $name in
            OMPI_MCA_oob_* | OMPI_MCA_plm_* | OMPI_MCA_rmaps_* | OMPI_MCA_hwloc_*)
                echo "error: $file:$number: $name is mpirun's, which has started already when this is read:" \
                    "mpirun --mca ${name#OMPI_MCA_} ${short#*=}" >&2
                exit 2
                ;;
            NCCL_* | GLOO_* | OMP_* | MKL_* | KMP_* | TORCH_* | CUDA_* | OMPI_* | UCX_* | HARNESS_* | MALLOC_*) ;;
            *)
                echo "error: $file:$number: $name may not be set here (allowed: NCCL_*, GLOO_*, OMP_*," \
                    "MKL_*, KMP_*, TORCH_*, CUDA_*, OMPI_*, UCX_*, HARNESS_*, MALLOC_*)" >&2
                exit 2
                ;;
        esac
        short=${line#*=}
        if [[ $short =~ ^[\"\'] || $short =~ [[:space:]]# ]]; then
            # Unlike a shell, this function would keep quotes and comment as part of the value.
            short=${short%%[[:space:]]#*} short=${short//[\"\']/}
            echo "error: $file:$number: $name has quotes or a comment in its value: write" \
                "$name=${short:0:60}" >&2
            exit 2
        fi
        [[ -v $name ]] || export "$name=${short%"${short##*[![:space:]]}"}"
    done <"$file"
}

# check_number NAME: exits unless the variable is a whole number above 0, because bash arithmetic would
# evaluate any other text, including commands in it.
check_number() {
    local value=${!1} digit='[0123456789]'
    [[ ! $value =~ ^[123456789]$digit{0,5}$ ]] || return 0
    value=${value:0:60}
    echo "error: $(uname -n): $1 is ${value@Q}: set it to a whole number above 0, as in $1=1, or unset it" >&2
    exit 2
}

hosts=${HARNESS_HOSTS:-$root/hosts}
read_settings "$hosts/$(uname -n).env"
read_settings "$hosts/cluster.env"

environment=${HARNESS_VENV:-$root/.venv}
packages='import importlib.util as u; raise SystemExit(None in map(u.find_spec, ("mpi4py", "torch", "tyro")))'
if [[ -x $environment/bin/python ]]; then
    PATH=$environment/bin:$PATH
    if [[ ! -e $environment/.installed ]] && ! "$environment/bin/python" -c "$packages" >/dev/null; then
        echo "error: $(uname -n): the environment at $environment is not complete: wait for bash setup/install.sh, or" \
            "run it again" >&2
        exit 2
    fi
elif [[ -L $environment/bin/python ]]; then
    echo "error: $(uname -n): the environment at $environment needs the Python in" \
        "$(sed -n 's/^home *= *//p' "$environment/pyvenv.cfg"), which $(id -un) cannot run there: install it for" \
        "every account, or make the environment from one that all hosts have (setup/install.sh --python)" >&2
    exit 2
elif ! python3 -c 'import harness, torch' 2>/dev/null; then
    echo "error: $(uname -n) has no environment at $environment: run bash setup/install.sh there," \
        "or set HARNESS_VENV" >&2
    exit 2
fi
export PATH
python=$(command -v python || command -v python3)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

# Threads while the program starts: the cores of the host divided by its ranks. Each run then sets a
# thread for each core of its rank.
local_size=1
for name in OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS LOCAL_WORLD_SIZE; do
    [[ -v $name ]] || continue
    check_number "$name"
    local_size=${!name}
    break
done
# Open MPI's library says only that a file is missing.
if [[ -v MPI_LOCALNRANKS && -x $environment/bin/ompi_info ]]; then
    echo "error: $(uname -n): the mpirun of another MPI started this rank, but the environment has Open MPI:" \
        "start with $environment/bin/mpirun" >&2
    exit 2
fi
threads=$(($(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) / local_size))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
for name in OMP_NUM_THREADS MKL_NUM_THREADS; do
    [[ -z ${!name-} ]] || check_number "$name"
done

# NVML numbers GPUs by PCI bus, CUDA by default from the fastest.
export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}
# The maximum of hardware queues, because streams that share one wait for each other's receives.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}

# Prints, each after a comma, the bridges without a physical device, as of containers and virtual
# machines.
inner_bridges() {
    local bridge
    for bridge in "$1"/*/bridge; do
        bridge=${bridge%/bridge}
        [[ ! -d $bridge/bridge ]] || compgen -G "$bridge/lower_*/device" >/dev/null ||
            compgen -G "$bridge/lower_*/lower_*/device" >/dev/null || printf ',%s' "${bridge##*/}"
    done
}

# Open MPI must not use docker0 and similar, because they have the same address on every host. It
# refuses a list of included and a list of excluded interfaces together.
if [[ ! -v OMPI_MCA_btl_tcp_if_include && ! -v OMPI_MCA_btl_tcp_if_exclude ]]; then
    OMPI_MCA_btl_tcp_if_exclude=127.0.0.1/8,docker0,virbr0$(inner_bridges /sys/class/net)
    export OMPI_MCA_btl_tcp_if_exclude
fi
# A waiting rank must not spin on cores on which another one measures.
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}

# An interrupted run leaves semaphores, which Python frees with a warning.
export PYTHONWARNINGS=${PYTHONWARNINGS:+$PYTHONWARNINGS,}ignore:resource_tracker:UserWarning
# c10d warns about each connection from a host without reverse name resolution.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# A relocatable Open MPI (the wheel) passes its prefix only to ranks on mpirun's own host.
if [[ -v PMIX_INSTALL_PREFIX ]]; then
    export OPAL_PREFIX=${OPAL_PREFIX:-$PMIX_INSTALL_PREFIX}
fi

# The agent starts the rank's program (of this checkout, whatever the current directory holds) and
# watches over it. Ctrl-C is blocked until the agent can take it, because Python shows a traceback
# during its own start, and goes on.
blocked=()
[[ $(env --help 2>&1) != *--block-signal* ]] || blocked=(env --block-signal=INT)
exec "${blocked[@]}" "$python" -SP "$root/harness/runtime/agent/__main__.py" "$python" -P -m harness "$@"
