"""Reasons to doubt numbers, and the processor time that other guests took."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

import numpy as np

from harness.domain.run import Headed, RunHeader
from harness.measure.derive.devices import info_of
from harness.measure.derive.spans import samples_of
from harness.measure.store import Run


class DoubtKind(StrEnum):
    """Kinds of doubt, in the report's words and order."""

    FAILED = "Runs that are not ok"
    TRAINING = "Not the training of one device"
    SPREAD = "Samples are few or vary"
    OUTLIERS = "Outlier steps"
    STRAGGLER = "Stragglers"
    STOLEN = "Processor time taken by other guests"
    PEAK = "Measured peak too low"
    MFU = "MFU above 1"
    TRAFFIC = "More traffic than predicted"
    LINKS = "Links disturbed or measured too low"
    LEFT_OUT = "Measurements left out"
    VERSIONS = "Versions or settings differ between runs"


class Doubt(NamedTuple):
    """One reason to doubt the numbers of a run."""

    kind: DoubtKind
    text: str


_OUTLIER_EFFECT = 1.1
Step = TypeVar("Step")


def outliers(times: Mapping[Step, float]) -> tuple[Step, ...]:
    """Steps above the far fence (third quartile + 3 interquartile ranges) and 1.1 medians.

    Source: Tukey, Exploratory Data Analysis, chapter 2; the factor spares steady runs warnings.
    """
    if len(times) < 4:
        return ()
    first, median, third = np.percentile(list(times.values()), [25, 50, 75])
    fence = max(third + 3 * (third - first), _OUTLIER_EFFECT * median)
    return tuple(step for step, time in times.items() if time > fence)


def outlier_doubts(steps: Sequence[int], unit: str) -> list[Doubt]:
    """A doubt where there are outliers."""
    n = len(steps)
    text = f"{n} {unit}{'s' if n > 1 else ''} far above the others"
    return [Doubt(DoubtKind.OUTLIERS, text)] if n else []


# Above this share a step is longer by more than the usual difference between repeats.
_TOLERATED = 0.02


def stolen_shares(run: Run) -> dict[str, float]:
    """Share of each host's processor time that the hypervisor gave to other guests."""
    shares: dict[str, float] = {}
    for rank, records in run.ranks.items():
        host = info_of(run, rank).hostname
        for sample in samples_of(records, "cpu_stolen_share"):
            shares[host] = max(sample.value, shares.get(host, 0.0))
    return shares


def stolen_warnings(shares_of_runs: Iterable[tuple[Headed, Mapping[str, float]]]) -> list[str]:
    """One line if a hypervisor disturbed any run that is ok; names the worst.

    Args:
        shares_of_runs: each run with its `stolen_shares`.
    """
    known = [
        (max(shares.items(), key=lambda item: item[1]), run.header.run_id)
        for run, shares in shares_of_runs
        if run.header.status == "ok" and shares
    ]
    disturbed = [one for one in known if one[0][1] > _TOLERATED]
    if not disturbed:
        return []
    (host, share), run_id = max(disturbed, key=lambda one: one[0][1])
    return [
        f"in {len(disturbed)} of {len(known)} runs a hypervisor gave more than {_TOLERATED:.0%} of "
        f"a host's processor time to other guests (most: {share:.0%} on {host} in {run_id}): their "
        "times are longer and vary more, repeat them on a quieter machine"
    ]


def rank_settings(headers: Iterable[RunHeader]) -> list[tuple[str, str, bool]]:
    """Setting, its values with the hosts where they are not alike, and whether any device had
    several in turn."""
    known: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for info in (info for header in headers for info in header.ranks if info.settings):
        known[info.hostname, info.device].append(info.settings)
    names = {name for of_device in known.values() for each in of_device for name in each}
    rows = []
    for name in sorted(names):
        hosts: dict[str, dict[str, None]] = defaultdict(dict)
        n_values = []
        for (host, _), of_device in known.items():
            values = sorted({each.get(name, "not set") for each in of_device})
            n_values.append(len(values))
            for value in values:
                hosts[value][host] = None
        words = [f"{value} ({', '.join(own)})" for value, own in hosts.items()]
        rows.append((name, "; ".join(words if len(words) > 1 else hosts), max(n_values) > 1))
    return rows
