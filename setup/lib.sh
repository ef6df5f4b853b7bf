# shellcheck shell=bash
# shellcheck disable=SC2154
# What scripts share. Sourced; `root` is the checkout, `work` a directory for the answers of hosts;
# both are the caller's.

# Never asks, never trusts a new or changed host key, never hangs on a dead host.
ssh_options=(-o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=5
    -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -o LogLevel=ERROR)

fail() {
    echo "error: $*" >&2
    exit 2
}

pythons=(python3 python3.13 python3.12 python3.11)

# Prints the first of some interpreters that is of Python 3.11 or later.
find_python() {
    local candidate
    for candidate; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Prints what runs the harness's standard-library programs, before and after an installation.
find_any_python() {
    find_python "$root/.venv/bin/python" "${pythons[@]}" ||
        fail "needs Python 3.11 or later on this machine: run bash setup/install.sh"
}

# Prints a hostfile's names, one a line; ends the script when it is malformed. The harness's own
# parser lets through only what is a name, so none can be taken for an option.
host_names() {
    local python
    python=$(find_any_python) || exit 2
    "$python" -P -c '
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from harness.domain.hostfile import load_hostfile
from harness.errors import HarnessError
try:
    print("\n".join(host.name for host in load_hostfile(Path(sys.argv[2]))))
except HarnessError as error:
    sys.exit(f"error: {error}")
' "$root" "$1" || exit 2
}

# remote SECONDS HOST [COMMAND]: runs a command, by default a POSIX script from standard input, on a host.
remote() {
    local seconds=$1 host=$2
    timeout "$seconds" ssh "${ssh_options[@]}" -- "$host" "${3:-sh -s}"
}

# ask SECONDS HOST [COMMAND]: as remote; prints what that prints, without what the login printed before.
ask() {
    remote "$1" "$2" "echo; echo @harness:ready; ${3:-exec sh -s}" | sed '1,/^@harness:ready$/d'
}

# on_all FUNCTION HOST...: runs `FUNCTION HOST` for all at once, each one's output into $work/HOST;
# returns when all have ended. What a function prints on stderr is kept in $work/HOST.err.
on_all() {
    local function=$1 host
    shift
    set -m # each is a process group, which stop_all can end as a whole
    for host; do
        "$function" "$host" >"$work/$host" 2>"$work/$host.err" </dev/null &
        running+=("$!")
    done
    set +m
    wait "${running[@]}" || true
    running=()
}
running=()

# Ends what on_all has started; for a trap of INT and TERM.
stop_all() {
    local group
    for group in "${running[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
    running=()
}

# Why a host could not be reached, in one line.
why_unreachable() {
    local reason
    reason=$(grep -v '^@\|^$' "$work/$1.err" | tail -n 1)
    echo "${reason:-no answer in time}; run: bash setup/check_nodes.sh HOSTFILE"
}
