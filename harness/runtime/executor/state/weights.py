"""The slices of the model's weights on a device, and the devices that hold each slice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.runtime.executor.geometry.slices import WeightSlice

# Keys of a captured module's `meta`: names of parameters that are stored in channels-last order;
# whether every tensor repeats one element, because a blueprint made the module.
CHANNELS_LAST = "channels_last"
IS_REPEATED = "is_repeated"

_READABLE = (
    "requires_grad", "grad", "is_leaf", "dtype", "device",
    "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor to a device in place."""
    if tensor.device != device:
        tensor.data = tensor.data.to(device)


class ReleasedParameter(nn.Parameter):
    """A parameter that this rank does not keep: a copy, an average or a change of it would be of
    nothing, without an error."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        read = getattr(getattr(func, "__self__", None), "__name__", "")  # of an attribute's getter
        if read not in _READABLE and func is not Tensor.requires_grad_:
            _refuse_use()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refuse_use(*_: object) -> NoReturn:
    raise ConfigError(
        "the program uses its model after the Trainer has emptied it, because each rank keeps only "
        "its slices: copy the model before, read trainer.state_dict(), average by ema_decay=, and "
        "change weights in a post hook of trainer.optimizer's step"
    )


class Weights(nn.Module):
    """One Parameter or buffer for each distinct slice on this device.

    Args:
        model: the captured model, which may be on the host.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # Every name with the first name of the same tensor.
        self.names = canonical_names(model)
        self._order = {name: i for i, name in enumerate(self.names)}
        meta = getattr(model, "meta", {})
        self._channels_last: frozenset[str] = meta.get(CHANNELS_LAST, frozenset())
        self._is_repeated = bool(meta.get(IS_REPEATED))
        self.held: dict[WeightSlice, Tensor] = {}
        self._sorted: list[WeightSlice] = []

    def hold(self, piece: WeightSlice, tensor: Tensor) -> Tensor:
        """The tensor of a slice; `tensor`, moved to the device, if there is none yet."""
        piece = piece.renamed(self.names)
        if piece not in self.held:
            move(tensor, self._device)
            self.held[piece] = tensor
        return self.held[piece]

    def share(self, module: nn.Module, sources: Mapping[str, WeightSlice]) -> None:
        """Replace a module's tensors by the tensors held for their slices, and hold the others.

        Args:
            sources: slices by the names of the module's parameters and buffers.
        """
        for name, piece in sources.items():
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            held = self.hold(piece, getattr(owner, attribute))
            table = owner._parameters if isinstance(held, nn.Parameter) else owner._buffers
            table[attribute] = held  # type: ignore[assignment]

    def allocate(self) -> None:
        """Give memory to the held tensors of a model that a blueprint made."""
        for piece, tensor in self.held.items():
            if self._is_repeated and 0 in tensor.stride():
                is_last = piece.name in self._channels_last
                order = torch.channels_last if is_last else torch.contiguous_format
                tensor.data = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=order
                )

    def release_others(self, model: nn.Module) -> None:
        """Free all tensors of a model that are not held; the model is unusable afterwards. Its
        buffers are replaced, because constants of a graph may be tensors of the user's program."""
        kept = {id(tensor) for tensor in self.held.values()}
        for tensor in model.parameters():
            if id(tensor) not in kept:
                tensor.data = tensor.data.new_empty(0)
        for part in model.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and id(buffer) not in kept:
                    part._buffers[name] = buffer.new_empty(0)

    def refuse_others(self, model: nn.Module, freed: Collection[WeightSlice]) -> None:
        """Refuse the program's use of the model's parameters that `release_others` has freed.

        Args:
            freed: slices without memory between their uses, which a copy of the model would read.
        """
        kept = {id(tensor) for tensor in self.held.values()}
        for parameter in model.parameters():
            if id(parameter) not in kept:
                parameter.__class__ = ReleasedParameter
        for part in model.modules() if freed else ():
            part.register_state_dict_pre_hook(_refuse_use)
            vars(part)["__deepcopy__"] = _refuse_use

    def trainable(self) -> dict[WeightSlice, nn.Parameter]:
        """Parameters that are trained, in the order of the model."""
        if len(self._sorted) != len(self.held):
            self._sorted = sorted(self.held, key=lambda p: (self._order[p.name], p.intervals))
        return {
            piece: tensor
            for piece in self._sorted
            for tensor in (self.held[piece],)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }

    def parameters(self, recurse: bool = True) -> Iterable[nn.Parameter]:  # type: ignore[override]
        """The parameters that the optimizer updates."""
        return iter(self.trainable().values())


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every name of every parameter and buffer to the first name of the same tensor."""
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names[name] = first.setdefault(id(tensor), name)
    return names


class Use(NamedTuple):
    """A task that uses a slice: its device and stage, and the position of its operator."""

    device: int
    stage: int
    position: int


class Holders:
    """The devices that hold each slice, over all devices, and their tasks that use it."""

    def __init__(self, model: nn.Module) -> None:
        self._canonical = canonical_names(model)
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self._uses: dict[WeightSlice, set[Use]] = {}

    def add(self, pieces: Iterable[WeightSlice], use: Use) -> None:
        for piece in pieces:
            self._uses.setdefault(piece.renamed(self._canonical), set()).add(use)

    def merge(self, other: Holders) -> None:
        """Add the holders of another layout."""
        for piece, uses in other._uses.items():
            self._uses.setdefault(piece, set()).update(uses)

    def within(self, devices: Iterable[int]) -> Holders:
        """Those among some devices."""
        found, known = copy(self), set(devices)
        uses = ((p, {use for use in all_ if use.device in known}) for p, all_ in self._uses.items())
        found._uses = {piece: own for piece, own in uses if own}
        return found

    def of(self, piece: WeightSlice) -> tuple[int, ...]:
        """The devices that hold a slice, ascending."""
        return tuple(sorted({use.device for use in self._uses[piece]}))

    def uses(self, piece: WeightSlice) -> set[Use]:
        return self._uses[piece]

    def is_used_alike(self, piece: WeightSlice) -> bool:
        """Whether all devices that hold a slice use it in the same operators, and so in one order;
        false for a weight whose operators are on different devices."""
        users: dict[int, set[int]] = {}
        for use in self._uses[piece]:
            users.setdefault(use.position, set()).add(use.device)
        return all(devices == set(self.of(piece)) for devices in users.values())

    def dtype(self, piece: WeightSlice) -> torch.dtype:
        """Of a parameter's slice."""
        return self._dtypes[piece.name]

    def n_bytes(self, piece: WeightSlice) -> int:
        return self.dtype(piece).itemsize * piece.n_elements

    def items(self) -> list[tuple[WeightSlice, tuple[int, ...]]]:
        return [(piece, self.of(piece)) for piece in self._uses]

    def trained(self) -> list[tuple[WeightSlice, tuple[int, ...]]]:
        """Each trained slice with its devices, in the same order on every rank."""
        return sorted(item for item in self.items() if item[0].name in self._trained)

    def groups(self) -> list[tuple[int, ...]]:
        """Distinct sets of several devices, in the same order on every rank."""
        return sorted({self.of(piece) for piece in self._uses if len(self.of(piece)) > 1})

    def conflicts(self) -> set[str]:
        """Names of tensors whose slices overlap without being equal."""
        found: set[str] = set()
        by_name: dict[str, list[WeightSlice]] = {}
        for piece in self._uses:
            known = by_name.setdefault(piece.name, [])
            if any(piece.common(other) is not None for other in known):
                found.add(piece.name)
            known.append(piece)
        return found
