"""How far a training by a strategy is from the one on a single device, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import torch
from equivalence_reference import Trace
from torch import Tensor

# Differences are relative to the largest element of their tensor. Where that is tiny against the
# whole model's (a convolution's bias before a normalisation has no gradient but rounding), they are
# relative to this part of the model's largest.
_FLOOR = 1e-3
# Sums in another order differ by 1e-16 times what they cancel. Where weights start 2e-16 off, three
# steps on one device differ by 1e-15 (mlp) to 5e-13 (resnet152); a term that is missing or counted
# twice shows at 1e-3 and more. By AdamW, what has no gradient but rounding (a key's bias) moves by
# rounding over its epsilon of 1e-8, and the same experiment gives up to 1e-10 (vit).
FLOAT64_TOLERANCES = {"sgd": 1e-9, "slow sgd": 1e-9, "adamw": 1e-7}


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The largest relative difference, and of what."""

    of: str
    difference: float


def _named(trace: Trace) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for step, loss in enumerate(trace.losses):
        yield f"loss of step {step}", {"": torch.tensor(loss, dtype=torch.float64)}
        if step < len(trace.gradients):
            yield f"gradient of step {step}", trace.gradients[step]
    yield "state at the end", trace.state


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: Tensor) -> float:
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def _difference(found: Tensor, wanted: Tensor, scale: float) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    difference = _largest(_wide(found) - _wide(wanted))
    if difference != difference:
        return float("inf")
    return difference / scale if scale else (float("inf") if difference else 0.0)


def differences(found: Trace, wanted: Trace) -> Iterator[Worst]:
    """Every tensor's difference, in the order in which training makes them.

    A tensor that only one of the two has counts as infinitely far.
    """
    for (what, mine), (_, theirs) in zip(_named(found), _named(wanted), strict=True):
        model_wide = max(map(_largest, theirs.values()), default=0.0)
        for name in dict.fromkeys([*theirs, *mine]):
            of = f"{what} {name}".strip()
            if name not in mine or name not in theirs:
                yield Worst(of=f"{of} (missing)", difference=float("inf"))
                continue
            scale = max(_largest(theirs[name]), _FLOOR * model_wide)
            yield Worst(of=of, difference=_difference(mine[name], theirs[name], scale))


def worst(found: Trace, wanted: Trace) -> Worst:
    return max(differences(found, wanted), key=lambda one: one.difference)


def first_beyond(found: Trace, wanted: Trace, tolerance: float) -> Worst | None:
    """The first tensor, in the order of training, that is too far."""
    return next((one for one in differences(found, wanted) if one.difference > tolerance), None)


def rounded_tolerance(rounded: Trace, split: Iterable[Trace], exact: Trace) -> float:
    """What fewer bits may differ from float64: ten times what one device does, which sums the same
    terms in one other order, or three times what it does by other microbatches."""
    others = [3 * worst(one, exact).difference for one in split]
    return max(10 * worst(rounded, exact).difference, 1e-5, *others)
