"""One rank's shard of the state of a model and its optimizer, and the file that it is written to.

Each rank writes one file, with tensors named `model INTERVALS NAME` and `optimizer KEY INTERVALS
NAME`. INTERVALS is such as `0:4,2:6`, or `-` for state without the parameter's shape. All files
have the same `StateMetadata`. Where replicas are averaged, these are the parameters that they agree
on and the first one's state of the optimizer; the same names after `replica K ` are the others' and
their own parameters.

Shards of survivors are those of ranks that have lost another: each holds all slices of its rank,
and together they are a state if they cover every tensor. Parameters that have not been updated
since they are trained have no state of the optimizer; a survivor's shard names those of its rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from harness.domain.files import Count
from harness.domain.freezing import FreezingState
from harness.errors import ConfigError
from harness.inputs import MOST_COUNT, shorten
from harness.measure.store import move_files, replacing
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.update import LayerNorms, LossScaleState, NormSums
from harness.runtime.executor.state.state import StateGatherer, StatePart
from harness.runtime.ranks.gather import raise_on_all_ranks
from harness.runtime.ranks.world import World

FORMAT = "state shards 2"
UNCUT = "-"
FRESH = "without state"
OF_REPLICA = "replica "


class StateMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata that all files of a state share.

    Attributes:
        names: for each name of the model's state, the first name of the same tensor.
        parameters: names of the parameters, in the order of the optimizer's numbers.
        is_survivors: shards may be missing, and slices may be in several of them.
        shapes: by the first name of each tensor of the model's state.
        trained: parameters that the optimizer updates.
        freezing: of `--freeze gradient`.
        loss_scale: of fp16.
        run: that wrote them; empty if it is no run of a launch.
        n_replicas: that are averaged; 1 if gradients are summed over all ranks.
    """

    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    step: Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
    names: dict[str, str]
    parameters: list[str]
    is_survivors: bool
    shapes: dict[str, list[Count]]
    trained: list[str]
    freezing: FreezingState | None = None
    loss_scale: LossScaleState | None = None
    run: str = ""
    n_replicas: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 1

    def __post_init__(self) -> None:
        if len(set(self.parameters)) != len(self.parameters):
            raise ValueError("a name is twice among the parameters: save the state again")


@dataclass(frozen=True, kw_only=True)
class StateShard:
    """One rank's slices of a state, in the host's memory.

    Attributes:
        shared: names of the tensors that training changes in its next step.
    """

    rank: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    shared: frozenset[str]

    @property
    def n_shared_bytes(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.shared)

    def copied(self) -> StateShard:
        """The same, which training does not change."""
        copies = {name: self.tensors[name].clone() for name in self.shared}
        return replace(self, tensors=self.tensors | copies, shared=frozenset())

    def write(self, directory: Path) -> None:
        """Write `shardRANK.safetensors`, atomically."""
        with replacing(directory / shard_name(self.rank)) as temporary:
            save_file(self.tensors, str(temporary), metadata=self.metadata)


def state_shard(
    gatherer: StateGatherer,
    optimizer: Optimizer,
    step: int,
    world: World,
    *,
    run: str = "",
    is_survivor: bool = False,
    norms: NormSums | LayerNorms | None = None,
    loss_scale: LossScaleState | None = None,
) -> StateShard:
    """This rank's slices; ranks need not call it together.

    Args:
        run: name of the run, so that shards of two are not taken for one state.
        is_survivor: take also slices that other ranks hold, because one of them is lost.
    """
    common, of_replica = gatherer.rank_parts(optimizer, has_copies=is_survivor)
    parts, averages = dict(_named(common)), gatherer.averages
    if averages is not None:
        parts |= dict(_named(of_replica, replica_prefix(averages.replicas.number)))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in parts.items()}
    metadata = StateMetadata(
        n_ranks=world.size,
        step=step,
        names=gatherer.names,
        parameters=list(gatherer.numbers),
        is_survivors=is_survivor,
        shapes=gatherer.model_shapes(),
        trained=gatherer.trained_names(),
        freezing=None if norms is None else norms.state(),
        loss_scale=loss_scale,
        run=run,
        n_replicas=1 if averages is None or is_survivor else averages.replicas.n,
    )
    text = msgspec.json.encode(metadata).decode()
    fresh = msgspec.json.encode(gatherer.names_without_state(optimizer)).decode()
    return StateShard(
        rank=world.rank,
        tensors=tensors,
        metadata={"format": FORMAT, "state": text, FRESH: fresh},
        shared=frozenset(
            name for name, tensor in parts.items() if tensors[name].data_ptr() == tensor.data_ptr()
        ),
    )


def replace_state(directory: Path, write: Callable[[Path], None], world: World) -> None:
    """Replace a state in files when all ranks have written theirs, so that the old one stays whole
    if one of them cannot; all ranks must call it.

    Args:
        write: writes this rank's shard, and what belongs to it, into a directory.
    """
    staged = directory / f".rank{world.rank}"

    def replace_files() -> None:
        move_files(staged, directory)
        kept = {shard_name(rank) for rank in range(world.size)}
        for path in directory.glob(shard_name("*")):
            if path.name not in kept:  # of an earlier save, by more ranks
                path.unlink(missing_ok=True)
        shutil.rmtree(staged, ignore_errors=True)

    try:
        raise_on_all_ranks(lambda: write(staged), world)
        raise_on_all_ranks(replace_files, world)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def shard_name(rank: int | str) -> str:
    """The name of a rank's file in the directory of a state."""
    return f"shard{rank}.safetensors"


def replica_prefix(number: int) -> str:
    """What the names of a replica's own tensors begin with."""
    return f"{OF_REPLICA}{number} "


def _named(parts: Iterable[StatePart], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, piece, value, is_cut in parts:
        if not key:
            yield f"{prefix}model {_text(piece)} {piece.name}", value
        elif isinstance(value, Tensor | Number):
            text = _text(piece) if is_cut else UNCUT
            yield f"{prefix}optimizer {key} {text} {piece.name}", torch.as_tensor(value)
        else:
            raise ConfigError(
                f"the optimizer keeps {key} of {shorten(value)} for {piece.name}, and a file of a "
                "state holds tensors and numbers: keep it elsewhere than in the state"
            )


def _text(piece: WeightSlice) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in piece.intervals)
