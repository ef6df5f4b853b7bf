"""Functions of the instructions in `equivalence_instructions`: of a module of parts, and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_STEPS, WIDTH = 6, 8


class Tripled(torch.autograd.Function):
    """Twice the value; three times the gradient, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(3)


def apply(m: Any, y: Tensor) -> Tensor:
    found: Tensor = m.one(y)
    return found


def along(m: Any, y: Tensor) -> Tensor:
    """A module over (n, features, steps)."""
    found: Tensor = m.one(y.transpose(1, 2)).transpose(1, 2)
    return found


def in_place(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function that changes its first argument in place, and returns another name of it."""

    def run(m: Any, y: Tensor, *others: Tensor) -> Tensor:
        change(y, *others)
        return y

    return run


def on_copy(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """The same with a copy of its own."""

    def run(m: Any, y: Tensor, *others: Tensor) -> Tensor:
        copied = 1.0 * y
        change(copied, *others)
        return copied

    return run


def einsum(equation: str) -> Callable[..., Tensor]:
    return lambda m, *values: torch.einsum(equation, *values, m.w)


def assign(target: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor]) -> Any:
    return lambda y, z: target(y).copy_(value(z))


def put(y: Tensor, at: Any, value: Any) -> None:
    y[at] = value


def last_state(m: Any, y: Tensor) -> Tensor:
    _, state = m.one(y)
    state = state[0] if isinstance(state, tuple) else state
    return state.sum(0)


def first(m: Any, y: Tensor, *others: Tensor) -> Tensor:
    found: Tensor = m.one(y, *others)[0]
    return found


def looped(m: Any, y: Tensor) -> Tensor:
    state = torch.zeros(y.shape[0], WIDTH, dtype=y.dtype, device=y.device)
    steps = []
    for step in y.unbind(1):
        state = m.one(step, state)
        steps.append(state)
    return torch.stack(steps, dim=1)


def cells(m: Any, y: Tensor) -> Tensor:
    hidden, cell = m.one(y[:, 0])
    for k in range(1, 3):
        hidden, cell = m.one(y[:, k], (hidden, cell))
    return y + (hidden * cell)[:, None]


def attend(m: Any, y: Tensor, *masks: Tensor) -> Tensor:
    found: Tensor = m.one(y, y, y, need_weights=False)[0]
    return found


def padded(m: Any, y: Tensor, indices: Tensor) -> Tensor:
    is_padding = torch.cat([indices[:, :1] < 0, indices[:, 1:] == 0], dim=1)
    found: Tensor = m.one(y, y, y, key_padding_mask=is_padding)[0]
    return found


def heads(y: Tensor) -> Tensor:
    return y.unflatten(2, (2, 4)).transpose(1, 2)


def masked_attention(m: Any, y: Tensor, mask: Tensor) -> Tensor:
    seen = mask[:, None, :, :N_STEPS] | torch.eye(N_STEPS, dtype=torch.bool)
    mixed = F.scaled_dot_product_attention(heads(y), heads(y), heads(y), attn_mask=seen)
    return mixed.transpose(1, 2).flatten(2)


def causal(m: Any, y: Tensor) -> Tensor:
    q, k, v = m.one(y).chunk(3, dim=-1)
    scores = heads(q) @ heads(k).mT / 2
    scores = scores.masked_fill(m.seen == 0, float("-inf"))
    return m.out((scores.softmax(-1) @ heads(v)).transpose(1, 2).reshape(y.shape))


def uneven(m: Any, y: Tensor) -> Tensor:
    a, b, c = y.split([1, 3, 4], dim=2)
    first, *rest = y.tensor_split(4, dim=1)
    return torch.cat([c, a.sigmoid(), b], dim=2) + torch.cat([*rest, first], dim=1)


def unstacked(m: Any, y: Tensor) -> Tensor:
    columns = y.unbind(2)
    return torch.stack([columns[k] * columns[-k] for k in range(WIDTH)], dim=-1).tanh()


def windows(m: Any, y: Tensor) -> Tensor:
    return F.pad(y, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1)


def hard(m: Any, y: Tensor) -> Tensor:
    soft = y.softmax(-1)
    hard = F.one_hot(soft.argmax(-1), WIDTH).to(y.dtype)
    return hard + soft - soft.detach()


def rotary(m: Any, y: Tensor) -> Tensor:
    turned = torch.polar(torch.ones_like(y[..., :4]), m.w.expand(y.shape[0], N_STEPS, 4))
    return torch.view_as_real(torch.view_as_complex(y.unflatten(2, (4, 2))) * turned).flatten(2)


def rows(m: Any, y: Tensor) -> Tensor:
    return m.one(y.reshape(-1, WIDTH)).reshape(y.shape[0], N_STEPS, WIDTH)


def frames(m: Any, y: Tensor) -> Tensor:
    return m.one(y.reshape(-1, 1, 2, 4)).view(-1, N_STEPS, WIDTH)


def counted(m: Any, y: Tensor) -> Tensor:
    return torch.tanh(y) * m.scale / m.divisor


def normed_weight(m: Any, p: Tensor) -> Tensor:
    weight = m.one.weight
    mean = weight.mean(dim=(1, 2, 3), keepdim=True)
    return F.conv2d(p, weight - mean, m.one.bias, padding=1)


def unpool(m: Any, p: Tensor) -> Tensor:
    most, at = F.max_pool2d(p, 2, return_indices=True)
    return F.max_unpool2d(most, at, 2)


def sampled(m: Any, p: Tensor) -> Tensor:
    grid = torch.tanh(p[:, :2]).permute(0, 2, 3, 1)
    return F.grid_sample(p, grid, align_corners=False)


CAUSAL = {
    "one": lambda: nn.Linear(WIDTH, 3 * WIDTH),
    "out": lambda: nn.Linear(WIDTH, WIDTH),
    "seen": lambda: torch.tril(torch.ones(N_STEPS, N_STEPS)),
}
