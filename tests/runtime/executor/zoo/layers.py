"""Parameters and layers as people have them: frozen, tied, scalar, in place, recurrent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.base import IMAGE, N_CLASSES, TOKENS, VOCABULARY, WIDTH, Net, ZooModel, named


class ScalarParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def middle(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.second(x))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class FrozenMiddle(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.thrown = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        self.thrown(x)
        return torch.tanh(self.second(x))


class Shared(Net):
    def middle(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.second(x))
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))).mean(1))


class TiedFunctional(Tied):
    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.embedding(tokens))).mean(1)
        return F.linear(x, self.embedding.weight)


class InPlace(nn.Module):
    """Additions and activations in place, of values that nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        y = self.b(x)
        y += x
        y = self.relu(y)
        return self.head((0.5 * y).mean((2, 3)))


class InPlaceRead(Net):
    """A value is read after it was changed in place."""

    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)
        z = y.view(-1, WIDTH)
        z.mul_(0.5)
        return torch.tanh(y) + x


class InPlaceSlice(Net):
    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x).clone()
        y[:, 0] = 0
        y[:, 1:3] *= 2
        return torch.tanh(y)


class LstmState(nn.Module):
    """The last state is what the head reads."""

    def __init__(self, *, is_cell: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.lstm = nn.LSTM(5, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, N_CLASSES)
        self.is_cell = is_cell

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, cell) = self.lstm(self.embedding(tokens))
        return self.head((cell if self.is_cell else hidden)[-1])


class GruState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.gru = nn.GRU(5, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4 * WIDTH, N_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        steps, hidden = self.gru(self.embedding(tokens))
        return self.head(torch.cat([steps[:, -1], hidden[0], hidden[1]], dim=1))


class CausalMask(nn.Module):
    """nanoGPT's attention: a lower triangle of ones, and -inf elsewhere by masked_fill."""

    def __init__(self) -> None:
        super().__init__()
        (n_steps,) = TOKENS
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(n_steps, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, N_CLASSES)
        ones = torch.tril(torch.ones(n_steps, n_steps))
        self.register_buffer("mask", ones.view(1, 1, n_steps, n_steps))

    def forward(self, tokens: Tensor) -> Tensor:
        n, t = tokens.size()
        assert t <= self.mask.shape[-1], f"a sequence of {t} steps"
        x = self.embedding(tokens) + self.positions(torch.arange(t, device=tokens.device))
        q, k, v = self.qkv(self.norm(x)).split(WIDTH, dim=2)
        q, k, v = (y.view(n, t, 3, WIDTH // 3).transpose(1, 2) for y in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        weights = weights.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = (F.softmax(weights, dim=-1) @ v).transpose(1, 2).contiguous().view(n, t, WIDTH)
        return self.head((x + y)[:, -1])


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 3)
        self.head = nn.Linear(WIDTH, N_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).permute(1, 0, 2)
        y, _ = self.attention(x, x, x)
        return self.head((x + y).mean(0))


def _conv(n_in: int, n_out: int, norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), norm, nn.SiLU())


class Unet(nn.Module):
    """Skips over stages, group norm, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down = _conv(3, 4, nn.GroupNorm(2, 4))
        self.inner = _conv(4, 8, nn.GroupNorm(2, 8))
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.join = _conv(8, 4, nn.GroupNorm(2, 4))
        self.head = nn.Linear(4, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = self.up(self.inner(F.max_pool2d(a, 2)))
        return self.head(self.join(torch.cat([a, b], dim=1)).mean((2, 3)))


class Normed(nn.Module):
    """Batch norms in training, one of them in eval mode inside a model in training."""

    def __init__(self, *, is_half_frozen: bool) -> None:
        super().__init__()
        self.a = _conv(3, 6, nn.BatchNorm2d(6))
        self.b = _conv(6, 6, nn.BatchNorm2d(6))
        if is_half_frozen:
            self.b[1].eval()
        self.volumes = nn.BatchNorm3d(2)
        self.head = nn.Linear(6, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return self.head(self.volumes(y.unflatten(1, (2, 3))).flatten(1, 2).mean((2, 3)))


class EvalDropout(Net):
    """A dropout in eval mode inside a model in training."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5).eval()

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.drop(x)))


class Cells(Net):
    """A recurrent cell whose first state is made in forward by the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), WIDTH, dtype=x.dtype, device=x.device)
        for _ in range(2):
            state = self.cell(x, state)
        return torch.tanh(self.second(state))


class Indexed(Net):
    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)[..., torch.arange(0, WIDTH)]
        a, b = y.chunk(2, dim=-1)
        y = torch.cat([torch.where(a > b, a, b), torch.einsum("nc,nc->nc", a, b)], dim=-1)
        return torch.tanh(y)


class Experts(Net):
    """Hard routing: rows chosen by a mask are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        chosen = self.second(x)[:, :2].argmax(-1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            y[chosen == k] += expert(x[chosen == k])
        return y


class Narrow(Net):
    """Parameters of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.second.to(dtype)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x.to(self.second.weight.dtype)).to(x.dtype))


class ComplexValues(Net):
    def middle(self, x: Tensor) -> Tensor:
        z = torch.complex(self.second(x), torch.tanh(x))
        z = z * z.conj().flip(1)
        z = torch.polar(F.softplus(z.abs()), z.angle())
        return z.real + z.imag


class ParameterLists(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(WIDTH)) for _ in range(2))
        self.token = nn.Parameter(torch.full((1, 1, WIDTH), 0.1))

    def middle(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(x.shape[0], -1, -1), self.second(x)[:, None]], dim=1)
        for weight in self.weights:
            rows = rows + torch.tanh(rows @ weight)
        return rows.mean(1)


LAYERS: dict[str, ZooModel] = {
    "plain": ZooModel(build=Net),
    **named(
        ScalarParameter, Frozen, FrozenMiddle, Unused, Shared, InPlaceRead, InPlaceSlice,
        EvalDropout, Cells, Indexed, Experts, ComplexValues, ParameterLists,
    ),
    **named(Tied, TiedFunctional, LstmState, GruState, CausalMask, SequenceFirst, shape=TOKENS),
    **named(InPlace, Unet, shape=IMAGE),
    "lstm_cell_state": ZooModel(build=lambda: LstmState(is_cell=True), shape=TOKENS),
    "batch_norm": ZooModel(
        build=lambda: Normed(is_half_frozen=False), shape=IMAGE, has_norm=True
    ),
    "half_frozen_norms": ZooModel(
        build=lambda: Normed(is_half_frozen=True), shape=IMAGE, has_norm=True
    ),
    "bf16_parameters": ZooModel(
        build=lambda: Narrow(torch.bfloat16), without=lambda: Narrow(torch.float32)
    ),
}  # fmt: skip
