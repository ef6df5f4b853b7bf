"""`bash setup/keep_training.sh mpirun ...`: start a training again on the hosts that are fit.

mpirun ends when a host is lost. The next launch leaves that host out and continues from the last
saved state (`train --resume`). When the host is fit again, the training moves to a launch with it.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.domain.hostfile import Host, load_hostfile
from harness.errors import EXIT_CODE, ConfigError, run_command
from harness.inputs import CommandParser, parse_int
from harness.nodes.checks import judge_all
from harness.nodes.facts import Finding, Status
from harness.nodes.survey import login_seconds, survey_hosts
from harness.units import parse_duration

_LAUNCHERS = ("mpirun", "mpiexec", "orterun")
_HOSTFILE = ("--hostfile", "-hostfile", "--machinefile", "-machinefile")
_N_RANKS = ("-np", "--np", "-n", "--n", "-c")
# By which a host that cannot train is recognized.
_CHECKS = ("resolve", "port", "login", "memory", "disk", "env", "gpu")
_PROBE_S = 30.0
_MOST_RESTARTS = 1000


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """A command of mpirun that trains.

    Attributes:
        hostfile_at, n_ranks_at: positions of the hostfile and of the number of ranks; the latter is
            None if mpirun starts a rank on every slot.
    """

    words: tuple[str, ...]
    hostfile_at: int
    n_ranks_at: int | None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        """Find the parts of a command that depend on the hosts.

        Raises:
            ConfigError: it is no training by mpirun that a later launch could continue.
        """
        if not words or Path(words[0]).name not in _LAUNCHERS:
            raise ConfigError(
                "give the command of the training: bash setup/keep_training.sh mpirun -np 5 "
                "--hostfile hosts/tesla.txt ./entry.sh train ..."
            )
        entry = next((k for k, word in enumerate(words) if Path(word).name == "entry.sh"), None)
        if entry is None or "train" not in words[entry + 1 : entry + 2]:
            raise ConfigError("the command has no `./entry.sh train`: only a training can continue")
        for flag, reason in (
            ("--save-every", "without a saved state each launch would train from the beginning"),
            ("--batch-size", "the default depends on the number of ranks, which may change"),
        ):
            if not any(word == flag or word.startswith(f"{flag}=") for word in words[entry:]):
                raise ConfigError(f"add {flag} N after `train`: {reason}")
        hostfile_at = _value_at(words[:entry], _HOSTFILE)
        if hostfile_at is None:
            raise ConfigError("add --hostfile FILE before ./entry.sh: it names the hosts to check")
        n_ranks_at = _value_at(words[:entry], _N_RANKS)
        if n_ranks_at is not None:
            parse_int(words[n_ranks_at], words[n_ranks_at - 1], at_least=1)
        return cls(words=tuple(words), hostfile_at=hostfile_at, n_ranks_at=n_ranks_at)

    @property
    def hostfile(self) -> Path:
        return Path(self.words[self.hostfile_at])

    def on(self, fit: Sequence[Host], hosts: Sequence[Host], hostfile: Path) -> list[str]:
        """The command that continues the training on those of its hosts that are in a file."""
        words = list(self.words)
        words[self.hostfile_at] = str(hostfile)
        if self.n_ranks_at is not None and all(host.slots for host in hosts):
            n, n_fit, n_all = int(words[self.n_ranks_at]), _n_slots(fit), _n_slots(hosts)
            # Ranks beyond the slots share devices, as before.
            words[self.n_ranks_at] = str(min(n_fit, n) if n <= n_all else n * n_fit // n_all)
        return words if "--resume" in words else [*words, "--resume"]


def _n_slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots or 0 for host in hosts)


def _value_at(words: Sequence[str], flags: Sequence[str]) -> int | None:
    """Position of the value of the first of some flags."""
    found = (k + 1 for k, word in enumerate(words[:-1]) if word in flags)
    return next(found, None)


def unfit(hosts: Sequence[Host], hostfile: Path) -> dict[str, Finding]:
    """The hosts that cannot train now, each with the first reason."""
    survey = survey_hosts(hosts, hostfile=hostfile, timeout_s=_PROBE_S)
    found: dict[str, Finding] = {}
    for finding in judge_all(survey, _CHECKS):
        if finding.status in (Status.CRITICAL, Status.UNKNOWN):
            found.setdefault(finding.host, finding)
    return found


class _Keeper:
    """Starts launches until one ends well."""

    def __init__(self, command: LaunchCommand, arguments: argparse.Namespace) -> None:
        self._command, self._hosts = command, load_hostfile(command.hostfile)
        self._check_every_s = login_seconds(arguments.check_every, "--check-every")
        self._wait_s = parse_duration(arguments.wait)
        self._n_left = parse_int(arguments.max_restarts, "--max-restarts", at_most=_MOST_RESTARTS)
        self._is_stopped = False
        self._launch: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Train to the end; returns the last launch's exit code."""
        signal.signal(signal.SIGTERM, self._stop)
        with tempfile.TemporaryDirectory(prefix="keep-training-") as directory:
            words, missing = list(self._command.words), list[Host]()
            while True:
                code = self._train(words, missing if self._n_left else ())
                if code == 0 or self._is_stopped:
                    return code
                if self._n_left == 0:
                    _say(f"mpirun ended with exit code {code}, and --max-restarts is reached")
                    return code
                self._n_left -= 1
                _say(f"mpirun ended with exit code {code}; checking {len(self._hosts)} hosts")
                fit, before = self._fit_hosts(), missing
                missing = [host for host in self._hosts if host not in fit]
                if not fit:
                    return code
                if code == EXIT_CODE and missing == before:
                    _say("the same launch would fail again: correct what its error names")
                    return code
                words = self._command.on(
                    fit, self._hosts, _write(fit, Path(directory) / "hosts.txt")
                )
                _say(f"starting again on {', '.join(host.name for host in fit)}: "
                     f"{shlex.join(words)}")  # fmt: skip

    def _train(self, words: Sequence[str], missing: Sequence[Host]) -> int:
        """Run a launch; end it when a missing host is fit again. Returns its exit code.

        Args:
            missing: hosts with which another launch may start.
        """
        self._launch = launch = subprocess.Popen(words)
        while True:
            try:
                return launch.wait(self._check_every_s if missing else None)
            except subprocess.TimeoutExpired:
                lost = unfit(missing, self._command.hostfile)
                back = [host.name for host in missing if host.name not in lost]
            except KeyboardInterrupt:  # mpirun has received it, too
                self._is_stopped = True
                back = []
            if back and launch.poll() is None:
                _say(f"{', '.join(back)} can train again: ending this launch to start with it")
                launch.send_signal(signal.SIGTERM)
                missing = ()

    def _fit_hosts(self) -> list[Host]:
        """The hosts that can train; waits for the first one, and is empty if none comes."""
        end_s = time.monotonic() + self._wait_s
        while True:
            lost = unfit(self._hosts, self._command.hostfile)
            for finding in lost.values():
                _say(f"{finding.host} is left out ({finding.check}): {finding.detail}")
            fit = [host for host in self._hosts if host.name not in lost]
            if fit or time.monotonic() > end_s:
                return fit
            _say(f"no host can train; checking again in {self._check_every_s:g} s")
            time.sleep(self._check_every_s)

    def _stop(self, *_: object) -> None:
        self._is_stopped = True
        if self._launch is None or self._launch.poll() is not None:
            raise SystemExit(128 + signal.SIGTERM)
        self._launch.send_signal(signal.SIGTERM)


def _write(hosts: Sequence[Host], path: Path) -> Path:
    lines = (f"{h.name}{'' if h.slots is None else f' slots={h.slots}'}\n" for h in hosts)
    path.write_text("".join(lines))
    return path


def _say(message: str) -> None:
    print(f"keep_training: {message}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="setup/keep_training.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a training under mpirun, and start it again when it fails, such as after\n"
        "the loss of a host. Each new launch takes the hosts of the hostfile that are fit\n"
        "(setup/check_nodes.sh), and continues from the last saved state. When a host is fit\n"
        "again, the training is ended and continues with it.",
        epilog="example:\n"
        "  bash setup/keep_training.sh mpirun -np 5 --hostfile hosts/tesla.txt \\\n"
        "    ./entry.sh train --model vgg16 --strategy searched --batch-size 160 --epochs 90 \\\n"
        "    --save-every 100\n\n"
        "exit code: that of the last launch. If `train` refuses the command, or all runs that\n"
        "failed are invalid, the launch is not repeated",
    )
    parser.add_argument(
        "--max-restarts", default="10", metavar="N", help="number of launches after the first "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--check-every", default="60s", metavar="TIME", help="how often hosts that were left out "
        "are checked again (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--wait", default="10min", metavar="TIME", help="how long to wait while no host is fit "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="mpirun ...", help="the training"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Keep a training running; returns the exit code."""

    def run() -> int:
        arguments = _parser().parse_args(argv)
        return _Keeper(LaunchCommand.parse(arguments.command), arguments).run()

    return run_command("keep_training", run)


if __name__ == "__main__":
    sys.exit(main())
