"""The command line of a rank's program: workloads with their flags, and what a dry run prints."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from harness.errors import ConfigError, printing
from harness.inputs import parse_flags, refuse_old_spelling

if TYPE_CHECKING:
    from harness.workloads.common.flags import RunOptions


class Parsed(NamedTuple):
    """A part of a command line: a workload, or the comparison with an empty name.

    Attributes:
        options: a RunOptions, equal in all parts.
    """

    name: str
    config: Any
    options: Any


# Of the classes of flags, whose names otherwise say what they are about.
_ENDINGS = re.compile("(Flags|Config|Settings)$")

_USAGE = """\
usage: entry.sh [WORKLOAD] [FLAGS]      one process per rank, started by mpirun, srun or torchrun

  mpirun -np 5 --hostfile hosts/tesla.txt ./entry.sh            all workloads, then a report
  mpirun -np 5 --hostfile hosts/tesla.txt ./entry.sh --model gpt2 --batch-size 40    for GPT-2
  mpirun -np 5 --hostfile hosts/tesla.txt ./entry.sh matmul     one workload
  ./entry.sh train --model resnet18 --steps 20                  one rank, on this machine
  ./entry.sh links + train --strategy ddp + train --freeze schedule    three workloads in turn

workloads:
{workloads}

`entry.sh control RUN --strategy FILE` moves a run of `train --controlled` to another strategy.
`entry.sh WORKLOAD --help` lists a workload's flags with their defaults. Without a workload, all
workloads run and compare training strategies for --model at the global batch --batch-size in
--dtype; each of these flags has a default. The flags that all workloads share are accepted too:
--results, --resume, --dry-run, --run-timeout-s, --collective-timeout-s and --heartbeat-timeout-s.
In a launch of several workloads (`+`) such a flag, given once, holds for all.
Draw figures and the report from results with: python -m harness.plot results/

exit codes: 0 every run is ok or out of memory (of those with --save-every: ok), 1 a run failed and
  no other run completed it, 2 bad input, 130 interrupted (under mpirun 1)
"""


def _config_of(name: str) -> tuple[type, Mapping[str, str]]:
    """The configuration of a workload, or of the comparison, and its renamed flags."""
    if not name:
        from harness.workloads.comparison import ComparisonConfig  # imports all workloads

        return ComparisonConfig, {}
    from harness.workloads import load_workload

    workload = load_workload(name)
    return workload.config, workload.renamed


def _groups_of(kind: Any) -> list[tuple[str, type]]:
    """The flags of a configuration by the class that declares them, each part as a dataclass under
    its title in --help."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    hints = get_type_hints(kind, include_extras=True)
    parts = defaultdict[str, list[tuple[str, Any, Any]]](list)
    docs: dict[str, str | None] = {}
    for base in kind.__mro__:
        title = _ENDINGS.sub("", base.__name__).lower()
        docs.setdefault(title, base.__doc__)
        declared = [name for name in vars(base).get("__annotations__", {}) if name in known]
        parts[title] += [(name, hints[name], copy(known.pop(name))) for name in declared]
    return [
        (title, dataclasses.make_dataclass(title, own, namespace={"__doc__": docs[title]}))
        for title, own in parts.items()
        if own
    ]


def _parse(argv: list[str]) -> Parsed:
    from harness.workloads import WORKLOADS

    is_named = bool(argv) and not argv[0].startswith("-")
    if argv[:1] in (["-h"], ["--help"]):
        lines = [f"  {name:<10}{summary}" for name, summary in WORKLOADS.items()]
        print(_USAGE.format(workloads="\n".join(lines)))
        raise SystemExit(0)
    if is_named and argv[0] not in WORKLOADS:
        raise ConfigError(
            f"there is no workload {argv[0]!r}: choose one of {', '.join(WORKLOADS)}, or see "
            "entry.sh --help"
        )

    import tyro

    from harness.workloads.common.flags import (  # imports torch: takes seconds
        RunOptions,
        flag,
        prepare_help,
    )

    prepare_help(RunOptions)
    name, *rest = argv if is_named else ["", *argv]
    kind, renamed = _config_of(name)
    refuse_old_spelling(rest, renamed)
    prepare_help(kind)
    groups = [*_groups_of(kind), ("run", RunOptions)]
    command = dataclasses.make_dataclass("Command", groups, frozen=True)
    flat = tyro.conf.configure(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)(command)
    program = f"entry.sh {name}".strip()
    parsed = parse_flags(flat, rest, program, description=WORKLOADS.get(name, ""))
    given = {k: v for title, _ in groups[:-1] for k, v in vars(getattr(parsed, title)).items()}
    for field, value in given.items():
        if value == () and flag(field) in rest:
            raise ConfigError(f"{flag(field)} has no value: give one or more, or drop it")
    return Parsed(name, kind(**given), parsed.run)


@printing()
def parse_all(argv: list[str]) -> list[Parsed]:
    """Parse workloads that are separated by `+`; a flag of the launch holds for all of them."""
    words = [list(part) for is_plus, part in groupby(argv, "+".__eq__) if not is_plus] or [[]]
    parsed = [_parse(part) for part in words]
    options = _shared_options(parsed, words)
    return [part._replace(options=options) for part in parsed]


def _shared_options(parsed: Sequence[Parsed], words: Sequence[Sequence[str]]) -> RunOptions:
    """Options of the launch, each given by one part or alike by several.

    Raises:
        ConfigError: two parts give a flag different values.
    """
    from harness.workloads.common.flags import flag

    given: dict[str, tuple[str, Any]] = {}
    for part, own in zip(parsed, words, strict=True):
        flags = {word.partition("=")[0].replace("_", "-") for word in own}
        for field in dataclasses.fields(part.options):
            if flag(field.name) not in flags:
                continue
            mine = part.name or "the comparison", getattr(part.options, field.name)
            first = given.setdefault(field.name, mine)
            if first[1] != mine[1]:
                raise ConfigError(
                    f"{flag(field.name)} is {first[1]} for {first[0]} and {mine[1]} for {mine[0]}, "
                    "which run in one launch: give it once"
                )
    changed: dict[str, Any] = {name: value for name, (_, value) in given.items()}
    shared: RunOptions = replace(parsed[0].options, **changed)
    return shared


def _changed_flags(config: Any, swept: Sequence[str] = ()) -> str:
    """Model and strategy, then the other flags that are swept or differ from their defaults, as
    text."""
    defaults = type(config)()
    names = [field.name for field in dataclasses.fields(config)]
    shown: list[str] = [name for name in ("model", "strategy") if name in names]
    is_told = {n: n in swept or getattr(config, n) != getattr(defaults, n) for n in names}
    shown += [name for name in names if name not in shown and is_told[name]]
    return " ".join(f"{name}={getattr(config, name)}" for name in shown) or "(defaults)"


def _found_before(cases: list[Any], options: RunOptions, n_ranks: int) -> list[str]:
    """What --resume finds of each run, as text; empty: the run is made from its beginning.

    Runs of as many ranks count whose first is on this host: a dry run does not ask the others.
    """
    import msgspec

    from harness.cases import describe_cluster, finished_repeats, plan_runs, remaining_repeats
    from harness.domain.run import RankInfo, RunHeader, run_key
    from harness.resume import check_batches, find_resumed
    from harness.runtime.ranks.host import read_settings

    host = platform.node()
    info = RankInfo(
        rank=0, hostname=host, device="", device_kind="", n_cores=0, memory_bytes=1,
        settings=read_settings(os.environ),
    )  # fmt: skip
    ranks = [msgspec.structs.replace(info, rank=k) for k in range(n_ranks)]
    planned = plan_runs(cases, ranks)
    check_batches(planned, options.results, n_ranks)
    done: dict[str, list[RunHeader]] = {}
    for header in chain.from_iterable(finished_repeats(options.results, ranks).values()):
        if [info.hostname for info in header.ranks[:1]] == [host]:
            cluster = describe_cluster(ranks[: len(header.ranks)])
            done.setdefault(run_key(header.workload, header.config, cluster), []).append(header)
    texts = []
    for plan, repeat in zip(planned, remaining_repeats(planned, done), strict=True):
        if repeat is None:
            texts.append(f"is done: {done[plan.key][plan.repeat].run_id}")
            continue
        found = find_resumed(options.results, replace(plan, repeat=repeat), planned, n_ranks)
        if isinstance(found, RunHeader):
            texts.append(f"is done: {found.run_id}")
        else:
            texts.append(f"would go on from step {found.step} of {found.run_id}" if found else "")
    return texts


@printing()
def print_dry_run(cases: list[Any], options: RunOptions, n_ranks: int) -> None:
    """Print every run in order, each after the needs that no earlier run meets."""
    from harness.cases import adjacent_cases, case_of, needs_of, swept_flags

    swept = swept_flags(cases)
    made = {case.name for case in cases if case.name != "train"}
    before = _found_before(cases, options, n_ranks) if options.resume else [""] * len(cases)
    for adjacent in adjacent_cases(cases):
        for need in needs_of([cases[at] for at in adjacent if not before[at].startswith("is")]):
            if need.name not in made:
                made.add(need.name)
                place = f"[{adjacent[0] + 1}/{len(cases)}]"
                needed = case_of(need.name, need.config)
                print(
                    f"{place} before it, where missing: {need.name} {_changed_flags(needed.config)}"
                )
        for at in adjacent:
            found = f" {before[at] or 'would run'};" if options.resume else ""
            flags = _changed_flags(cases[at].config, swept[at])
            print(f"[{at + 1}/{len(cases)}] {cases[at].name}{found} {flags}")
