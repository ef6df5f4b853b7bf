"""Replace the engine of a running training by one of another strategy, in two phases.

    old engine   | step 6 |                                   | freed
    new engine     built beside  | receives state | all agree | step 7 |

No rank leaves the old strategy before all ranks have received the new state and agree on its
fingerprints: of each message between its two ends, and of each replica between its holders. If one
does not, every rank keeps the old engine, whose state has not changed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.errors import HarnessError, StrategyError, VerificationError, first_line
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.executor.change.transfer import Bits, StateTransfer
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.state.state import gather_objects
from harness.runtime.ranks.gather import maximum_over_ranks, raise_on_all_ranks
from harness.runtime.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class ChangeCost:
    """The measured cost of one change, equal on every rank.

    Attributes:
        still_s: seconds without training, on the slowest rank.
        pair_bytes: bytes that travelled, by (sender, reader).
    """

    still_s: float
    pair_bytes: dict[tuple[int, int], int]


def change_engine(old: ExecutorEngine, new: ExecutorEngine, world: World) -> ChangeCost:
    """Move the state of `old` into `new` and close `old`; all ranks must call it between steps.

    Raises:
        HarnessError: on every rank, if one cannot take its new state; `old` trains on, and `new`
            is closed.
        RuntimeError: another rank died or hangs.
    """
    start_s = time.perf_counter()
    old.flush()
    try:
        transfer = StateTransfer(old.held_state(), new.held_state(), world)
        raise_on_all_ranks(partial(_pack, transfer), world)
        transfer.exchange()
        votes = gather_objects(world, Vote.of(transfer))
        check_votes(votes)
    except HarnessError:
        new.close()
        raise
    new.take_over(old)
    old.close()
    _free(old)
    still_s = time.perf_counter() - start_s
    slowest_s = maximum_over_ranks([still_s], world)[0] if world.size > 1 else still_s
    return ChangeCost(still_s=slowest_s, pair_bytes=pair_bytes_of(votes))


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One rank's view of the new state.

    Attributes:
        messages: fingerprints of its messages, by (sender, reader).
        replicas: fingerprints of the state that it shares with others, by slice and key.
        n_bytes: bytes that it received, by sender.
    """

    messages: Mapping[tuple[int, int], Bits]
    replicas: Mapping[tuple[WeightSlice, str], Bits]
    n_bytes: Mapping[int, int]

    @classmethod
    def of(cls, transfer: StateTransfer) -> Vote:
        return cls(
            messages=transfer.message_bits(),
            replicas=transfer.replica_bits(),
            n_bytes=transfer.n_bytes,
        )


def check_votes(votes: Sequence[Vote]) -> None:
    """Check that all ranks agree on the new state.

    Raises:
        VerificationError: names two ranks and the message or the slice that differs.
    """
    known: dict[tuple[object, object], tuple[int, Bits]] = {}
    for rank, vote in enumerate(votes):
        for subject, bits in (*vote.messages.items(), *vote.replicas.items()):
            first, seen = known.setdefault(subject, (rank, bits))
            if seen != bits:
                raise VerificationError(
                    f"ranks {first} and {rank} hold unequal state of the next strategy "
                    f"({_name_of(subject)}): training goes on by the old one"
                )


def _name_of(subject: tuple[object, object]) -> str:
    first, second = subject
    if isinstance(first, WeightSlice):
        return f"{second} of {first.name}" if second else first.name
    return f"the message from rank {first} to rank {second}"


def pair_bytes_of(votes: Sequence[Vote]) -> dict[tuple[int, int], int]:
    """Bytes that travelled, by (sender, reader)."""
    return {
        (source, target): n
        for target, vote in enumerate(votes)
        for source, n in sorted(vote.n_bytes.items())
    }


def _pack(transfer: StateTransfer) -> None:
    """Allocate the new state.

    Raises:
        HarnessError: it does not fit into memory.
    """
    try:
        transfer.pack()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StrategyError(
            f"the next strategy's state does not fit beside that of the current one "
            f"({first_line(error)}): choose one that keeps less on this rank"
        ) from error


def _free(engine: ExecutorEngine) -> None:
    """Free an engine at once, although its objects form reference cycles."""
    vars(engine).clear()
    gc.collect()
