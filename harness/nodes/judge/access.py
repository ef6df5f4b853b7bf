"""Verdicts on access to a host: name, port, login, shell, clock."""

from harness.inputs import shorten
from harness.nodes.facts import Judgement, critical, ok, unknown, warn
from harness.nodes.ssh import Login
from harness.nodes.survey import HostReport, Survey
from harness.units import format_duration

# Logs of several hosts are compared by their clocks, and 0.1 s is less than a step. An offset of
# several seconds also breaks make, NFS and Kerberos.
CLOCK_WARN_S = 0.1
CLOCK_CRITICAL_S = 5.0
_POSIX_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh"}


def judge_resolve(report: HostReport, survey: Survey) -> list[Judgement]:
    """The name resolves to an address on this machine."""
    probe = report.probe
    if probe.target is None:
        return critical(f"ssh refuses the name: {probe.login_detail}", "correct ~/.ssh/config")
    if probe.target.is_proxied:
        return ok("reached through a proxy")
    if probe.resolve_error:
        name = probe.target.hostname
        return critical(
            f"{name} has no address: {probe.resolve_error}",
            f"correct the name in the hostfile, or add `ADDRESS {name}` to /etc/hosts here",
        )
    loopback = [address for address in probe.addresses if address.startswith("127.")]
    if loopback and len(survey.reports) > 1 and report.facts.hostname != report.name:
        return warn(
            f"resolves to {loopback[0]} here: other hosts cannot use that",
            f"write {report.facts.hostname or 'its real name'} instead of {report.name} into "
            f"the hostfile, or {report.name}'s network address in place of {loopback[0]} "
            "into /etc/hosts here",
        )
    return ok(probe.addresses[0])


def judge_port(report: HostReport, survey: Survey) -> list[Judgement]:
    """The ssh port accepts connections."""
    probe = report.probe
    assert probe.target is not None
    if probe.target.is_proxied:
        return ok("reached through a proxy")
    if not probe.port_error:
        return ok(f"port {probe.target.port}, {probe.banner or 'silent'}")
    if "refused" in probe.port_error:
        remedy = f"at {report.name}'s console: sudo systemctl enable --now ssh"
    elif "route" in probe.port_error or "unreachable" in probe.port_error:
        remedy = f"switch {report.name} on, and check its cable and its address"
    else:
        remedy = f"switch {report.name} on, or open port {probe.target.port} in its firewall"
    return critical(probe.port_error, remedy)


def judge_login(report: HostReport, survey: Survey) -> list[Judgement]:
    """ssh logs in without a password to a host with a known key, and the probe completes."""
    probe = report.probe
    if not report.is_in:
        detail, remedy = _explain_login(report)
        return critical(detail, remedy)
    if not probe.is_complete:
        marks = [line for line in probe.text.splitlines() if line.startswith("@harness:")]
        stage = marks[-1].removeprefix("@harness:") if marks else "its first line"
        if probe.login_detail:
            text = f"logged in, and the shell ended at {stage}: {probe.login_detail}"
            return critical(text, f"ssh {report.name} 'command -v sh; uptime', then check again")
        return critical(
            f"logged in, then hung at {stage}: no end within {survey.order.timeout_s:g} s",
            f"ssh {report.name}, and look for what hangs (a stale network file system: df; "
            "a wedged GPU driver: nvidia-smi), or raise --timeout",
        )
    user = f" as {report.facts.user}" if report.facts.user else ""
    return ok(f"key accepted{user}, probed in {format_duration(probe.duration_s)}")


def _explain_login(report: HostReport) -> tuple[str, str]:
    """Detail and remedy of a failed login."""
    probe, name = report.probe, report.name
    target = probe.target
    assert target is not None
    port = "" if target.port == 22 else f"-p {target.port} "
    accept_key = (
        f"ssh {probe.failed_jump or name} true, and answer yes if the fingerprint is that of "
        "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` at its console"
    )
    is_quiet = probe.is_port_open and not probe.banner
    quiet = " (the port is open, but nothing answers)" if is_quiet else ""
    table = {
        Login.UNKNOWN_KEY: ("its host key is not known here", accept_key),
        Login.CHANGED_KEY: (
            "its host key is not the one known here: reinstalled, or another machine",
            f"if it was reinstalled: ssh-keygen {probe.outdated_key} && {accept_key}",
        ),
        Login.DENIED: (
            f"asks for more than a key: {probe.login_detail}",
            f"ssh-copy-id {probe.failed_jump or port + name} (first ssh-keygen -t ed25519 if you "
            "have no key); if your key has a passphrase: ssh-add",
        ),
        Login.KEY_FILE_OPEN: (
            "ssh ignores a private key that others may read",
            "chmod 600 ~/.ssh/id_*",
        ),
        Login.TIMED_OUT: (
            f"hangs: no login within the timeout{quiet}",
            f"look for a command that waits in its ~/.bashrc, restart {name}, or at its console "
            "its sshd: sudo systemctl restart ssh",
        ),
        Login.CLOSED: (
            f"closes the connection: {probe.login_detail}",
            f"at {name}'s console: sudo journalctl -u ssh -n 20 (MaxStartups? AllowUsers? a "
            "ban?); a jump host has its own",
        ),
        Login.LEFT: (
            f"logs in, and its shell ends before the command: {probe.login_detail}",
            f"ssh {name}: renew the password"
            if "expired" in probe.login_detail
            else f"ssh {name}, and look for `exit` or `exec` in ~/.bashrc (~/.cshrc, config.fish): "
            "put `[[ $- == *i* ]] || return` before them",
        ),
        Login.WAITING: (
            f"logs in, prints {shorten(probe.login_detail)}, and its shell goes no further",
            f"ssh {name}, and look for a menu or question in ~/.bashrc (~/.cshrc, config.fish): "
            "put `[[ $- == *i* ]] || return` before it",
        ),
        Login.NO_SHELL: (
            f"logs in but gives no shell: {probe.login_detail}",
            f"at {name}'s console: sudo chsh -s /bin/bash {target.user}",
        ),
    }
    fallback = (f"ssh fails: {probe.login_detail or 'no message'}", f"ssh -v {name} true")
    detail, remedy = table.get(probe.login, fallback)
    at = f"at its jump host (ssh {probe.failed_jump}): " if probe.failed_jump else ""
    return at + detail, remedy


def judge_shell(report: HostReport, survey: Survey) -> list[Judgement]:
    """The login shell is a POSIX shell, which mpirun and the harness' scripts require."""
    shell = report.facts.shell
    if not shell:
        return unknown("the account has no entry", f"ssh {report.name} getent passwd")
    if shell.rsplit("/", 1)[-1] in _POSIX_SHELLS:
        return ok(shell)
    return warn(
        f"the login shell is {shell}: it does not read POSIX syntax",
        f"bash setup/change_shell.sh {survey.order.hostfile} --apply",
    )


def judge_clock(report: HostReport, survey: Survey) -> list[Judgement]:
    """The clock agrees with this machine's, within the error of the measurement."""
    clock = report.probe.clock
    if clock is None:
        return unknown("`date` gives no seconds", f"ssh {report.name} date +%s.%N")
    sign, offset_s = "-" if clock.offset_s < 0 else "+", abs(clock.offset_s)
    text = f"{sign}{format_duration(offset_s)} +- {format_duration(clock.error_s)}"
    certain_s = abs(clock.offset_s) - clock.error_s
    remedy = f"ssh {report.name} sudo timedatectl set-ntp true (or install chrony on every host)"
    if certain_s >= CLOCK_CRITICAL_S:
        return critical(f"off by {text}", remedy)
    if certain_s >= CLOCK_WARN_S:
        return warn(f"off by {text}", remedy)
    return ok(text)
