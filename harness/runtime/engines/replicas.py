"""Check that replicas of parameters are bitwise equal, by comparing fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.domain.partition import Interval
from harness.errors import ModelError, VerificationError
from harness.runtime.ranks.gather import gather_objects, gather_values
from harness.runtime.ranks.world import World

# Bytes per chunk: each takes up to three times as many, which should not affect peaks of memory.
_CHUNK_BYTES = 8 << 20


def fingerprint_of(tensor: Tensor) -> Tensor:
    """Sums of the words of eight bytes, and of words times index, modulo 2^64: two int64."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _CHUNK_BYTES):
        part = flat[start : start + _CHUNK_BYTES]
        if n_lacking := -len(part) % 8:
            part = F.pad(part, (0, n_lacking))
        elif part.storage_offset() % 8:  # of a view, such as one of an RNN's weights in one block
            part = part.clone()
        words = part.view(torch.int64)
        indices = torch.arange(start // 8 + 1, start // 8 + 1 + len(words), device=words.device)
        sums += torch.stack([words.sum(), (words * indices).sum()])
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
