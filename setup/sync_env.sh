#!/usr/bin/env bash
# Copy this checkout and its environment to all hosts, at the same path:
#   bash setup/sync_env.sh HOSTFILE [--apply] [--dir PATH]
# Hosts that share the disk need no copy. On others, tar over ssh replaces the programs, and
# setup/install.sh runs. Without --apply it only shows the differences.
# shellcheck disable=SC2317,SC2329  # functions are passed to on_all by name
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"

probe_timeout_s=30
install_timeout_s=1800
hostfile='' apply=no dir=$root install_flags='--no-system' copy_venv=no torch=''

usage() {
    cat <<'TEXT'
Usage: bash setup/sync_env.sh HOSTFILE [--apply | --dry-run] [--dir PATH] [--torch VERSION|keep]
       [--python PYTHON] [--copy-venv]

Compares code and versions on all hosts of an Open MPI hostfile with this checkout. With --apply it
updates the hosts that differ, in parallel, and compares again. Programs under harness/ that this
checkout lacks are removed from the hosts. Installations use this machine's proxies and package
indexes (http_proxy, https_proxy, no_proxy, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_CERT).

  --dry-run     compare only, as without --apply
  --dir PATH    path on the hosts (default: that of this checkout, which mpirun needs)
  --torch T     passed to setup/install.sh, also on hosts that do not differ
  --python P    passed to setup/install.sh, for hosts whose python3 is too old or lacks torch
  --copy-venv   copy this .venv rather than install, for equal hosts without a package index
                (over 1 GB each)

Exit code: 0 if all hosts are equal, 1 if some differ or cannot be reached, 2 for wrong use.
TEXT
}

parse_flags() {
    local LC_ALL=C # in Turkish, i is not of a-z
    while (($#)); do
        case $1 in
            --apply) apply=yes ;;
            --dry-run) apply=no ;;
            --copy-venv) copy_venv=yes ;;
            --dir) dir=${2:-} && shift ;;
            --torch)
                [[ ${2:-} =~ ^[A-Za-z0-9.+]+$ ]] || fail "--torch needs a version or keep"
                install_flags+=" --torch $2" torch=$2
                shift
                ;;
            --python)
                [[ ${2:-} =~ ^[A-Za-z0-9/][A-Za-z0-9._/-]*$ ]] || fail "--python '${2:-}' is not a path like /usr/bin/python3.11"
                install_flags+=" --python $2"
                shift
                ;;
            -h | --help) usage && exit 0 ;;
            -*) usage >&2 && fail "unknown option $1" ;;
            *)
                [[ -z $hostfile ]] || fail "two hostfiles: $hostfile and $1"
                hostfile=$1
                ;;
        esac
        shift || fail "--dir needs a path"
    done
    [[ -n $hostfile ]] || { usage >&2 && exit 2; }
    # It becomes part of commands that run on every host.
    [[ $dir =~ ^/[A-Za-z0-9._/-]+$ ]] || fail "--dir '$dir' must be absolute, of letters, digits and ._/-"
    [[ $copy_venv == no || $dir == "$root" ]] || fail "--copy-venv needs the path of here, not --dir $dir"
    [[ -x $root/.venv/bin/python ]] || fail "this host has no environment: bash setup/install.sh"
}

# Prints the files of the checkout, zero-separated, without links to directories (as of .venv or data).
code_files() {
    cd "$root"
    if [[ -e .git ]] && command -v git >/dev/null; then
        git ls-files -z --cached --others --exclude-standard -- ':!.sync-*' | while IFS= read -r -d '' file; do
            [[ ! -f $file ]] || printf '%s\0' "$file"
        done
    else
        find . -type f -not -path './.venv/*' -not -path './results/*' -not -path './plots/*' \
            -not -name '*.pyc' -not -name '.sync*' -print0
    fi
}

# Prints the files of .venv, zero-separated, and last the one that says that it is whole.
venv_files() {
    find .venv/. ! -path .venv/./.installed -print0
    [[ ! -e .venv/.installed ]] || printf '.venv/.installed\0'
}

code_digest() {
    (code_files | sort -z | (cd "$root" && xargs -0 sha256sum) | sha256sum | cut -d' ' -f1)
}

# Extracts the hash of the programs under harness/ from the output of versions.py.
only_hash() { sed 's/.*"harness_hash": "\([0-9a-f]*\)".*/\1/'; }

# Makes a mark on a host's disk, by which hosts that share a disk with each other are found.
announce() {
    ask "$probe_timeout_s" "$1" "echo answered; mkdir -p $dir && : >$dir/$mark.$1 && echo marked"
}

# Makes marks on all hosts; hosts that do not answer are not tried again.
announce_all() {
    local host
    on_all announce "${hosts[@]}"
    reached=()
    for host in "${hosts[@]}"; do
        if [[ $(<"$work/$host") == *marked ]]; then
            reached+=("$host")
        else
            keep_answer "$host"
        fi
    done
}

# Prints five lines about a host: disk shared with this machine or own, digest of the code last sent, hash
# of the programs, versions, and the first host with a mark on that disk.
probe() {
    ask "$probe_timeout_s" "$1" <<SCRIPT
if [ -e "$dir/$mark" ]; then echo shared; else echo own; fi
cat "$dir/.synced" 2>/dev/null || echo missing
"$dir/.venv/bin/python" - "$dir" <<'CODE' 2>/dev/null || echo missing
$(cat "$root/harness/nodes/remote/versions.py")
CODE
$([[ ! -e $root/.venv/.installed ]] || echo "[ -e $dir/.venv/.installed ] || [ ! -e $dir/.venv ] || printf 'unfinished, '")
"$dir/.venv/bin/python" - <<'CODE' 2>/dev/null || echo missing
$(cat "$root/setup/versions.py")
CODE
cd "$dir" 2>/dev/null && ls -d $mark.* 2>/dev/null | sed -n '1s/^${mark}[.]//p' | grep . || echo nobody
SCRIPT
}

is_same() {
    local disk=$1 versions=$4
    [[ $versions == "$wanted_versions" ]] && { [[ $disk == shared ]] || is_same_code "$2" "$3"; }
}

# Compares the programs too, as check_nodes does, because they may have been edited since they were sent.
is_same_code() { [[ $1 == "$digest" && $(only_hash <<<"$2") == "$wanted_hash" ]]; }

# Sends and installs if code or versions differ, or with --torch; once for each disk.
bring() {
    local host=$1
    local -a answer
    mapfile -t answer <"$work/$host.probe"
    ((${#answer[@]} == 5)) || return 0
    [[ -n $torch ]] || ! is_same "${answer[@]}" || return 0
    [[ ${answer[0]} == own && ${answer[4]} == "$host" ]] || return 0
    echo "$host: bringing code and packages, which may take minutes" >&3
    remove_programs "$host"
    (cd "$root" && code_files | tar -cf - --null -T -) | unpack "$host"
    if [[ $copy_venv == yes ]]; then
        # Packages that are there would mix with these; a link may lead to another checkout's environment.
        remote "$install_timeout_s" "$host" "[ -L $dir/.venv ] || rm -rf $dir/.venv"
        (cd "$root" && venv_files | tar -cf - --null --no-recursion -T -) | unpack "$host"
    else
        install_on "$host"
    fi
}

# Passes proxies and package indexes by standard input, because they may hold passwords.
install_on() {
    local name
    {
        for name in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_CERT; do
            [[ ! -v $name ]] || printf 'export %s=%q\n' "$name" "${!name}"
        done
        echo "bash $dir/setup/install.sh $install_flags </dev/null"
    } | remote "$install_timeout_s" "$1" "bash -s"
}

# Removes all files that check_nodes hashes, so that no program stays that this checkout lacks.
remove_programs() {
    ask "$probe_timeout_s" "$1" <<SCRIPT
rm -f "$dir/.synced"
[ ! -d "$dir/harness" ] || find "$dir/harness" -type f \( -name '*.py' -o -name '*.sh' \) -exec rm -f {} +
SCRIPT
}

unpack() {
    timeout "$install_timeout_s" ssh "${ssh_options[@]}" -- "$1" \
        "mkdir -p $dir && tar -xf - -C $dir && echo $digest >$dir/.synced"
}

clear_marks() {
    rm -f "$root/$mark" "$root/$mark".*
    if [[ $apply == yes ]]; then
        on_all clear_mark "${reached[@]}"
    fi
}

clear_mark() { remote "$probe_timeout_s" "$1" "rm -f $dir/$mark.$1"; }

probe_all() {
    local host
    on_all probe "${reached[@]}"
    for host in "${reached[@]}"; do keep_answer "$host"; done
}

keep_answer() {
    mv "$work/$1" "$work/$1.probe"
    mv "$work/$1.err" "$work/$1.probe.err"
}

report() {
    local host=$1
    local -a answer
    mapfile -t answer <"$work/$host.probe"
    if [[ ${answer[*]} == answered ]]; then
        row "$host" '?' "NOT WRITABLE: $(last_error "$host.probe"); make $dir writable there"
    elif ((${#answer[@]} != 5)); then
        row "$host" '?' "UNREACHABLE: $(why_unreachable "$host.probe")"
    elif is_same "${answer[@]}"; then
        row "$host" "${answer[0]}" OK
    else
        row "$host" "${answer[0]}" "$(difference "${answer[@]}")"
        [[ ${answer[0]} == shared ]] || differs=yes
        if [[ $apply == yes ]]; then sed 's/^/    /' "$work/$host.bring" | tail -n 5; fi
    fi
}

# Prints the difference and its remedy.
difference() {
    local disk=$1 code=$2 versions=$4 remedy='--apply brings it'
    [[ $apply == no ]] || remedy='it failed, see below'
    if [[ $disk == shared ]]; then
        echo "DIFFERS: the disk is shared, but versions there are: $versions; is its Python another?"
    elif [[ $code != "$digest" ]] || { [[ $versions != missing ]] && ! is_same_code "$code" "$3"; }; then
        echo "DIFFERS: code $([[ $code == missing ]] && echo 'not sent from here' || echo 'of another state'); $remedy"
    else
        echo "DIFFERS: versions there are: $versions; $remedy"
    fi
}

row() {
    printf '%-20s %-8s %s\n' "$1" "$2" "$3"
    [[ $3 == OK ]] || status=1
}

main() {
    parse_flags "$@"
    local names
    names=$(host_names "$hostfile")
    mapfile -t hosts <<<"$names"
    digest=$(code_digest)
    wanted_versions=$("$root/.venv/bin/python" "$root/setup/versions.py")
    wanted_hash=$("$root/.venv/bin/python" "$root/harness/nodes/remote/versions.py" "$root" | only_hash)
    work=$(mktemp -d)
    # A host that sees this file under the same path shares the disk.
    reached=()
    mark=$(cd "$root" && mktemp .sync-XXXXXXXX)
    trap 'clear_marks; rm -rf "$work"' EXIT
    trap 'stop_all; exit 130' INT TERM
    exec 3>&2 # on_all keeps the output of each host in a file
    echo "here: $wanted_versions"
    reached=("${hosts[@]}")
    if [[ $apply == yes ]]; then announce_all; fi
    probe_all
    if [[ $apply == yes ]]; then
        on_all bring "${reached[@]}"
        for host in "${reached[@]}"; do mv "$work/$host.err" "$work/$host.bring"; done
        probe_all
    fi
    status=0 differs=no
    printf '%-20s %-8s %s\n' host disk result
    for host in "${hosts[@]}"; do report "$host"; done
    [[ $differs == no || $apply == yes ]] || echo "nothing was changed: --apply brings what differs"
    exit "$status"
}

[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
