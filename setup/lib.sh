# shellcheck shell=bash
# shellcheck disable=SC2154
# Functions shared by scripts, which source this file and set `root`, the checkout, and `work`, a
# directory for the answers of hosts.

# ssh must not ask, trust a new or changed host key, or hang on a dead host.
ssh_options=(-o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=5
    -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -o LogLevel=ERROR)

fail() {
    echo "error: $*" >&2
    exit 2
}

pythons=(python3 python3.13 python3.12 python3.11)

# Prints the first of the given interpreters with Python 3.11 or later.
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

# Prints an interpreter for the programs that need only the standard library, installed or not.
find_any_python() {
    find_python "$root/.venv/bin/python" "${pythons[@]}" ||
        fail "needs Python 3.11 or later on this machine: run bash setup/install.sh"
}

# run_module MODULE ARGUMENTS...: replaces this shell by a program that needs only the standard library. It
# imports from this checkout alone, regardless of the current directory, and leaves the environment of its
# commands unchanged. While it imports, Ctrl-C ends it without a traceback.
run_module() {
    local python
    python=$(find_any_python) || exit 2
    exec "$python" -P -c '
import _signal, sys
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not under nohup
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
import runpy
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
' "$root" "$@"
}

# Prints a hostfile's names, one per line; exits if it is malformed. The harness's parser accepts only
# valid names, so none can pass for an option.
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

# remote SECONDS HOST [COMMAND]: runs a command on a host; default: a POSIX script on standard input.
remote() {
    local seconds=$1 host=$2
    timeout "$seconds" ssh "${ssh_options[@]}" -- "$host" "${3:-sh -s}"
}

# ask SECONDS HOST [COMMAND]: as remote, without the output of the login itself.
ask() {
    remote "$1" "$2" "echo; echo @harness:ready; ${3:-exec sh -s}" | sed '1,/^@harness:ready$/d'
}

# on_all FUNCTION HOST...: runs `FUNCTION HOST` for all hosts in parallel and waits for all; writes
# stdout to $work/HOST and stderr to $work/HOST.err.
on_all() {
    local function=$1 host
    shift
    set -m # makes each a process group, which stop_all can kill as a whole
    for host; do
        "$function" "$host" >"$work/$host" 2>"$work/$host.err" </dev/null &
        running+=("$!")
    done
    set +m
    wait "${running[@]}" || true
    running=()
}
running=()

# Ends the processes of on_all; for a trap of INT and TERM.
stop_all() {
    local group
    for group in "${running[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
    running=()
}

# Prints the last line of what a host has written to stderr.
last_error() {
    tr -d '\r' <"$work/$1.err" | grep -v '^@\|^$' | tail -n 1 # ssh ends its lines by CR and LF
}

# Prints the reason why a host could not be reached, in one line.
why_unreachable() {
    local reason
    reason=$(last_error "$1")
    echo "${reason:-no answer in time}; run: bash setup/check_nodes.sh ${hostfile:-HOSTFILE}"
}
