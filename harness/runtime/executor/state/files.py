"""Check and read the files of a state (`state.shard`), whole or assembled when a tensor is read."""

from __future__ import annotations

import math
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.domain.files import decode
from harness.errors import ResultsError
from harness.inputs import find_int, one_line, open_regular, shorten
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.state.shard import (
    FORMAT,
    FRESH,
    OF_REPLICA,
    UNCUT,
    StateMetadata,
    replica_prefix,
    shard_name,
)

T = TypeVar("T")
Pieces = list[tuple[WeightSlice, Tensor]]


class _Joined(Mapping[str, Tensor]):
    """Tensors of a state, each assembled when it is read."""

    def __init__(self, directory: Path, *, has_copies: bool) -> None:
        self._directory, self._has_copies = directory, has_copies
        self.parts: dict[str, tuple[str, Pieces]] = {}  # by key, with the tensor's name

    def __getitem__(self, key: str) -> Tensor:
        name, parts = self.parts[key]
        return _join(name, parts, self._directory, has_copies=self._has_copies)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def load_sharded(directory: Path | str) -> dict[str, Any]:
    """Read the state whose shards all ranks wrote: the model's `state_dict`, the optimizer's state
    by the numbers of the parameters, the step, and the scale of fp16's losses.

    Raises:
        ResultsError: a shard or a part of a tensor is missing, or shards are of different saves.
    """
    state = open_sharded(Path(directory))
    of_parameters = {n: dict(values) for n, values in state["optimizer"]["state"].items()}
    return {
        "model": dict(state["model"]),
        "optimizer": {"state": of_parameters},
        "step": state["step"],
        "loss_scale": state["loss_scale"],
    }


def open_sharded(directory: Path) -> dict[str, Any]:
    """The same with mappings that assemble a tensor when it is read, because a host may not have
    the memory for the state of all ranks. Missing parts are refused before; parts that overlap are
    when they are read.

    Returns:
        Of replicas that are averaged also "replicas": functions that open the state of each.
    """
    paths, metadata = check_sharded(directory)
    state = _open(directory, paths, metadata)

    def open_replica(prefix: str) -> dict[str, Any]:
        own = _open(directory, paths, metadata, prefix)
        common, of_own = state["optimizer"]["state"], own["optimizer"]["state"]
        of_parameters = {n: ChainMap(of_own.get(n, {}), values) for n, values in common.items()}
        model = ChainMap(own["model"], state["model"])
        return {"model": model, "optimizer": {"state": of_parameters}, "step": state["step"]}

    if metadata.n_replicas > 1:
        prefixes = map(replica_prefix, range(metadata.n_replicas))
        state["replicas"] = [partial(open_replica, prefix) for prefix in prefixes]
    return state


def _open(
    directory: Path, paths: list[Path], metadata: StateMetadata, prefix: str = ""
) -> dict[str, Any]:
    """Open the tensors whose names have a prefix; without one there must be all of the model."""
    found = _read(paths, prefix)
    model = {name: parts for (key, name), parts in found.items() if not key}
    numbers = {name: index for index, name in enumerate(metadata.parameters)}
    for (_, name), parts in found.items():
        _shape_of(name, parts, directory, has_copies=metadata.is_survivors)

    def joined() -> _Joined:
        return _Joined(directory, has_copies=metadata.is_survivors)

    whole, state = joined(), defaultdict[int, _Joined](joined)
    for name, first in metadata.names.items():
        if prefix and first not in model:
            continue  # common to all replicas
        whole.parts[name] = first, _known(model, first, "tensors", directory)
    for (key, name), parts in found.items():
        if key:
            state[_known(numbers, name, "parameters", directory)].parts[key] = name, parts
    return {
        "model": whole,
        "optimizer": {"state": dict(sorted(state.items()))},
        "step": metadata.step,
        "loss_scale": metadata.loss_scale,
    }


def _known(found: dict[str, T], name: str, kind: str, directory: Path) -> T:
    if name not in found:
        raise ResultsError(
            f"{directory} has {shorten(name)}, which is not among its {len(found)} {kind}: save "
            "the state again"
        )
    return found[name]


def check_sharded(directory: Path) -> tuple[list[Path], StateMetadata]:
    """Check the files of a state; return their paths and metadata. Tensors are not read."""
    paths = sorted(directory.glob(shard_name("*")))
    if not paths:
        raise ResultsError(f"{directory} holds no {shard_name('*')}: give the directory of a state")
    metadata = _common_metadata(paths)
    if metadata.is_survivors:
        _check_covered(paths, metadata, directory)
        return paths, metadata
    wanted, found = {shard_name(rank) for rank in range(metadata.n_ranks)}, {p.name for p in paths}
    if not wanted <= found:
        raise ResultsError(
            f"{directory} holds {len(wanted & found)} of {metadata.n_ranks} shards, "
            f"{min(wanted - found)} is missing: copy the shards of all nodes there"
        )
    if not found <= wanted:
        raise ResultsError(
            f"{directory} holds {min(found - wanted)} beside the {metadata.n_ranks} shards of its "
            "ranks: move it elsewhere"
        )
    return paths, metadata


def _check_covered(paths: list[Path], metadata: StateMetadata, directory: Path) -> None:
    """Check that the shards of survivors cover the model and the optimizer's state."""
    held: dict[tuple[str, str], list[WeightSlice]] = defaultdict(list)
    fresh: set[str] = set()
    for path in paths:
        with _opened(path) as file:
            names = (file.metadata() or {}).get(FRESH, "[]").encode()
            fresh.update(decode(names, list[str], source=str(path), error=ResultsError))
            for stored in file.keys():  # noqa: SIM118 (it is no mapping)
                key, text, name = _parts_of(stored, path)
                piece = _parse_piece(name, text)
                if piece is not None:
                    held[key, name].append(piece)
    keys = {key for key, _ in held if key}
    wanted = [("", name) for name in metadata.shapes]
    wanted += [(key, name) for key in keys for name in metadata.trained if name not in fresh]
    most = sum(path.stat().st_size for path in paths)
    for key, name in wanted:
        shape = _known(metadata.shapes, name, "shapes", directory)
        n_elements = math.prod(shape)
        n_held = _n_covered(shape, held[key, name]) if 0 <= n_elements <= most else 0
        if n_held != n_elements:
            raise ResultsError(
                f"{directory} holds {n_held} of the {n_elements} elements of "
                f"{f'{key} of ' if key else ''}{shorten(name)}: only a lost rank had the others"
            )


def _n_covered(shape: list[int], pieces: list[WeightSlice]) -> int:
    covered = torch.zeros(shape, dtype=torch.bool)
    for piece in pieces:
        if len(piece.intervals) == len(shape):
            piece.take(covered).fill_(True)
    return int(covered.sum())


def _parts_of(stored: str, path: Path) -> tuple[str, str, str]:
    """The optimizer's key (empty for the model), the intervals and the name of a stored tensor."""
    kind, *words = stored.split(" ", 3 if stored.startswith("optimizer") else 2)
    if kind == "model" and len(words) == 2:
        return "", words[0], words[1]
    if kind != "optimizer" or len(words) != 3:
        raise ResultsError(
            f"{path} holds {shorten(stored)}, which is no part of a model or an optimizer: save "
            "the state again"
        )
    return words[0], words[1], words[2]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; all errors of the library become a ResultsError."""
    try:
        open_regular(path).close()
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise ResultsError(
            f"{path} is no safetensors file that can be read ({one_line(str(error))}): save the "
            "state again"
        ) from None


def _common_metadata(paths: list[Path]) -> StateMetadata:
    """The metadata of all files, which must be equal."""
    first = _read_metadata(paths[0])
    for path in paths[1:]:
        other = _read_metadata(path)
        for key in first.__struct_fields__:
            if getattr(first, key) != getattr(other, key):
                raise ResultsError(
                    f"{paths[0]} and {path} are of different saves: their {key} are "
                    f"{shorten(getattr(first, key))} and {shorten(getattr(other, key))}; keep "
                    "each in a directory of its own"
                )
    return first


def _read_metadata(path: Path) -> StateMetadata:
    with _opened(path) as file:
        found: dict[str, str] = file.metadata() or {}
    if found.get("format") != FORMAT:
        raise ResultsError(
            f"{path} has format {shorten(found.get('format'))}, not {FORMAT!r}: it is no shard of "
            "this version; save the state again"
        )
    data = found.get("state", "").encode(errors="replace")
    return decode(data, StateMetadata, source=str(path), error=ResultsError)


def _read(paths: list[Path], prefix: str) -> dict[tuple[str, str], Pieces]:
    """The parts of each tensor, by the optimizer's key (empty for the model) and its name, of names
    with a prefix; one part of a state that is not sliced, which several ranks may write."""
    found: dict[tuple[str, str], Pieces] = {}
    for path in paths:
        with _opened(path) as file:
            for stored in file.keys():  # noqa: SIM118 (it is no mapping)
                if not stored.startswith(prefix) or (stored.startswith(OF_REPLICA) and not prefix):
                    continue
                tensor = file.get_tensor(stored)
                key, text, name = _parts_of(stored.removeprefix(prefix), path)
                if key and text == UNCUT:
                    found[key, name] = [(WeightSlice.whole(name, tensor), tensor)]
                else:
                    piece = _piece(name, text, tensor, path)
                    found.setdefault((key, name), []).append((piece, tensor))
    return found


def _shape_of(name: str, parts: Pieces, directory: Path, *, has_copies: bool) -> list[int]:
    """The shape of a tensor, whose parts must be alike and, without copies, as many elements."""
    first = parts[0][1]
    if any((tensor.dim(), tensor.dtype) != (first.dim(), first.dtype) for _, tensor in parts):
        raise ResultsError(f"{directory} holds unlike parts of {shorten(name)}: save it again")
    shape = [max(piece.intervals[dim][1] for piece, _ in parts) for dim in range(first.dim())]
    if not has_copies:
        _check_count(name, sum(tensor.numel() for _, tensor in parts), shape, directory)
    return shape


def _check_count(name: str, n_found: int, shape: list[int], directory: Path) -> None:
    if n_found != math.prod(shape):
        raise ResultsError(
            f"{directory} holds {n_found} of the {math.prod(shape)} elements of {shorten(name)}: "
            "save it again"
        )


def _join(name: str, parts: Pieces, directory: Path, *, has_copies: bool) -> Tensor:
    """Assemble a tensor from parts, which must cover each element once.

    Args:
        has_copies: elements may be in several parts; that of the lowest rank counts.
    """
    shape, first = _shape_of(name, parts, directory, has_copies=has_copies), parts[0][1]
    if len(parts) == 1 and list(first.shape) == shape:
        return first
    whole, is_found = first.new_empty(shape), first.new_zeros(shape, dtype=torch.bool)
    for piece, tensor in reversed(parts):
        piece.take(whole).copy_(tensor)
        piece.take(is_found).fill_(True)
    _check_count(name, int(is_found.sum()), shape, directory)
    return whole


def _parse_piece(name: str, text: str) -> WeightSlice | None:
    """Parse a slice such as `0:4,2:6`; None if it is none."""
    intervals = []
    for interval in filter(None, text.split(",")):
        start, stop = (find_int(end) for end in interval.partition(":")[::2])
        if start is None or stop is None:
            return None
        intervals.append((start, stop))
    return WeightSlice(name, tuple(intervals))


def _piece(name: str, text: str, tensor: Tensor, path: Path) -> WeightSlice:
    """Parse a slice of a tensor's shape."""
    piece = _parse_piece(name, text)
    if piece and [stop - start for start, stop in piece.intervals] == list(tensor.shape):
        return piece
    raise ResultsError(
        f"{path} holds {shorten(text)} of {shorten(name)} with shape {tuple(tensor.shape)}: save "
        "the state again"
    )
