#!/usr/bin/env bash
# Set the same login shell on all hosts, and verify it:
#   bash setup/change_shell.sh HOSTFILE [--shell /bin/bash] [--apply]
# Without --apply it only shows the changes.
# shellcheck disable=SC2317,SC2329  # functions are passed to on_all by name
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"

timeout_s=20
hostfile='' shell=/bin/bash apply=no

usage() {
    cat <<'TEXT'
Usage: bash setup/change_shell.sh HOSTFILE [--shell /bin/bash] [--apply]

Shows your login shell on all hosts of an Open MPI hostfile. With --apply it changes the shell on
hosts where it differs, and verifies the change in a new login. Exit code: 0 if all hosts have the
shell, 1 if some host differs or cannot be reached, 2 for wrong use.
TEXT
}

parse_flags() {
    local LC_ALL=C # in Turkish, i is not of a-z
    while (($#)); do
        case $1 in
            --shell) shell=${2:-} && shift ;;
            --apply) apply=yes ;;
            -h | --help) usage && exit 0 ;;
            -*) usage >&2 && fail "unknown option $1" ;;
            *)
                [[ -z $hostfile ]] || fail "two hostfiles: $hostfile and $1"
                hostfile=$1
                ;;
        esac
        shift || fail "--shell needs a path"
    done
    [[ -n $hostfile ]] || { usage >&2 && exit 2; }
    # It becomes part of a script that runs on every host.
    [[ $shell =~ ^/[A-Za-z0-9._/-]+$ ]] || fail "--shell '$shell' is not a path like /bin/bash"
}

# Prints the login shell, then whether the wanted one is usable on the host.
probe() {
    ask "$timeout_s" "$1" <<SCRIPT
getent passwd "\$(id -un)" | cut -d: -f7
if [ ! -x "$shell" ]; then echo "has no $shell"
elif ! grep -qx "$shell" /etc/shells; then echo "does not list $shell in /etc/shells"
else echo usable; fi
SCRIPT
}

# Tries commands that need no password in turn; chsh asks for one, so it must not read the terminal.
change() {
    remote "$timeout_s" "$1" <<SCRIPT
user=\$(id -un)
if [ "\$(id -u)" = 0 ]; then usermod --shell "$shell" "\$user" </dev/null
else sudo -n usermod --shell "$shell" "\$user" </dev/null 2>/dev/null || chsh -s "$shell" </dev/null; fi
SCRIPT
}

report() {
    local host=$1
    local -a answer
    mapfile -t answer <"$work/$host"
    if ((${#answer[@]} < 2)); then
        row "$host" '?' "UNREACHABLE: $(why_unreachable "$host")"
    elif [[ ${answer[0]} == "$shell" ]]; then
        row "$host" "${answer[0]}" OK
    elif [[ ${answer[1]} != usable ]]; then
        row "$host" "${answer[0]}" "DIFFERS: it ${answer[1]}; install it or choose another --shell"
    elif [[ $apply == yes ]]; then
        row "$host" "${answer[0]}" "NOT CHANGED: log in there and run: chsh -s $shell"
    else
        row "$host" "${answer[0]}" "DIFFERS: --apply changes it to $shell"
        differs+=("$host")
    fi
}

row() {
    printf '%-20s %-16s %s\n' "$1" "$2" "$3"
    [[ $3 == OK ]] || status=1
}

# Changes the shell if the probe found a different one and the wanted one is usable; then probes again.
probe_and_change() {
    local -a answer
    mapfile -t answer < <(probe "$1")
    if [[ ${answer[1]:-} == usable && ${answer[0]} != "$shell" ]]; then
        change "$1" >&2 || true
        probe "$1"
    else
        printf '%s\n' "${answer[@]}"
    fi
}

main() {
    parse_flags "$@"
    local names
    names=$(host_names "$hostfile")
    mapfile -t hosts <<<"$names"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    trap 'stop_all; exit 130' INT TERM
    if [[ $apply == yes ]]; then
        on_all probe_and_change "${hosts[@]}"
    else
        on_all probe "${hosts[@]}"
    fi
    status=0 differs=()
    printf '%-20s %-16s %s\n' host 'login shell' result
    for host in "${hosts[@]}"; do report "$host"; done
    if ((${#differs[@]})); then
        echo "nothing was changed; to change ${#differs[@]}: bash setup/change_shell.sh $hostfile --shell $shell --apply"
    fi
    exit "$status"
}

main "$@"
