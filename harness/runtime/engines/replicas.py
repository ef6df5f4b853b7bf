"""Check that replicas of parameters are bitwise equal, by comparing fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.domain.partition import Interval
from harness.errors import ModelError, VerificationError
from harness.runtime.ranks.gather import gather_objects, gather_values
from harness.runtime.ranks.world import World

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements per chunk: each takes 24 bytes, which should not affect peaks of memory.
_CHUNK_ELEMENTS = 1 << 20


def fingerprint_of(parameter: Tensor) -> Tensor:
    """Sums of the elements' bits, and of bits times index, modulo 2^64: two int64."""
    dense = parameter.detach().contiguous()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        bits = part.view(_BITS[flat.element_size()]).to(torch.int64)
        indices = torch.arange(start + 1, start + 1 + bits.numel(), device=bits.device)
        sums += torch.stack([bits.sum(), (bits * indices).sum()])
    return sums


def fingerprint(model: nn.Module) -> Tensor:
    """Fingerprints of all parameters: (parameters, 2) int64, on the host."""
    rows = [fingerprint_of(parameter) for parameter in model.parameters()]
    return torch.stack(rows).cpu() if rows else torch.zeros((1, 2), dtype=torch.int64)


# A tensor's name, and its intervals in the model's tensor if it is a slice.
HeldKey = tuple[str, tuple[Interval, ...]]


def verify_copies(tensors: Mapping[HeldKey, Tensor], world: World) -> str:
    """Check that ranks hold equal bits of what several hold; all ranks must call it.

    Returns:
        A digest of all tensors, to compare runs of one strategy.

    Raises:
        VerificationError: on every rank, naming two ranks and the parameter that differs.
    """
    mine = {key: fingerprint_of(tensor).tolist() for key, tensor in tensors.items()}
    first: dict[HeldKey, tuple[int, list[int]]] = {}
    for rank, prints in enumerate(gather_objects(world, mine)):
        for key, bits in prints.items():
            holder, known = first.setdefault(key, (rank, bits))
            if bits != known:
                raise VerificationError(
                    f"replicas differ: ranks {holder} and {rank} hold unequal {key[0]} after "
                    "training"
                )
    listed = [(key, first[key][1]) for key in sorted(first)]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def verify_replicas(model: nn.Module, world: World) -> str:
    """The same for parameters that every rank holds."""
    return verify_copies({(name, ()): p for name, p in model.named_parameters()}, world)


def check_alike(model: nn.Module, world: World) -> None:
    """Check that every rank has built the same model; all ranks must call it.

    Raises:
        ModelError: names a rank and the first tensor that differs; raised on every rank.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    mine = {name: fingerprint_of(tensor).tolist() for name, tensor in tensors}
    first, *others = gather_values(mine, dict[str, Any], world)
    for rank, other in enumerate(others, start=1):
        unequal = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if unequal:
            raise ModelError(
                f"ranks 0 and {rank} have unequal {unequal[0]}: call torch.manual_seed before the "
                "model is made, or load the same weights on all ranks"
            )
