# shellcheck shell=sh
# Print facts about a host as sections of text, which harness.nodes.parse reads.
#
# Sent on the standard input of `ssh HOST sh -s`, so the host needs no installation. Uses only POSIX
# sh and the tools of a bare Linux or BusyBox; a missing tool leaves its section empty.
# The sender puts these assignments, quoted, in front of this text:
#   peers        names of all hosts, separated by blanks
#   env_dir      the Python environment's path, the same on every host
#   repo_dir     the harness' checkout, the same on every host
#   command_s    seconds that one command may take
#   total_s      seconds after which this script kills its shell in any case
#   deep         1: run a kernel on each GPU
#   versions_py, kernel_py   Python programs

: "${peers=}" "${env_dir=}" "${repo_dir=}" "${command_s=5}" "${total_s=30}" "${deep=0}"
: "${versions_py=}" "${kernel_py=}"
LC_ALL=C
PATH=$PATH:/usr/local/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib
export LC_ALL PATH

section() {
    printf '\n@harness:%s\n' "$1"
}

# Limit each command, so that one that hangs (stale NFS, a wedged GPU driver) costs only its section.
if timeout -k 1 1 true 2>/dev/null; then
    limit="timeout -k 1 $command_s"
elif timeout 1 true 2>/dev/null; then
    limit="timeout $command_s"
else
    limit=
fi
bounded() {
    # shellcheck disable=SC2086  # $limit is several words, set above
    $limit "$@"
}

# Print a command's output and exit status as a section.
report() {
    section "$1"
    shift
    bounded "$@" 2>&1
    printf '\n@rc=%s\n' "$?"
}

start_watchdog() {
    (
        nap=
        trap '[ -z "$nap" ] || kill "$nap" 2>/dev/null; exit 0' TERM HUP
        sleep "$total_s" &
        nap=$!
        wait "$nap"
        kill -KILL $$
    ) >/dev/null 2>&1 &
    watchdog=$!
}

probe_system() {
    section hostname
    uname -n
    section kernel
    uname -s -r -m
    section os
    cat /etc/os-release 2>/dev/null
    section shell
    user=$(id -un)
    entry=$(bounded getent passwd "$user" 2>/dev/null || grep "^$user:" /etc/passwd)
    printf '%s\n%s\n' "$user" "${entry##*:}"
    section boot_id
    cat /proc/sys/kernel/random/boot_id 2>/dev/null
    section cpus_allowed
    grep '^Cpus_allowed_list' /proc/self/status
    section cpu_model
    grep -m 1 -E '^(model name|Model|cpu model)' /proc/cpuinfo
    section load
    cat /proc/loadavg
    section memory
    grep -E '^(MemTotal|MemAvailable|MemFree):' /proc/meminfo
    report disk df -Pk "$HOME" /tmp /dev/shm "$repo_dir"
}

# Print the limits of all levels up to the root, because the tightest one applies.
probe_cgroup() {
    section cgroup
    while IFS=: read -r _ controllers path; do
        case ,$controllers, in
            ,,) roots="/sys/fs/cgroup /sys/fs/cgroup/unified" ;;
            *,cpu,*) roots="/sys/fs/cgroup/cpu /sys/fs/cgroup/cpu,cpuacct" ;;
            *,memory,*) roots=/sys/fs/cgroup/memory ;;
            *) continue ;;
        esac
        for root in $roots; do
            print_limits "$root" "$path"
        done
    done </proc/self/cgroup
}

print_limits() {
    root=$1
    path=${2%/}
    while :; do
        [ -r "$root$path/cpu.max" ] && printf 'cpu.max %s\n' "$(cat "$root$path/cpu.max")"
        print_memory "$root$path" memory.max memory.current ''
        print_memory "$root$path" memory.limit_in_bytes memory.usage_in_bytes total_
        if [ -r "$root$path/cpu.cfs_quota_us" ]; then
            printf 'cpu.max %s %s\n' "$(cat "$root$path/cpu.cfs_quota_us")" \
                "$(cat "$root$path/cpu.cfs_period_us")"
        fi
        [ -n "$path" ] || break
        path=${path%/*}
    done
}

# Print a limit, the memory in use, and its parts that the kernel frees on demand: the pages of files.
print_memory() {
    [ -r "$1/$2" ] || return
    freed=$(sed -n "s/^$4\(in\)\{0,1\}active_file / /p" "$1/memory.stat" 2>/dev/null | tr -d '\n')
    printf 'memory %s %s%s\n' "$(cat "$1/$2")" "$(cat "$1/$3" 2>/dev/null)" "$freed"
}

probe_network() {
    section net_dev
    cat /proc/net/dev
    section addresses
    bounded ip -o addr show 2>/dev/null
    section links
    bounded ip -o link show 2>/dev/null
    section net_sys
    for directory in /sys/class/net/*; do
        [ -d "$directory" ] || continue
        name=${directory##*/}
        kind=physical
        [ -e "$directory/device" ] || kind=virtual
        [ -e "$directory/wireless" ] && kind=wireless
        printf '%s %s %s %s\n' "$name" "$kind" \
            "$(cat "$directory/speed" 2>/dev/null || echo -)" \
            "$(cat "$directory/duplex" 2>/dev/null || echo -)"
    done
    section own_name
    bounded getent hosts "$(uname -n)" 2>/dev/null
    # shellcheck disable=SC2086  # peers is a list of names, checked by the sender
    addresses=$(bounded getent hosts $peers 2>/dev/null | cut -d ' ' -f 1)
    section routes
    if ip -V 2>/dev/null | grep -q iproute2; then
        # One process for all peers: otherwise 32 hosts would start a thousand.
        printf '%s\n' "$addresses" | sed 's/^/route get /' | bounded ip -o -force -batch - 2>&1
    else
        for address in $addresses; do
            bounded ip route get "$address" 2>&1
        done
    fi
}

probe_python() {
    python=$env_dir/bin/python
    section python
    if [ -x "$python" ]; then
        printf 'environment %s\n' "$env_dir"
    else
        # A link to a Python that is not there, or that this account cannot reach.
        printf 'missing %s\n' "$([ ! -L "$python" ] || sed -n 's/^home *= *//p' "$env_dir/pyvenv.cfg")"
        python=$(command -v python3)
    fi
    if [ -n "$python" ]; then
        report versions "$python" -c "$versions_py" "$repo_dir"
    fi
    mpirun=$env_dir/bin/mpirun
    [ -x "$mpirun" ] || mpirun=$(command -v mpirun)
    if [ -n "$mpirun" ]; then
        report mpirun "$mpirun" --version
    fi
}

probe_gpus() {
    section nvidia_cards
    for directory in /sys/bus/pci/devices/*; do
        [ "$(cat "$directory/vendor" 2>/dev/null)" = 0x10de ] || continue
        case $(cat "$directory/class" 2>/dev/null) in
            0x03*) printf '%s\n' "${directory##*/}" ;;
        esac
    done
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    section nvidia_smi
    state=$(bounded nvidia-smi -q -x 2>&1)
    code=$?
    # Indent @, because a process name may look like a mark of this script.
    printf '%s\n' "$state" | sed 's/^@/ @/'
    printf '\n@rc=%s\n' "$code"
    # Further questions to a driver that hangs would take the time that is left for the whole probe.
    case $code in 124 | 137) return 0 ;; esac
    report compute_capability nvidia-smi --query-gpu=uuid,compute_cap --format=csv,noheader
    section gpu_users
    printf '%s\n' "$state" | sed -n 's/.*<pid>\([0-9][0-9]*\)<.*/\1/p' | while read -r pid; do
        printf '%s %s\n' "$pid" "$(stat -c %U "/proc/$pid" 2>/dev/null)"
    done
    if [ -x "$env_dir/bin/python" ]; then
        report torch_cuda "$env_dir/bin/python" -c "$kernel_py" "$deep"
    fi
}

main() {
    start_watchdog
    probe_system
    probe_cgroup
    probe_network
    probe_python
    probe_gpus
    section end
    kill "$watchdog" 2>/dev/null
}

# The shell reads main whole before it runs, and main cannot consume commands sent afterwards.
main </dev/null
