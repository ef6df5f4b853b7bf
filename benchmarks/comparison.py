"""Shared by the programs in this folder: a world of ranks, and one object per comparison."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.errors import EXIT_CODE, HarnessError
from harness.measure.statistics import paired_ratio
from harness.runtime.ranks.environment import read_launch
from harness.runtime.ranks.host import code_commit, cpu_model

if TYPE_CHECKING:
    from harness.runtime.ranks.rendezvous import Meeting


@contextmanager
def joined(name: str, *, n_threads: int = 0) -> Iterator[Meeting]:
    """Join the ranks of mpirun in a process group; all ranks must enter and leave. An error on one
    ends all, because the others would wait for it.

    Args:
        n_threads: of torch on each rank; 0: as many as runs take.
    """
    import torch

    from harness.runtime.ranks.rendezvous import join_process_group, meet

    # The prefix of a relocatable Open MPI, on other hosts than mpirun's (entry.sh).
    if "PMIX_INSTALL_PREFIX" in os.environ:
        os.environ.setdefault("OPAL_PREFIX", os.environ["PMIX_INSTALL_PREFIX"])
    meeting = meet(read_launch(os.environ), os.environ)
    torch.set_num_threads(n_threads or meeting.world.n_threads)
    join_process_group(meeting.world, meeting.address, meeting.port, name, 300.0)
    try:
        yield meeting
    except Exception as error:
        if meeting.world.size == 1 or meeting.world.mpi is None:
            raise
        if isinstance(error, HarnessError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        meeting.world.mpi.Abort(EXIT_CODE)
    torch.distributed.destroy_process_group()
    meeting.leave()


def machine() -> str:
    """A description of this host: its GPU, or its processor."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {platform.platform()}"
    return f"{cpu_model()}, {platform.platform()}"


def provenance(place: str = "") -> dict[str, object]:
    """Command, machine and commit of a reading.

    Args:
        place: the cluster, if the measurement used more than this host.
    """
    command = shlex.join(sys.argv)
    return {"command": command, "machine": place or machine(), "commit": code_commit()}


def compare(
    name: str, ours: Sequence[float], theirs: Sequence[float], *, place: str = ""
) -> dict[str, object]:
    """Median ratio of pairs that were measured in turn, with its 99 % interval."""
    ratio = paired_ratio(ours, theirs)
    return {
        "name": name,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "n_pairs": ratio.n,
        **provenance(place),
    }


def compare_extremes(name: str, ratios: Sequence[float], **more: object) -> dict[str, object]:
    """Median, minimum and maximum of ratios of different cases, or of too few for an interval.

    Args:
        more: further fields of the object.
    """
    return {
        "name": name,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "interval": "least and most",
        "n_pairs": len(ratios),
        **more,
        **provenance(),
    }


def show(comparisons: Sequence[dict[str, object]], *, as_json: bool) -> None:
    """Print the comparisons, one per line."""
    if as_json:
        for comparison in comparisons:
            print(json.dumps(comparison), flush=True)
        return
    for c in comparisons:
        print(
            f"{c['name']}: {c['ratio']:.4f} (99 % interval {c['low']:.4f} to {c['high']:.4f}, "
            f"{c['n_pairs']} pairs; {c['machine']}, {c['commit']})",
            flush=True,
        )
