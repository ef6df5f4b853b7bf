"""A rank's program: parse the command line, join the other ranks, run the cases, print tables.

entry.sh starts it once per rank; without a launcher it is the only rank.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from harness import errors
from harness.errors import EXIT_CODE, ConfigError, HarnessError, PeerError, first_line
from harness.inputs import refuse_old_spelling
from harness.runtime.agent import SEE_OUTPUT
from harness.runtime.agent.wire import Channel
from harness.runtime.ranks.environment import Launch, read_launch
from harness.runtime.ranks.introduction import introduce, read_limit_s
from harness.runtime.ranks.isolate import start_fork_server

_log = logging.getLogger("harness")

# Signals within this time of each other count as one.
_ONE_SIGNAL_S = 1.0

# Imported when first used, which would cost each run seconds.
_LAZY = ["torch._dynamo", "harness.plan.simulate.lowering", "harness.runtime.executor.engine"]

_USAGE = """\
usage: entry.sh [WORKLOAD] [FLAGS]      one process per rank, started by mpirun, srun or torchrun

  mpirun -np 5 --hostfile hosts/tesla.txt ./entry.sh            all workloads, then a report
  mpirun -np 5 --hostfile hosts/tesla.txt ./entry.sh matmul     one workload
  ./entry.sh train --model resnet18 --steps 20                  one rank, on this machine
  ./entry.sh links + train --strategy ddp + train --freeze schedule    one after another

workloads:
{workloads}

`entry.sh control RUN --strategy FILE` moves a run of `train --controlled` to another strategy.
`entry.sh WORKLOAD --help` lists a workload's flags with their defaults. Without a workload, the
comparison of training strategies runs; it accepts the flags that all workloads share: --results,
--resume, --dry-run, --run-timeout-s, --collective-timeout-s and --heartbeat-timeout-s.
Draw figures and the report from results with: python -m harness.plot results/

exit codes: 0 every run is ok or out of memory, 1 a run failed, 2 bad input, 130 interrupted
"""


def _usage() -> str:
    from harness.workloads import WORKLOADS

    lines = [f"  {name:<10}{summary}" for name, summary in WORKLOADS.items()]
    return _USAGE.format(workloads="\n".join(lines))


def _parse(argv: list[str]) -> tuple[str, Any, Any]:
    """Return the workload's name (empty: the comparison), its configuration and RunOptions."""
    from harness.workloads import WORKLOADS, load_workload

    is_named = bool(argv) and not argv[0].startswith("-")
    if argv[:1] in (["-h"], ["--help"]):
        print(_usage())
        raise SystemExit(0)
    if is_named and argv[0] not in WORKLOADS:
        print(f"there is no workload {argv[0]!r}\n\n{_usage()}", file=sys.stderr)
        raise SystemExit(EXIT_CODE)

    import tyro

    from harness.workloads.common.flags import RunOptions  # imports torch, which takes seconds
    from harness.workloads.common.help import prepare_help

    prepare_help(RunOptions)
    if not is_named:
        options = tyro.cli(
            RunOptions, args=argv, prog="entry.sh", config=(tyro.conf.FlagCreatePairsOff,)
        )
        return "", None, options
    name, *rest = argv
    workload = load_workload(name)
    refuse_old_spelling(rest, workload.renamed)
    prepare_help(workload.config)
    command = dataclasses.make_dataclass(
        "Command", [("workload", workload.config), ("run", RunOptions)], frozen=True
    )
    flat = tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)(command)
    parsed: Any = tyro.cli(flat, args=rest, prog=f"entry.sh {name}", description=WORKLOADS[name])
    return name, parsed.workload, parsed.run


def _parse_all(argv: list[str]) -> list[tuple[str, Any, Any]]:
    """Parse workloads that are separated by `+`; they share their RunOptions."""
    words = [list(part) for is_plus, part in groupby(argv, "+".__eq__) if not is_plus] or [[]]
    parsed = [_parse(part) for part in words]

    from harness.workloads.common.flags import flag

    for other in parsed[1:]:
        for field in dataclasses.fields(other[2]):
            one, two = (getattr(options, field.name) for options in (parsed[0][2], other[2]))
            if one != two:
                first, second = (name or "the comparison" for name in (parsed[0][0], other[0]))
                raise ConfigError(
                    f"{flag(field.name)} is {one} for {first} and {two} for {second}, which run in "
                    "one launch: give both the same"
                )
    return parsed


def _cases(name: str, config: Any, launch: Launch, *, has_gpu: bool) -> list[Any]:
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
        for one, part in comparison(has_gpu=has_gpu, n_ranks=launch.size)
        for case in load_workload(one).cases(part, launch.size)
    ]


def _changed_flags(config: Any) -> str:
    """The flags that differ from their defaults, as text."""
    defaults = type(config)()
    names = [field.name for field in dataclasses.fields(config)]
    changed = [n for n in names if getattr(config, n) != getattr(defaults, n)]
    return " ".join(f"{name}={getattr(config, name)}" for name in changed) or "(defaults)"


def _print_dry_run(cases: list[Any]) -> None:
    """Print every run in order, each after the needs that no earlier run meets."""
    from harness.cases import adjacent_cases, case_of, needs_of

    made = {case.name for case in cases if case.name != "train"}
    for adjacent in adjacent_cases(cases):
        for need in needs_of([cases[at] for at in adjacent]):
            if need.name not in made:
                made.add(need.name)
                place = f"[{adjacent[0] + 1}/{len(cases)}]"
                needed = case_of(need.name, need.config)
                print(
                    f"{place} before it, where missing: {need.name} {_changed_flags(needed.config)}"
                )
        for at in adjacent:
            print(f"[{at + 1}/{len(cases)}] {cases[at].name} {_changed_flags(cases[at].config)}")


def _print_tables(runs: list[Any]) -> None:
    from harness.measure.derive.devices import unpublished_peaks
    from harness.measure.derive.doubts import stolen_warnings
    from harness.workloads import WORKLOADS, load_workload

    for name in dict.fromkeys(run.header.workload for run in runs):
        found = [run for run in runs if run.header.workload == name]
        table = load_workload(name).table(found)
        print(f"\n{name}: {WORKLOADS[name]}\n{table}", flush=True)
        for warning in stolen_warnings(found):
            print(f"warning: {warning}", flush=True)
    for line in unpublished_peaks(runs):
        print(f"note: {line}", flush=True)


def _print_advice(results: Path, config: Any) -> None:
    """Say which machines to use, from the files that the comparison has measured."""
    words = ["advise", str(results), "--model", config.model, "--dtype", config.dtype]
    words += ["--batch-size", str(config.batch), "--optimizer", "momentum"]
    print("\nwhich machines to use (python -m harness.plan advise):", flush=True)
    command = [sys.executable, "-m", "harness.plan", *words]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL)


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
    from harness.runtime.models import may_import_torchvision
    from harness.workloads import workload_module

    modules = ["torch", "torch.distributed", "harness.run"]
    names = {case.name for case in cases}
    if names & {"search", "train"}:  # they may need runs of these
        names |= {"profile", "search"}
    modules += [workload_module(name) for name in sorted(names)]
    if names & {"profile", "search", "train"}:
        modules += _LAZY
    models = {getattr(case.config, "model", "") for case in cases} - {""}
    if any(may_import_torchvision(model) for model in models):
        modules.append("harness.runtime.models.preload_torchvision")
    return modules


def _work(
    name: str,
    options: Any,
    cases: list[Any],
    launch: Launch,
    argv: list[str],
    channel: Channel,
    comm: Any,
) -> int:
    if any(case.workload.is_isolated for case in cases):
        start_fork_server(_preloaded(cases))

    from harness.launch import Launcher, SweepEnded
    from harness.runtime.ranks.rendezvous import meet

    limit_s = min(options.heartbeat_timeout_s, options.run_timeout_s)
    meeting = meet(launch, os.environ, heartbeat_timeout_s=limit_s, channel=channel, comm=comm)
    world = meeting.world
    _log.info(
        "%d ranks on %d hosts by %s: %s, %s, %s because %s",
        world.size, len(set(world.hostnames)), launch.launcher, world.device_kind,
        world.interface, world.backend, world.backend_reason,
    )  # fmt: skip
    launcher = Launcher(meeting, options, ["./entry.sh", *argv])
    if not name:  # all ranks must choose the same model, so it depends on the devices of all
        has_gpus = all(info.device.startswith("cuda") for info in launcher.ranks)
        # Ranks that share a GPU communicate by gloo; the GPU model would take them hours.
        cases = _cases(name, None, launch, has_gpu=has_gpus and world.backend == "nccl")
    if problem := launcher.problem(cases):
        meeting.leave()
        if world.is_first:
            raise HarnessError(problem)
        return 0
    ended: SweepEnded | None = None
    try:
        headers = launcher.run_cases(cases)
    except SweepEnded as error:
        ended, headers = error, error.headers
    if world.is_first:
        runs = launcher.read(headers)
        try:
            _print_tables(runs)
        except OSError:  # its reader has gone (`| head`), or its disk is full
            errors.drop_output()
        if not name:
            # In a process of its own, so that a failure costs no results.
            command = [sys.executable, "-m", "harness.plot", str(options.results)]
            subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
            if world.size > 1 and not ended:
                _print_advice(options.results, next(c.config for c in cases if c.name == "train"))
    meeting.leave()
    if ended and world.is_first:
        raise ended
    is_failed = any(header.status not in ("ok", "oom") for header in headers)
    return int(world.is_first and is_failed)


@contextlib.contextmanager
def _silent(is_silent: bool) -> Iterator[None]:
    """Discard output: all ranks parse the same command line, and rank 0 prints its errors."""
    if not is_silent:
        yield
        return
    with (
        open(os.devnull, "w") as null,
        contextlib.redirect_stdout(null),
        contextlib.redirect_stderr(null),
    ):
        yield


def _agree(failure: BaseException | None, comm: Any, channel: Channel, launch: Launch) -> bool:
    """Whether every rank has parsed the command line; if not, end the launch on all ranks.

    Raises:
        BaseException: the failure of rank 0, on rank 0; without one there, another rank's.
    """
    mine = "" if failure is None else str(failure) or type(failure).__name__
    failures = [mine] if comm is None else comm.allgather(mine)
    if not any(failures):
        return True
    channel.leave()
    if comm is not None:  # at exit, mpi4py would abort because of rank 0's exit code
        from mpi4py import MPI

        MPI.Finalize()
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
    _handle_signals()
    comm = None
    if channel.has_agent:
        comm = introduce(launch, os.environ, channel, read_limit_s(argv))
    failure: BaseException | None = None
    try:
        with _silent(launch.rank != 0):
            parsed = _parse_all(argv)
            name, _, options = parsed[0]

            import torch

            from harness.cases import check_files

            cases = []
            for workload, config, _ in parsed:
                options.check(config)
                cases += _cases(workload, config, launch, has_gpu=torch.cuda.is_available())
            if options.dry_run and launch.rank == 0:  # a launch checks them when the ranks have met
                check_files(cases)
    except (SystemExit, HarnessError) as error:
        if isinstance(error, SystemExit) and error.code not in (0, EXIT_CODE):
            raise  # not the parser's, but of a module that was imported
        failure = error
    if not _agree(failure, comm, channel, launch):
        return 0
    if options.dry_run:
        if launch.rank == 0:
            _print_dry_run(cases)
        return 0
    return _work(name, options, cases, launch, argv, channel, comm)


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
    sys.exit(code)  # by which mpi4py aborts the other ranks


if __name__ == "__main__":
    _exit(_run())
