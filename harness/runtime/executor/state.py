"""A model's whole state from the parts that the ranks hold, and back; as files too.

Whole tensors have the names, and the optimizer's state the numbers, that one device would give
them, so that a run can go on under another strategy or without the executor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.errors import ResultsError, VerificationError
from harness.runtime.executor.slices import WeightSlice
from harness.runtime.executor.values import MetaModel
from harness.runtime.executor.weights import Holders, Weights
from harness.runtime.replicas import fingerprint_of
from harness.runtime.world import World

Parts = Mapping[WeightSlice, Tensor]


class StateGatherer:
    """Puts tensors of the model together from the slices of all ranks.

    Args:
        model: without memory; says which tensors there are.
    """

    def __init__(self, meta: MetaModel, weights: Weights, holders: Holders, world: World) -> None:
        self._model, self._weights, self._holders, self._world = (
            meta.module, weights, holders, world,
        )  # fmt: skip

    def whole(self, parts: Parts) -> dict[str, Tensor]:
        """Every tensor that any rank has parts of, on the host of every rank; all must call it."""
        known = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        places: list[dict[WeightSlice, torch.dtype]] = [{} for _ in range(self._world.size)]
        own = {piece: tensor.dtype for piece, tensor in parts.items()}
        if self._world.size > 1:
            dist.all_gather_object(places, own)
        else:
            places = [own]
        found: dict[str, Tensor] = {}
        for piece in sorted({p for place in places for p in place}, key=_in_order):
            source = next(rank for rank, place in enumerate(places) if piece in place)
            shape = [stop - start for start, stop in piece.intervals]
            buffer = torch.empty(shape, dtype=places[source][piece], device=self._world.device)
            if source == self._world.rank:
                buffer.copy_(parts[piece])
            if self._world.size > 1:
                dist.broadcast(buffer, source)
            if piece.name not in found:
                whole = torch.zeros(known[piece.name].shape, dtype=buffer.dtype)
                found[piece.name] = whole
            piece.take(found[piece.name]).copy_(buffer)
        return found

    def model_state(self) -> dict[str, Tensor]:
        """Parameters and buffers under all their names, in the order of the model."""
        parts = {piece: tensor.detach() for piece, tensor in self._weights.held.items()}
        whole = self.whole(parts)
        names = self._weights.names
        return {
            name: whole[first]
            for name, first in names.items()
            if first in whole and name in self._model.state_dict()
        }

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As `Optimizer.state_dict` of an optimizer over all parameters of the model."""
        numbers = _numbers(self._model)
        trained = self._weights.trainable()
        by_key: dict[str, dict[WeightSlice, Tensor]] = {}
        single: dict[str, dict[str, Any]] = {}
        for piece, parameter in trained.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    by_key.setdefault(key, {})[piece] = value
                else:
                    single.setdefault(piece.name, {})[key] = value
        keys = _union(self._world, list(by_key))
        state: dict[int, dict[str, Any]] = {}
        for key in keys:
            for name, tensor in self.whole(by_key.get(key, {})).items():
                state.setdefault(numbers[name], {})[key] = tensor
        for name, values in _merged(self._world, single).items():
            state.setdefault(numbers[name], {}).update(values)
        groups = [
            {**group, "params": sorted(numbers.values())}
            for group in optimizer.state_dict()["param_groups"]
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Take this rank's parts of a whole state."""
        names = self._weights.names
        model = {names.get(name, name): tensor for name, tensor in state["model"].items()}
        with torch.no_grad():
            for piece, tensor in self._weights.held.items():
                tensor.copy_(piece.take(model[piece.name]))
        numbers = _numbers(self._model)
        stored = state["optimizer"]["state"]
        own: dict[int, dict[str, Any]] = {}
        for index, (piece, parameter) in enumerate(self._weights.trainable().items()):
            values = stored.get(numbers[piece.name], {})
            whole = self._model.get_parameter(piece.name).shape
            own[index] = {
                key: _part_of(value, piece, whole, parameter) for key, value in values.items()
            }
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": own, "param_groups": groups})


def _part_of(value: Any, piece: WeightSlice, whole: torch.Size, parameter: nn.Parameter) -> Any:
    if isinstance(value, Tensor) and value.shape == whole:
        return piece.take(value).clone()
    return value


def _numbers(model: nn.Module) -> dict[str, int]:
    return {name: index for index, (name, _) in enumerate(model.named_parameters())}


def _in_order(piece: WeightSlice) -> tuple[str, tuple[tuple[int, int], ...]]:
    return piece.name, piece.intervals


def _everyone(world: World, mine: Any) -> list[Any]:
    if world.size == 1:
        return [mine]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, mine)
    return found


def _union(world: World, mine: list[str]) -> list[str]:
    return sorted({key for keys in _everyone(world, mine) for key in keys})


def _merged(world: World, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for values in _everyone(world, mine):
        for name, value in values.items():
            merged.setdefault(name, value)
    return merged


def verify_copies(weights: Weights, world: World) -> str:
    """Check that equal slices hold equal bits on all ranks; all must call it.

    Returns:
        A digest of all slices, to compare runs of the same strategy by.

    Raises:
        VerificationError: on every rank, naming two ranks and the parameter that differs.
    """
    own = {piece: fingerprint_of(p).tolist() for piece, p in weights.trainable().items()}
    first: dict[WeightSlice, tuple[int, list[int]]] = {}
    for rank, prints in enumerate(_everyone(world, own)):
        for piece, bits in prints.items():
            holder, known = first.setdefault(piece, (rank, bits))
            if bits != known:
                raise VerificationError(
                    f"replicas differ: ranks {holder} and {rank} hold unequal {piece.name} after "
                    "training"
                )
    listed = [(_in_order(piece), first[piece][1]) for piece in sorted(first, key=_in_order)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def save_sharded(weights: Weights, holders: Holders, world: World, directory: Path) -> None:
    """Each rank writes the slices that it is the first to hold: `shard<rank>.safetensors`."""
    tensors = {
        _file_key(piece): tensor.detach().cpu().contiguous()
        for piece, tensor in weights.held.items()
        if holders.of(piece)[0] == world.rank
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / f"shard{world.rank}.safetensors"))


def load_sharded(directory: Path) -> dict[str, Tensor]:
    """The whole tensors of a directory that `save_sharded` wrote.

    Raises:
        ResultsError: no shard there, or a tensor has gaps.
    """
    pieces: dict[str, list[tuple[WeightSlice, Tensor]]] = {}
    for path in sorted(directory.glob("shard*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                piece = _from_file_key(key)
                pieces.setdefault(piece.name, []).append((piece, file.get_tensor(key)))
    if not pieces:
        raise ResultsError(f"{directory} holds no shard*.safetensors: give a run's directory")
    return {name: _join(name, parts, directory) for name, parts in pieces.items()}


def _join(name: str, parts: list[tuple[WeightSlice, Tensor]], directory: Path) -> Tensor:
    shape = [max(p.intervals[dim][1] for p, _ in parts) for dim in range(parts[0][1].dim())]
    whole = torch.empty(shape, dtype=parts[0][1].dtype)
    for piece, tensor in parts:
        piece.take(whole).copy_(tensor)
    n_found = sum(tensor.numel() for _, tensor in parts)
    if n_found != whole.numel():
        raise ResultsError(
            f"{directory} holds {n_found} of the {whole.numel()} elements of {name}: a shard is "
            "missing"
        )
    return whole


def _file_key(piece: WeightSlice) -> str:
    return f"{piece.name} {','.join(f'{start}:{stop}' for start, stop in piece.intervals)}"


def _from_file_key(key: str) -> WeightSlice:
    name, _, text = key.partition(" ")
    intervals = []
    for interval in filter(None, text.split(",")):
        start, _, stop = interval.partition(":")
        intervals.append((int(start), int(stop)))
    return WeightSlice(name, tuple(intervals))
