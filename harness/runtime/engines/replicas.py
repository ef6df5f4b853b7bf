"""Check that replicas of a model are bitwise equal, by comparing fingerprints of parameters."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import ModelError, VerificationError
from harness.runtime.ranks.gather import gather_values
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


def digest(model: nn.Module) -> str:
    """Hash of the fingerprint, to compare runs by."""
    return hashlib.sha256(fingerprint(model).numpy().tobytes()).hexdigest()[:16]


def verify_replicas(model: nn.Module, world: World) -> str:
    """Check that every rank holds the same parameters, and return a digest of them; all ranks must
    call it.

    Raises:
        VerificationError: names a rank and the first parameter that differs; raised on every rank.
    """
    if world.size == 1:
        return digest(model)
    local = fingerprint(model).to(world.wire)
    gathered = [torch.empty_like(local) for _ in range(world.size)]
    dist.all_gather(gathered, local)
    names = [name for name, _ in model.named_parameters()]
    for rank, other in enumerate(gathered):
        unequal = (other != gathered[0]).any(dim=1).nonzero()
        if len(unequal):
            raise VerificationError(
                f"replicas differ: ranks 0 and {rank} hold unequal {names[int(unequal[0])]} after "
                "training"
            )
    return digest(model)


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
