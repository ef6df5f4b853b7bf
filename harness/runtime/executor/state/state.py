"""Gather a model's whole state from the slices of all ranks, and load it.

Tensors have the same names, and the optimizer's state the same numbers, as on one device, so that
training can continue by another strategy or without the executor. A state is also written and read
in parts (`shard`, `files`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from harness.errors import ConfigError
from harness.runtime.engines.optimizers import AVERAGE, OUTER_MOMENTUM, average_of, kept_keys
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.gradients.averages import ReplicaAverages
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.state.weights import Holders, Weights
from harness.runtime.ranks.gather import gather_objects, raise_on_all_ranks
from harness.runtime.ranks.world import World
from harness.runtime.tracing.constructs import FOLDED

_log = logging.getLogger(__name__)

Parts = Mapping[WeightSlice, Tensor]


class StatePart(NamedTuple):
    """A value of a state that a rank writes.

    Attributes:
        key: of the optimizer's state; empty: of the model.
        piece: by the model's names.
        is_cut: it has the shape of the slice; else, as a counter, it is of the whole parameter.
    """

    key: str
    piece: WeightSlice
    value: Any
    is_cut: bool = True


class StateGatherer:
    """Assembles tensors of the model from the slices of all ranks.

    Args:
        model: the model before its memory is released; gives the order of names, and the values of
            tensors that no device holds.
        names: the model's `canonical_names` before lowering, because shards copy tensors, after
            which a tensor's names no longer refer to one tensor.
        meta: the captured model on the meta device; gives shapes.
        averages: of replicas, whose state is the one that they agree on.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[str, str],
        meta: MetaModel,
        weights: Weights,
        holders: Holders,
        owners: Owners,
        world: World,
        averages: ReplicaAverages | None,
    ) -> None:
        self._weights, self._owners, self._world, self.averages = weights, owners, world, averages
        tensors = (*meta.module.named_parameters(), *meta.module.named_buffers())
        self._shapes = {name: tensor.shape for name, tensor in tensors}
        parameters = model.named_parameters(remove_duplicate=False)
        first = [name for name, _ in parameters if names[name] == name]
        # The optimizer's numbers of parameters count all of the model, whatever its groups.
        self.numbers = {name: number for number, name in enumerate(first)}
        whole = _state_of(model)
        state = {n: t.detach() for n, t in whole.items() if n in names}
        # What `get_extra_state` of modules gives, which no graph changes.
        self._extra = {n: x for n, x in whole.items() if n.endswith(_EXTRA_STATE_KEY_SUFFIX)}
        self._order = [n for n in whole if n in state or n in self._extra]
        # The names of a state, in order, with the first name of the same tensor.
        self.names = {name: names[name] for name in state}
        # Capture lists tensors in the order of their use, so another of their names may be first.
        self._model_names = {weights.names[n]: names[n] for n in names if n in weights.names}
        held = {self._model_name(piece) for piece, _ in holders.items()}
        self._unused = {names[n]: t.cpu() for n, t in state.items() if names[n] not in held}
        self._folded = {names[n] for n in meta.module.meta.get(FOLDED, ()) if n in names}

    def _model_name(self, piece: WeightSlice) -> str:
        """The name of a slice's tensor in the model; unchanged for constants that capture added."""
        return self._model_names.get(piece.name, piece.name)

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that this rank updates, by the model's names; a new one of one element if
        there are none, because an optimizer needs one."""
        own = [(self._model_name(piece), p) for piece, p in self._owners.own.items()]
        name = min(self.trained_names(), default="")
        return own or [(name, nn.Parameter(torch.zeros(1, device=self._world.device)))]

    def whole(self, parts: Parts, *, is_for_first: bool = False) -> dict[str, Tensor]:
        """Assemble tensors from all ranks' slices, in host memory; all ranks must call it.

        Args:
            is_for_first: return nothing on the other ranks.
        """
        is_kept = self._world.is_first or not is_for_first
        dtypes = {piece: tensor.dtype for piece, tensor in parts.items()}
        places = gather_objects(self._world, dtypes)
        found: dict[str, Tensor] = {}
        for piece in sorted({p for place in places for p in place}):
            source = next(rank for rank, place in enumerate(places) if piece in place)
            shape = [stop - start for start, stop in piece.intervals]
            buffer = torch.empty(shape, dtype=places[source][piece], device=self._world.device)
            if source == self._world.rank:
                buffer.copy_(parts[piece])
            if self._world.size > 1:
                # As bytes, because gloo does not know 16-bit integers.
                dist.broadcast(buffer.view(-1).view(torch.uint8), source)
            if not is_kept:
                continue
            name = self._model_name(piece)
            if name not in found:
                found[name] = torch.zeros(self._shapes[piece.name], dtype=buffer.dtype)
            piece.take(found[name]).copy_(buffer)
        return found

    def model_state(self, *, is_for_first: bool = False) -> dict[str, Tensor]:
        """Parameters, buffers and extra state by all their names, in the order of the model."""
        return self._named(self.whole(self._model_parts(), is_for_first=is_for_first))

    def averaged_state(
        self, optimizer: Optimizer, *, is_for_first: bool = False
    ) -> dict[str, Tensor]:
        """The same with the averages of the trained parameters."""
        trained = {piece.name for piece in self._owners.keepers()}
        parts = {p: tensor for p, tensor in self._model_parts().items() if p.name not in trained}
        parts |= {piece: average_of(optimizer, p) for piece, p in self._owners.own.items()}
        return self._named(self.whole(parts, is_for_first=is_for_first))

    def _named(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        known = {**self._unused, **whole}
        found = {name: known[first] for name, first in self.names.items()} if whole else {}
        return {n: found[n] if n in found else self._extra[n] for n in self._order if found}

    def _model_parts(self, *, is_of_replica: bool = False) -> dict[WeightSlice, Tensor]:
        """This rank's slices of the model's state.

        Args:
            is_of_replica: those that it trains, where replicas are averaged.
        """
        known = set(self.names.values())
        agreed = {} if is_of_replica or self.averages is None else self.averages.average.whole()
        held = self._owners.held(self._weights).items()
        return {p: agreed.get(x, x).detach() for p, x in held if self._model_name(p) in known}

    @contextmanager
    def agreeing_buffers(self) -> Iterator[None]:
        """Let this rank's buffers, such as statistics of its own samples, be those of
        `model_state`; all ranks must call it."""
        parts = self._buffers()
        own = {p: x.clone() for p, x in parts.items()}
        self._agree_on(parts)
        try:
            yield
        finally:
            for piece, buffer in parts.items():
                buffer.copy_(own[piece])

    def agree_on_buffers(self, modules: Collection[str]) -> None:
        """The same for good, for the buffers of some modules, by their names in the graph."""
        parts = self._buffers().items()
        self._agree_on({p: x for p, x in parts if p.name.rpartition(".")[0] in modules})

    def _buffers(self) -> dict[WeightSlice, Tensor]:
        held = self._model_parts(is_of_replica=True).items()
        return {p: x for p, x in held if self._model_name(p) not in self.numbers}

    def _agree_on(self, parts: Parts) -> None:
        whole = self.whole(parts)
        for piece, tensor in parts.items():
            tensor.copy_(piece.take(whole[self._model_name(piece)]))

    def _optimizer_parts(self, optimizer: Optimizer) -> Iterator[StatePart]:
        for piece, parameter in self._owners.own.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                is_cut = isinstance(value, Tensor) and value.shape == parameter.shape
                if not is_cut:
                    _check_uncut(key, value, piece, self._shapes[piece.name])
                yield StatePart(key, piece, value, is_cut)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's state of each parameter, by its first name, on every rank in host
        memory; of averaged replicas the first one's. All ranks must call it.

        Raises:
            ConfigError: the state of a cut parameter cannot be cut likewise.
        """
        parts: list[StatePart] = []
        raise_on_all_ranks(lambda: parts.extend(self._optimizer_parts(optimizer)), self._world)
        parts = [part for part in parts if part.key != AVERAGE]
        uncut = [(self._model_name(x.piece), x.key, x.value) for x in parts if not x.is_cut]
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, key, value in (one for own in gather_objects(self._world, uncut) for one in own):
            found[name].setdefault(key, value.cpu() if isinstance(value, Tensor) else value)
        cut = gather_objects(self._world, sorted({part.key for part in parts if part.is_cut}))
        for key in sorted({key for own in cut for key in own}):
            own = {part.piece: part.value for part in parts if part.is_cut and part.key == key}
            for name, tensor in self.whole(own).items():
                found[name][key] = tensor
        return found

    def parameter_shapes(self) -> dict[str, list[int]]:
        """The shape of each parameter, by its first name, in the order of the model."""
        shapes = self.model_shapes()
        return {name: shapes[name] for name in self.numbers}

    def rank_parts(
        self, optimizer: Optimizer, *, has_copies: bool = False
    ) -> tuple[list[StatePart], list[StatePart]]:
        """The parts that this rank writes: of the state, and of its replica alone, where replicas
        are averaged. Every slice of them is written by one rank.

        Args:
            has_copies: all slices that this rank holds, though other ranks may hold them too.
        """
        rank, owners, averages = self._world.rank, self._owners, self.averages
        placement = owners.placement()

        def model_parts(*, is_of_replica: bool) -> list[StatePart]:
            parts = self._model_parts(is_of_replica=is_of_replica).items()
            return [
                StatePart("", piece, tensor)
                for piece, tensor in parts
                if has_copies or placement[piece][0] == rank
            ]

        def of_optimizer(parts: Iterable[StatePart]) -> list[StatePart]:
            return [part for part in parts if has_copies or owners.of(part.piece) == rank]

        common = of_optimizer(self._optimizer_parts(optimizer))
        of_replica: list[StatePart] = []
        if averages is not None and not has_copies:
            of_replica = model_parts(is_of_replica=True)
            if averages.replicas.number > 0:
                return [], self._renamed([*of_replica, *common])
        if averages is not None and (momentum := averages.average.momentum()):
            of_outer = [StatePart(OUTER_MOMENTUM, p, momentum[x]) for p, x in owners.own.items()]
            common += of_optimizer(of_outer)
        model = model_parts(is_of_replica=False)
        # Its buffers are those of the model; a file has no two names of one memory.
        written = {part.value.data_ptr() for part in model}
        of_replica = [part for part in of_replica if part.value.data_ptr() not in written]
        if has_copies or self._world.is_first:
            unused = self._unused.items()
            model += [StatePart("", WeightSlice.whole(name, x), x) for name, x in unused]
        return self._renamed([*model, *common]), self._renamed(of_replica)

    def _renamed(self, parts: Iterable[StatePart]) -> list[StatePart]:
        return [part._replace(piece=part.piece.renamed(self._model_names)) for part in parts]

    def model_shapes(self) -> dict[str, list[int]]:
        """The shape of each tensor of the model's state, by its first name."""
        shapes = {self._model_names.get(n, n): list(shape) for n, shape in self._shapes.items()}
        shapes |= {name: list(tensor.shape) for name, tensor in self._unused.items()}
        return {name: shapes[name] for name in set(self.names.values())}

    def trained_names(self) -> list[str]:
        """Parameters that the optimizer updates on any rank."""
        return sorted({self._model_name(piece) for piece in self._owners.keepers()})

    def names_without_state(self, optimizer: Optimizer) -> list[str]:
        """Parameters that this rank updates, but has not yet."""
        own = self._owners.own.items()
        return sorted({self._model_name(piece) for piece, p in own if not optimizer.state.get(p)})

    def take_unused(self, other: StateGatherer) -> None:
        """Take over the tensors that no device holds, which are equal on all ranks."""
        self._unused = dict(other._unused)

    def load(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Load this rank's slices of a whole state, and of its replica's if it has as many.

        Raises:
            ConfigError: the state is of another model or optimizer.
        """
        self._load(state, optimizer)
        if self.averages is None:
            return
        stored = state["optimizer"]["state"]
        momentum: dict[Tensor, Tensor] = {}
        for piece, parameter in self._owners.own.items():
            found = stored.get(self.numbers[self._model_name(piece)], {}).get(OUTER_MOMENTUM)
            if found is not None:
                momentum[parameter] = torch.empty_like(parameter).copy_(piece.take(found))
        self.averages.average.restart(momentum, state.get("step", 0))
        opened, replicas = state.get("replicas", ()), self.averages.replicas
        if len(opened) == replicas.n:
            self._load(opened[replicas.number](), optimizer)
        elif self._world.is_first:
            _log.warning(
                "the state has own parameters of %d replicas, and %d are averaged: each begins "
                "with the parameters that they agreed on and the optimizer's state of the first",
                len(opened), replicas.n,
            )  # fmt: skip

    def _load(self, state: Mapping[str, Any], optimizer: Optimizer) -> None:
        model = state["model"]
        if others := sorted(model.keys() - self.names.keys()):
            raise ConfigError(
                f"the state has {others[0]}, the model has not: load the state of the same model"
            )
        saved = {self.names.get(name, name): name for name in model}

        def whole(name: str, shape: torch.Size) -> Tensor:
            found = model[saved[name]] if name in saved else None
            return _of_shape(found, name, shape)

        parts = self._model_parts(is_of_replica=True)
        own = [(self._model_name(p), p, self._shapes[p.name], part) for p, part in parts.items()]
        own += [(n, WeightSlice.whole(n, x), x.shape, x) for n, x in self._unused.items()]
        for name, piece, shape, tensor in own:
            if name in self._folded:
                _check_constant(name, tensor, piece.take(whole(name, shape)))
        for name, piece, shape, tensor in own:
            tensor.copy_(piece.take(whole(name, shape)))
        stored = state["optimizer"]["state"]
        keys = kept_keys(optimizer, stored)
        has_averages = any(AVERAGE in values for values in stored.values())
        if has_averages and AVERAGE not in keys and self._world.is_first:
            _log.warning("averages of parameters in the state are dropped: use ema to keep them")
        sliced: dict[int, dict[str, Any]] = {}
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        places = {parameter: index for index, parameter in enumerate(grouped)}
        for piece, parameter in self._owners.own.items():
            values = stored.get(self.numbers[self._model_name(piece)], {})
            shape, own = self._shapes[piece.name], optimizer.state.get(parameter, {})
            # A parameter that was frozen has none saved; Adagrad makes one with the optimizer.
            made = own if not values and own.get("step") == 0 else {}
            sliced[places[parameter]] = made or {
                key: _part_of(key, values[key], piece, shape) for key in keys & values.keys()
            }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": sliced})


def _state_of(model: nn.Module) -> dict[str, Any]:
    """A model's `state_dict` before hooks, which may rename tensors or leave them out."""
    found: dict[str, Any] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        part._save_to_state_dict(found, f"{path}." if path else "", keep_vars=False)
    return found


def _of_shape(found: Tensor | None, name: str, shape: torch.Size) -> Tensor:
    if found is None or found.shape != shape:
        has = "no such tensor" if found is None else f"one of {tuple(found.shape)}"
        raise ConfigError(
            f"the model's {name} is of {tuple(shape)}, the state has {has}: load the state of the "
            "same model"
        )
    return found


def _check_constant(name: str, own: Tensor, found: Tensor) -> None:
    wide = torch.complex128 if own.is_complex() else torch.float64
    # Not equal, because another machine may round a table of sines otherwise.
    if not torch.allclose(own.cpu().to(wide), found.to(wide), rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"the state has another {name} than the model, from which the graph has computed "
            "constants: give the model the state's before it is captured"
        )


def _check_uncut(key: str, value: Any, piece: WeightSlice, whole: torch.Size) -> None:
    """Refuse an optimizer's state that cannot be cut as the parameter is."""
    is_cut = piece.n_elements != whole.numel()
    if is_cut and isinstance(value, Tensor) and value.numel() > 1:
        raise ConfigError(
            f"the optimizer keeps {key} of {tuple(value.shape)} for {piece.name} of "
            f"{tuple(whole)}, which the strategy cuts: use an optimizer that treats each element "
            "by itself, or a strategy that keeps this parameter whole"
        )


def _part_of(key: str, value: Any, piece: WeightSlice, whole: torch.Size) -> Any:
    """A slice as a copy, because each slice of a parameter counts its steps."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == whole:
        return piece.take(value).clone()
    _check_uncut(key, value, piece, whole)
    return value.clone()
