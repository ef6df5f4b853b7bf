"""A model's and its optimizer's state as files: each rank writes its own parts.

Every file is named after its rank; its tensors are named `model INTERVALS NAME` and
`optimizer KEY INTERVALS NAME`, where INTERVALS is such as `0:4,2:6`, or `-` for what is not cut as
the parameter is. Metadata says which files there are, of which step, and what the model's state is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from harness.errors import ResultsError
from harness.measure.store import replacing
from harness.runtime.executor.slices import WeightSlice
from harness.runtime.executor.state import OwnParts, StateGatherer
from harness.runtime.world import World

_FORMAT = "state shards 1"
_UNCUT = "-"

Pieces = list[tuple[WeightSlice, Tensor]]


def save_sharded(
    gatherer: StateGatherer, optimizer: Optimizer, step: int, world: World, directory: Path
) -> None:
    """Write this rank's parts as `shardRANK.safetensors`, whole or not at all."""
    own = dict(_named(gatherer.own_parts(optimizer)))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
    told = {
        "format": _FORMAT,
        "ranks": str(world.size),
        "step": str(step),
        "names": json.dumps(gatherer.names),
        "parameters": json.dumps(gatherer.parameters),
    }
    with replacing(directory / _file_name(world.rank)) as temporary:
        save_file(tensors, str(temporary), metadata=told)


def load_sharded(directory: Path) -> dict[str, Any]:
    """The whole state that ranks wrote with `save_sharded`, as `ExecutorEngine.full_state`.

    Raises:
        ResultsError: a shard or a part of a tensor is missing, or shards are of different saves.
    """
    paths, told = check_sharded(directory)
    model, cut, single = _read(paths)
    whole = {name: _join(name, parts, directory) for name, parts in model.items()}
    numbers = {name: index for index, name in enumerate(json.loads(told["parameters"]))}
    state: dict[int, dict[str, Tensor]] = {}
    for (key, name), parts in cut.items():
        state.setdefault(numbers[name], {})[key] = _join(name, parts, directory)
    for (key, name), value in single.items():
        state.setdefault(numbers[name], {})[key] = value
    return {
        "model": {name: whole[first] for name, first in json.loads(told["names"]).items()},
        "optimizer": {"state": dict(sorted(state.items()))},
        "step": int(told["step"]),
    }


def check_sharded(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The shards of a state, and what all of them say alike; tensors are not read.

    Raises:
        ResultsError: a shard is missing or malformed, or shards are of different saves.
    """
    paths = sorted(directory.glob(_file_name("*")))
    if not paths:
        raise ResultsError(f"{directory} holds no {_file_name('*')}: give the directory of a state")
    told = _common_metadata(paths)
    missing = {_file_name(rank) for rank in range(int(told["ranks"]))} - {p.name for p in paths}
    if missing:
        raise ResultsError(
            f"{directory} holds {len(paths)} of {told['ranks']} shards, {min(missing)} is missing: "
            "copy the shards of all nodes there"
        )
    return paths, told


def _file_name(rank: int | str) -> str:
    return f"shard{rank}.safetensors"


def _named(own: OwnParts) -> Iterator[tuple[str, Tensor]]:
    for piece, tensor in own.model.items():
        yield f"model {_text(piece)} {piece.name}", tensor
    for key, parts in own.optimizer.items():
        for piece, tensor in parts.items():
            yield f"optimizer {key} {_text(piece)} {piece.name}", tensor
    for name, values in own.single.items():
        for key, value in values.items():
            yield f"optimizer {key} {_UNCUT} {name}", torch.as_tensor(value)


def _common_metadata(paths: list[Path]) -> dict[str, str]:
    """What all files say alike."""
    found: list[dict[str, str]] = []
    for path in paths:
        try:
            with safe_open(str(path), framework="pt") as file:
                found.append(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise ResultsError(
                f"{path} is no safetensors file that can be read ({error}): save the state again"
            ) from None
        if found[-1].get("format") != _FORMAT:
            raise ResultsError(
                f"{path} has format {found[-1].get('format')!r}, not {_FORMAT!r}: it is no shard "
                "of this version"
            )
    for path, told in zip(paths, found, strict=True):
        for key, value in told.items():
            if value != found[0][key]:
                raise ResultsError(
                    f"{paths[0]} and {path} are of different saves: their {key} are "
                    f"{found[0][key]:.40} and {value:.40}; keep each in a directory of its own"
                )
    return found[0]


def _read(
    paths: list[Path],
) -> tuple[dict[str, Pieces], dict[tuple[str, str], Pieces], dict[tuple[str, str], Tensor]]:
    """The pieces of the model, those of the optimizer's state, and what of it is not cut."""
    model: dict[str, Pieces] = {}
    cut: dict[tuple[str, str], Pieces] = {}
    single: dict[tuple[str, str], Tensor] = {}
    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_tensor(stored)
                kind, _, rest = stored.partition(" ")
                if kind == "model":
                    text, _, name = rest.partition(" ")
                    model.setdefault(name, []).append((_slice(name, text), tensor))
                    continue
                key, text, name = rest.split(" ", 2)
                if text == _UNCUT:
                    single[key, name] = tensor
                else:
                    cut.setdefault((key, name), []).append((_slice(name, text), tensor))
    return model, cut, single


def _join(name: str, parts: Pieces, directory: Path) -> Tensor:
    shape = [max(p.intervals[dim][1] for p, _ in parts) for dim in range(parts[0][1].dim())]
    whole = torch.empty(shape, dtype=parts[0][1].dtype)
    for piece, tensor in parts:
        piece.take(whole).copy_(tensor)
    n_found = sum(tensor.numel() for _, tensor in parts)
    if n_found != whole.numel():
        raise ResultsError(
            f"{directory} holds {n_found} of the {whole.numel()} elements of {name}: save it again"
        )
    return whole


def _text(piece: WeightSlice) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in piece.intervals)


def _slice(name: str, text: str) -> WeightSlice:
    intervals = []
    for interval in filter(None, text.split(",")):
        start, _, stop = interval.partition(":")
        intervals.append((int(start), int(stop)))
    return WeightSlice(name, tuple(intervals))
