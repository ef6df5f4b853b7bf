"""A rank's program: parse the command line, join the other ranks, run the cases, print tables.

entry.sh starts it once per rank; without a launcher it is the only rank.
"""

from __future__ import annotations

import gc
import os
import signal

if __name__ == "__main__":  # the imports below take seconds, and Ctrl-C would show a traceback

    def _leave(number: int, frame: object) -> None:
        try:
            os.write(2, b"interrupted\n")
        finally:
            os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked by the agent
    gc.disable()  # until `_work`: modules stay, and looking for garbage among them takes a second

import atexit
import contextlib
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness import errors
from harness.command_line import Parsed, parse_all, print_dry_run
from harness.domain.run import RankInfo
from harness.errors import EXIT_CODE, ConfigError, HarnessError, PeerError, first_line
from harness.inputs import shorten
from harness.runtime.agent import SEE_OUTPUT
from harness.runtime.agent.wire import Channel
from harness.runtime.ranks.environment import (
    Launch,
    is_first_on_host,
    leave_warnings_to_rank_0,
    read_launch,
)
from harness.runtime.ranks.introduction import introduce, read_limit_s
from harness.runtime.ranks.isolate import begin_collecting, start_fork_server, wait_for_fork_server

if TYPE_CHECKING:
    from harness.runtime.ranks.rendezvous import Meeting

_log = logging.getLogger("harness")

_NVIDIA = Path("/dev/nvidiactl")
# Signals within this time of each other count as one.
_ONE_SIGNAL_S = 1.0
# Imported when first used, which would cost each run seconds.
_LAZY = ["torch._dynamo", "harness.plan.simulate.lowering", "harness.runtime.executor.engine"]


def _cases(name: str, config: Any, launch: Launch, gpus: Sequence[RankInfo] | None) -> list[Any]:
    from harness.cases import Case
    from harness.workloads import load_workload
    from harness.workloads.comparison import comparison

    if name:
        workload = load_workload(name)
        return [
            Case(name=name, workload=workload, config=one)
            for one in workload.cases(config, launch.size)
        ]
    return [
        Case(name=one, workload=load_workload(one), config=case)
        for one, part in comparison(config, gpus=gpus, n_ranks=launch.size)
        for case in load_workload(one).cases(part, launch.size)
    ]


def _print_tables(runs: list[Any]) -> None:
    from harness.measure.derive.devices import unpublished_peaks
    from harness.measure.derive.doubts import stolen_shares, stolen_warnings
    from harness.workloads import WORKLOADS, load_workload

    for name in dict.fromkeys(run.header.workload for run in runs):
        found = [run for run in runs if run.header.workload == name]
        table = load_workload(name).table(found)
        print(f"\n{name}: {WORKLOADS[name]}\n{table}", flush=True)
        for warning in stolen_warnings((run, stolen_shares(run)) for run in found):
            print(f"warning: {warning}", flush=True)
    for line in unpublished_peaks(runs):
        print(f"note: {line}", flush=True)


def _print_results(runs: list[Any], results: Path, *, has_report: bool) -> None:
    """Print tables and the place of the results, with the command that draws them unless the launch
    itself makes the report."""
    try:
        _print_tables(runs)
        if runs and not has_report:
            # To the tables' stream: mpirun would write a line of another one into their midst.
            path = shlex.quote(str(results))
            print(f"\nresults are in {path}; python -m harness.plot {path} draws them", flush=True)
    except OSError as error:
        errors.drop_output()
        if not isinstance(error, BrokenPipeError):  # whose reader has read enough (`| head`)
            _log.warning("tables cannot be written (%s): results are in %s", error, results)


def _run_after(module: str, *words: str) -> None:
    """Run a program of the harness in a process of its own, so that a failure costs no results."""
    subprocess.run([sys.executable, "-m", module, *words], check=False, stdin=subprocess.DEVNULL)


def _print_advice(results: Path, config: Any) -> None:
    """Say which machines to use, from the files that the comparison has measured."""
    words = ["--model", config.model, "--dtype", config.dtype, "--batch-size", str(config.batch)]
    print("\nwhich machines to use (python -m harness.plan advise):", flush=True)
    _run_after("harness.plan", "advise", str(results), *words)


def _handle_signals() -> None:
    """Raise KeyboardInterrupt at SIGINT and SIGTERM, once if launcher and agent both send one."""
    raised_s = float("-inf")

    def interrupt(signum: int, frame: object) -> None:
        nonlocal raised_s
        if (now_s := time.monotonic()) - raised_s > _ONE_SIGNAL_S:
            raised_s = now_s
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _preloaded(cases: list[Any]) -> list[str]:
    """Modules that the fork server imports once for the processes of all runs."""
    from harness.runtime.models import preloads_of
    from harness.workloads import workload_module

    names = {case.name for case in cases}
    if names & {"search", "train"}:  # they may need runs of these
        names |= {"profile", "search"}
    modules = [workload_module(name) for name in sorted(names)]
    if names & {"profile", "search", "train"}:
        modules += _LAZY
    models = {getattr(case.config, "model", "") for case in cases} - {""}
    return modules + sorted({module for model in models for module in preloads_of(model)})


def _work(
    parsed: Sequence[Parsed],
    cases: list[Any],
    launch: Launch,
    argv: list[str],
    channel: Channel,
    comm: Any,
) -> int:
    from harness.cases import exit_code
    from harness.launch import Launcher, SweepEnded
    from harness.runtime.ranks.rendezvous import meet

    _handle_signals()
    begin_collecting()
    name, config, options = parsed[0]
    limit_s = min(options.heartbeat_timeout_s, options.run_timeout_s)
    meeting = meet(launch, os.environ, heartbeat_timeout_s=limit_s, channel=channel, comm=comm)
    world = meeting.world
    flags = meeting.control.gather("flags", _flags(parsed), list[str]) if comm is None else []
    if differing := _differing(flags):
        return _leave_by(meeting, ConfigError(differing))
    _log.info(
        "ranks: %d, hosts: %d, launcher: %s; %s, %s, %s because %s",
        world.size, len(set(world.hostnames)), launch.launcher, world.device_kind,
        world.interface, world.backend, world.backend_reason,
    )  # fmt: skip
    if any(case.workload.is_isolated for case in cases):
        wait_for_fork_server()
    launcher = Launcher(meeting, options, ["./entry.sh", *argv])
    if not name:  # all ranks must choose the same model, so it depends on the devices of all
        has_gpus = all(info.device.startswith("cuda") for info in launcher.ranks)
        # Ranks that share a GPU communicate by gloo; the GPU model would take them hours.
        own = launcher.ranks if has_gpus and world.backend == "nccl" else None
        cases = _cases(name, config, launch, own)
    if problem := launcher.problem(cases):
        return _leave_by(meeting, HarnessError(problem))
    ended: SweepEnded | None = None
    try:
        headers = launcher.run_cases(cases)
    except SweepEnded as error:
        ended, headers = error, error.headers
    if world.is_first:
        _print_results(launcher.read(headers), options.results, has_report=not name)
        if not name:
            _run_after("harness.plot", str(options.results))
            if world.size > 1 and not ended:
                _print_advice(options.results, next(c.config for c in cases if c.name == "train"))
    if ended:
        return _leave_by(meeting, ended)
    meeting.leave()
    return exit_code(headers) if world.is_first else 0


def _leave_by(meeting: Meeting, error: HarnessError) -> int:
    """End this rank without a result; the first one says why."""
    meeting.leave()
    if meeting.world.is_first:
        raise error
    return 0


@contextlib.contextmanager
def _silent(is_silent: bool) -> Iterator[None]:
    """Discard output: all ranks parse the same command line, and rank 0 prints its errors."""
    with contextlib.ExitStack() as stack:
        if is_silent:
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
        yield


def _read(argv: list[str], launch: Launch) -> tuple[list[Parsed], list[Any]]:
    """Parse the command line and make its cases; starts the fork server if they need it."""
    cases: list[Any] = []
    with _silent(launch.rank != 0):
        parsed = parse_all(argv)
        options = parsed[0].options

        import torch

        from harness.cases import check_dry_run

        # CUDA must not be initialized before the fork; `_work` makes the comparison's cases.
        has_gpu = torch.cuda.is_available() if options.dry_run else _NVIDIA.exists()
        for workload, config, _ in parsed:
            options.check(config)
            cases += _cases(workload, config, launch, [] if has_gpu else None)
        if options.dry_run and launch.rank == 0:  # a launch checks them when the ranks have met
            check_dry_run(cases, options.results)
    if not options.dry_run:
        import harness.launch  # noqa: F401 (before the fork, because children need its modules)

        if any(case.workload.is_isolated for case in cases):
            start_fork_server(_preloaded(cases))
    return parsed, cases


def _is_refusal(failure: BaseException) -> bool:
    """Whether the command line is refused or explained; other errors are of a module's import."""
    if isinstance(failure, SystemExit):
        return failure.code in (0, EXIT_CODE)
    return isinstance(failure, HarnessError)


def _flags(parsed: Sequence[Parsed]) -> list[str]:
    """All flags of a command line; paths may differ between hosts, so their values are left out."""
    return [
        f"{name} {flag} {'PATH' if isinstance(value, Path) else shorten(value)}".strip()
        for name, *parts in parsed
        for part in parts
        if part is not None
        for field, value in vars(part).items()
        for flag in [f"--{field.replace('_', '-')}"]
    ]


def _differing(flags: Sequence[Sequence[str]]) -> str:
    """Names the first flag that a rank has otherwise than rank 0; empty if they are alike."""
    for rank, given in enumerate(flags):
        for first, mine in zip_longest(flags[0], given, fillvalue="no such workload"):
            if first != mine:
                return f"rank 0 has {first}, rank {rank} {mine}: start all with the same flags"
    return ""


def _agree(
    failure: BaseException | None,
    flags: list[str],
    comm: Any,
    channel: Channel,
    launch: Launch,
) -> bool:
    """Whether every rank has parsed the same flags; if not, end the launch on all ranks.

    Raises:
        BaseException: the failure of rank 0, on rank 0; without one there, another rank's. Without
            MPI each rank's own, in words on one rank of each host.
    """
    mine = "" if failure is None else str(failure) or type(failure).__name__
    failures = [mine] if comm is None else comm.allgather(mine)
    differing = "" if comm is None or any(failures) else _differing(comm.allgather(flags))
    if not any(failures) and not differing:
        return True
    channel.leave()
    if comm is not None:  # at exit, mpi4py would abort because of rank 0's exit code
        from mpi4py import MPI

        MPI.Finalize()
    if failure is not None and launch.rank != 0 and not launch.has_mpi:
        is_said = is_first_on_host(os.environ) or isinstance(failure, SystemExit)
        raise failure if is_said else SystemExit(EXIT_CODE)  # rank 0 does not hear of it
    if launch.rank == 0 and differing:
        raise ConfigError(differing)
    if launch.rank == 0:
        rank, text = next((k, text) for k, text in enumerate(failures) if text)
        raise failure or ConfigError(f"rank {rank} refuses the command line: {text}")
    return False


def main(argv: list[str], channel: Channel | None = None) -> int:
    """Run this rank's program; returns its exit code.

    Args:
        channel: to this rank's agent; None without one.
    """
    channel = channel or Channel(None)
    if argv[:1] == ["control"]:
        from harness.workloads.train.requests import main as control

        return control(argv[1:])
    launch = read_launch(os.environ)
    logging.basicConfig(
        level=logging.INFO if launch.rank == 0 else logging.WARNING,
        format=f"%(asctime)s rank {launch.rank} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    leave_warnings_to_rank_0(launch.rank)
    parsed: list[Parsed] = []
    cases: list[Any] = []
    failure: BaseException | None = None
    try:
        parsed, cases = _read(argv, launch)
    except BaseException as error:
        failure = error
    # After a failure too, so that rank 0's agent hears of it.
    comm = introduce(launch, os.environ, channel, read_limit_s(argv)) if channel.has_agent else None
    if failure is not None and not _is_refusal(failure):
        raise failure
    if not _agree(failure, _flags(parsed), comm, channel, launch):
        return 0
    options = parsed[0].options
    if options.dry_run:
        channel.leave()
        if launch.rank == 0:
            print_dry_run(cases, options, launch.size)
        return 0
    return _work(parsed, cases, launch, argv, channel, comm)


def _run() -> int:
    """Run `main`; report an error to the agent, which writes a row if no run is open."""
    channel = Channel.from_environment()
    errors.replace_unprintable()
    try:
        code = main(sys.argv[1:], channel)
        channel.leave()
        return code
    except HarnessError as error:
        with contextlib.suppress(OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        channel.fail(EXIT_CODE, str(error), is_secondary=isinstance(error, PeerError))
        return EXIT_CODE
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit) as error:
        left = error.code if isinstance(error, SystemExit) else 1
        found = f"{type(error).__name__}: {first_line(error)}; {SEE_OUTPUT}"
        channel.fail(left if isinstance(left, int) else int(left is not None), found)
        raise


def _exit(code: int) -> NoReturn:
    """End this process; after success without freeing its modules, which takes torch a second."""
    with contextlib.suppress(OSError):  # the interpreter's own end reports it
        errors.flush_output()
        if code == 0:
            mpi = sys.modules.get("mpi4py.MPI")
            if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
                mpi.Finalize()
            atexit._run_exitfuncs()
            os._exit(0)
    sys.exit(code)


if __name__ == "__main__":
    try:
        _exit(_run())
    except BaseException as error:
        if "mpi4py.MPI" in sys.modules:
            from mpi4py.run import set_abort_status

            set_abort_status(error)  # aborts the other ranks when this process exits
        raise
