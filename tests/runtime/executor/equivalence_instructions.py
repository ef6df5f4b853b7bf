"""Instructions of the models that `equivalence_programs` draws: kinds of values, parts, a function.

Kinds are s: (n, 6, 8), six steps of eight features; r: (n, 8), a row; p: (n, 3, 4, 4), a picture;
i: (n, 6), integers below 8; m: (n, 6, 8), a mask. All change the size of a value little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from equivalence_functions import (
    CAUSAL,
    Tripled,
    along,
    apply,
    assign,
    attend,
    causal,
    cells,
    counted,
    einsum,
    first,
    frames,
    hard,
    in_place,
    last_state,
    looped,
    masked_attention,
    normed_weight,
    on_copy,
    padded,
    put,
    rotary,
    rows,
    sampled,
    uneven,
    unpool,
    unstacked,
    windows,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N_VALUES = 8
Parts = Mapping[str, nn.Module | nn.Parameter | Tensor]


@dataclass(frozen=True)
class Instruction:
    """One line of INSTRUCTIONS.

    Attributes:
        takes, gives: kinds of its arguments and of its value.
        run: called with the module of its parts and its arguments.
        parts: makes modules, parameters and (as plain tensors) buffers, by name.
    """

    takes: str
    gives: str
    run: Callable[..., Tensor]
    parts: Callable[[], Parts] = dict


def _parameter(*shape: int) -> Callable[[], Parts]:
    return lambda: {"w": nn.Parameter(torch.randn(shape))}


def _one(make: Callable[[], nn.Module]) -> Callable[[], Parts]:
    return lambda: {"one": make()}


def _linear() -> nn.Module:
    return nn.Linear(8, 8)


INSTRUCTIONS: dict[str, Instruction] = {
    # Products
    "linear": Instruction("s", "s", apply, _one(_linear)),
    "unbiased": Instruction("s", "s", apply, _one(lambda: nn.Linear(8, 8, bias=False))),
    "rows": Instruction("s", "s", rows, _one(_linear)),
    "wide": Instruction("s", "s", apply, _one(lambda: nn.Sequential(
        nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))),
    "project": Instruction("s", "s", lambda m, y: y @ m.w, _parameter(8, 8)),
    "mix_steps": Instruction("s", "s", lambda m, y: m.w @ y, _parameter(6, 6)),
    "ein_features": Instruction("s", "s", einsum("nsc,cd->nsd"), _parameter(8, 8)),
    "ein_steps": Instruction("s", "s", einsum("nsc,ts->ntc"), _parameter(6, 6)),
    "ein_each": Instruction("s", "s", einsum("...sc,scd->...sd"), _parameter(6, 8, 8)),
    "ein_pairs": Instruction("ss", "s", einsum("nsc,nsd,cde->nse"), _parameter(8, 8, 8)),
    "ein_scale": Instruction("s", "s", einsum("nsc,c->nsc"), _parameter(8)),
    "ein_row": Instruction("sr", "s", einsum("nsc,nd,cd->nsd"), _parameter(8, 8)),
    "ein_sum": Instruction("s", "r", einsum("nsc,s->nc"), _parameter(6)),
    "ein_outer": Instruction("r", "s", einsum("nc,sc->nsc"), _parameter(6, 8)),
    "bilinear": Instruction("rr", "r", lambda m, x, y: m.one(x, y).tanh(),
                            _one(lambda: nn.Bilinear(8, 8, 8))),
    "baddbmm": Instruction("ss", "s", lambda m, x, y: torch.baddbmm(x, y @ y.mT * 0.1, y)),
    "self_product": Instruction("s", "s", lambda m, y: (y @ y.mT / 3).softmax(-1) @ y),
    "addmm": Instruction("r", "r",
        lambda m, y: torch.addmm(m.b, y, m.w, beta=0.5, alpha=2), lambda: {
        "w": nn.Parameter(torch.randn(8, 8)), "b": nn.Parameter(torch.randn(8))}),
    "row": Instruction("r", "r", apply, _one(_linear)),
    "spread": Instruction("r", "s", lambda m, y: m.one(y).view(-1, 6, 8),
                          _one(lambda: nn.Linear(8, 48))),
    "flat": Instruction("s", "r", lambda m, y: m.one(y.flatten(1)), _one(lambda: nn.Linear(48, 8))),
    # Norms
    "layer_norm": Instruction("s", "s", apply, _one(lambda: nn.LayerNorm(8))),
    "step_norm": Instruction("s", "s", apply, _one(lambda: nn.LayerNorm((6, 8)))),
    "group_norm": Instruction("s", "s", apply, _one(lambda: nn.GroupNorm(2, 6))),
    "instance_norm": Instruction("s", "s", along, _one(lambda: nn.InstanceNorm1d(8, affine=True))),
    "rms_norm": Instruction("s", "s", lambda m, y: F.rms_norm(y, (8,), m.w), _parameter(8)),
    "unit": Instruction("s", "s", lambda m, y: F.normalize(y, dim=-1)),
    "standard": Instruction(
        "s", "s", lambda m, y: (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 0.5)
    ),
    "batch_norm": Instruction("s", "s", along, _one(lambda: nn.BatchNorm1d(8))),
    "frozen_norm": Instruction("s", "s", along, _one(lambda: nn.BatchNorm1d(8).eval())),
    # Functions of elements
    "tanh": Instruction("s", "s", lambda m, y: torch.tanh(y)),
    "gelu": Instruction("s", "s", lambda m, y: F.gelu(y)),
    "relu": Instruction("s", "s", apply, _one(nn.ReLU)),
    "prelu": Instruction("s", "s", apply, _one(lambda: nn.PReLU(6))),
    "leaky": Instruction("s", "s", lambda m, y: F.leaky_relu(y, 0.1)),
    "softplus": Instruction("s", "s", lambda m, y: F.softplus(y)),
    "dropout": Instruction("s", "s", apply, _one(lambda: nn.Dropout(0.3))),
    "scaled": Instruction("s", "s", lambda m, y: y * m.w.exp(), _parameter()),
    "add_parameter": Instruction("s", "s", lambda m, y: y + m.w, _parameter(6, 8)),
    "add_view": Instruction("s", "s", lambda m, y: y + m.w.t()[1:7].flip(0), _parameter(8, 9)),
    "add_token": Instruction("s", "s", lambda m, y: torch.cat(
        [m.w.expand(y.shape[0], -1, -1), y[:, 1:]], dim=1), _parameter(1, 1, 8)),
    "detached_weight": Instruction("s", "s",
        lambda m, y: y + m.w.detach() * m.w.tanh(), _parameter(8)),
    "tripled": Instruction("s", "s", lambda m, y: 0.4 * Tripled.apply(y)),
    "no_grad": Instruction("s", "s", lambda m, y: y * y.detach().sigmoid()),
    "counted": Instruction("s", "s", counted, lambda: {
        "scale": torch.tensor(0.7), "divisor": torch.tensor([2], dtype=torch.int16)}),
    "add": Instruction("ss", "s", lambda m, x, y: x + 0.5 * y),
    "multiply": Instruction("ss", "s", lambda m, x, y: torch.tanh(x) * y),
    "subtract": Instruction("ss", "s", lambda m, x, y: torch.sub(x, y, alpha=0.5)),
    "lerp": Instruction("sss", "s", lambda m, x, y, z: torch.lerp(x, y, z.sigmoid())),
    "maximum": Instruction("ss", "s", lambda m, x, y: torch.maximum(x, y)),
    "clamp": Instruction("ss", "s", lambda m, x, y: torch.clamp(x, max=y.abs() + 1)),
    "gate": Instruction("s", "s", lambda m, y: F.glu(torch.cat([y, y.flip(-1)], dim=-1))),
    "broadcast": Instruction("sr", "s", lambda m, y, r: y + r.unsqueeze(1)),
    "expand": Instruction("sr", "s", lambda m, y, r: r.unsqueeze(1).expand_as(y) * y.sigmoid()),
    "softmax": Instruction("s", "s", lambda m, y: 4 * y.softmax(1)),
    "log_softmax": Instruction("s", "s", lambda m, y: 0.3 * F.log_softmax(y, -1)),
    "complex": Instruction("ss", "s", lambda m, x, y: (
        torch.complex(x, y) * torch.complex(y.tanh(), x.tanh()).conj()).imag),
    "rotary": Instruction("s", "s", rotary, _parameter(6, 4)),
    "spectrum": Instruction("s", "s", lambda m, y: torch.fft.irfft(
        torch.fft.rfft(y, dim=1) * m.w, n=6, dim=1), _parameter(4, 8)),
    # Cumulative, in order, moved
    "cumsum": Instruction("s", "s", lambda m, y: y.cumsum(1) * 0.4),
    "cumsum_back": Instruction("s", "s", lambda m, y: 0.3 * y.flip(2).cumsum(2).flip(2)),
    "cumprod": Instruction("s", "s", lambda m, y: y.sigmoid().cumprod(2) + y),
    "logcumsumexp": Instruction("s", "s", lambda m, y: torch.logcumsumexp(y, 1) * 0.5),
    "cummax": Instruction("s", "s", lambda m, y: torch.cummax(y, 1).values),
    "sort": Instruction("s", "s", lambda m, y: torch.sort(y, 1, descending=True)[0] + 0.1 * y),
    "roll": Instruction("s", "s", lambda m, y: torch.roll(y, (1, -2), (1, 2))),
    "flip": Instruction("s", "s", lambda m, y: y.flip(1, 2)),
    "turned": Instruction("s", "s", lambda m, y: y.transpose(1, 2).reshape(-1, 6, 8)),
    "steps_first": Instruction("s", "s", lambda m, y: torch.tanh(
        m.one(y.transpose(0, 1))).movedim(0, 1), _one(_linear)),
    "contiguous": Instruction("s", "s", lambda m, y: y.mT.contiguous().mT),
    "uneven": Instruction("s", "s", uneven),
    "unstacked": Instruction("s", "s", unstacked),
    "windows": Instruction("s", "s", windows),
    "repeated": Instruction("s", "s",
        lambda m, y: y[:, :3].repeat_interleave(2, 1) + y[:, 3:].repeat(1, 2, 1)),
    "strided": Instruction("s", "s", lambda m, y: torch.cat([y[:, ::2], y[:, 1::2]], 1)),
    "diagonal": Instruction("s", "s", lambda m, y: y + torch.diagonal(
        y[:, :, :6], dim1=1, dim2=2).unsqueeze(-1)),
    "triangle": Instruction("s", "s", lambda m, y: torch.tril(y, 2) + 0.1 * torch.triu(y)),
    "padded": Instruction("s", "s", lambda m, y: F.pad(
        y.mT, (2, 1), mode="circular")[..., 1:7].mT),
    "distance": Instruction("s", "s",
        lambda m, y: y + torch.cdist(y + 0.1, y.flip(1)).mean(-1, True)),
    # Indices and masks
    "argmax": Instruction("s", "i", lambda m, y: y.argmax(-1)),
    "quantize": Instruction("s", "i", lambda m, y: (y[..., 0] * 3).long() % 8),
    "positive": Instruction("s", "m", lambda m, y: y > 0),
    "larger": Instruction("ss", "m", lambda m, x, y: ~(x < y) | torch.isnan(x)),
    "known": Instruction("i", "m", lambda m, i: (i != 0).unsqueeze(-1).expand(-1, -1, 8)),
    "both": Instruction("mm", "m", lambda m, a, b: torch.logical_xor(a, b)),
    "embed": Instruction("i", "s", lambda m, i: m.one(i), _one(lambda: nn.Embedding(8, 8))),
    "embed_padded": Instruction(
        "i", "s", lambda m, i: m.one(i), _one(lambda: nn.Embedding(8, 8, padding_idx=2))
    ),
    "bag": Instruction("i", "r", lambda m, i: m.one(i), _one(lambda: nn.EmbeddingBag(8, 8))),
    "weighted_bag": Instruction("is", "r", lambda m, i, y: m.one(i, per_sample_weights=y[..., 0]),
                                _one(lambda: nn.EmbeddingBag(8, 8, mode="sum"))),
    "one_hot": Instruction("i", "s", lambda m, i: F.one_hot(i, 8).to(torch.float64)),
    "gather": Instruction("si", "s", lambda m, y, i: y.gather(
        2, i.unsqueeze(-1).expand(-1, -1, 8)) + y),
    "take": Instruction("si", "s", lambda m, y, i: y.gather(
        1, (i % 6).unsqueeze(-1).expand(-1, -1, 8))),
    "select": Instruction("s", "s", lambda m, y: y[:, [5, 0, 0, 3, 2, 1]]),
    "index_select": Instruction("s", "s", lambda m, y: y.index_select(2, m.at),
                                lambda: {"at": torch.tensor([1, 1, 0, 7, 6, 2, 3, 4])}),
    "scatter_add": Instruction("si", "s", lambda m, y, i: torch.zeros_like(y).scatter_add(
        1, (i % 6).unsqueeze(-1).expand(-1, -1, 8), y)),
    "scatter": Instruction("si", "s", lambda m, y, i: y.scatter(2, i.unsqueeze(-1), 0.5)),
    "index_add": Instruction("ss", "s", lambda m, x, y: x.index_add(
        1, torch.tensor([0, 2, 2]), y[:, :3])),
    "index_put": Instruction("ss", "s", lambda m, x, y: x.index_put(
        (torch.arange(x.shape[0])[:, None], torch.tensor([[0, 4]])), y[:, 1:3])),
    "by_rank": Instruction("s", "s", lambda m, y: y.gather(1, y.argsort(1).flip(1))),
    "where": Instruction("mss", "s", lambda m, c, x, y: torch.where(c, x, 0.3 * y)),
    "masked": Instruction("ms", "s", lambda m, c, y: y.masked_fill(c, 0.2)),
    "as_number": Instruction("ms", "s", lambda m, c, y: y * c + c.to(y.dtype)),
    "masked_softmax": Instruction("ms", "s", lambda m, c, y: 3 * torch.where(
        c, y, torch.finfo(y.dtype).min).softmax(-1)),
    "masked_mean": Instruction("ms", "r", lambda m, c, y: (y * c).sum(1) / c.sum(1).clamp(min=1)),
    "hard": Instruction("s", "s", hard),
    "topk": Instruction("s", "r", lambda m, y: y.topk(2, 1).values.sum(1)),
    # In place
    "relu_": Instruction("s", "s", lambda m, y: F.relu_(y)),
    "add_": Instruction("ss", "s", in_place(lambda y, z: y.add_(z, alpha=0.3))),
    "set_relu": Instruction("s", "s", apply, _one(lambda: nn.ReLU(inplace=True))),
    "set_steps": Instruction("ss", "s",
        in_place(lambda y, z: put(y, (slice(None), slice(1, 3)), z[:, 3:5]))),
    "set_end": Instruction("ss", "s",
        in_place(lambda y, z: put(y, (slice(None), slice(4, None)), z[:, :2]))),
    "set_view": Instruction("s", "s", in_place(lambda y: y.view(y.shape[0], -1)[:, ::5].mul_(0.5))),
    "set_turned": Instruction("s", "s", in_place(lambda y: y.transpose(1, 2)[:, 2].add_(0.3))),
    "set_column": Instruction("s", "s", on_copy(lambda y: put(y, (..., 3), 0.0))),
    "set_mask": Instruction("sm", "s", on_copy(lambda y, c: put(y, c, 0.1))),
    "set_masked": Instruction("sm", "s", on_copy(lambda y, c: y.masked_fill_(c, -0.3))),
    "set_copy": Instruction("ss", "s",
        on_copy(assign(lambda y: y[..., 2:6], lambda z: z[..., ::2]))),
    "set_scatter": Instruction("si", "s",
        on_copy(lambda y, i: y.scatter_(2, i.unsqueeze(-1), 0.7))),
    "set_diagonal": Instruction("s", "s",
        on_copy(lambda y: torch.diagonal(y, dim1=1, dim2=2).zero_())),
    "set_list": Instruction("ss", "s",
        on_copy(lambda y, z: put(y, (slice(None), [0, 4]), z[:, :2]))),
    "set_chunk": Instruction("ss", "s",
        on_copy(lambda y, z: y.narrow(1, 2, 2).mul_(z[:, :2].tanh()))),
    "set_later": Instruction("sr", "s", on_copy(lambda y, r: y.select(1, 5).add_(r))),
    # Reductions
    "mean": Instruction("s", "r", lambda m, y: y.mean(1)),
    "last": Instruction("s", "r", lambda m, y: y[:, -1]),
    "amax": Instruction("s", "r", lambda m, y: y.amax(1)),
    "max": Instruction("s", "r", lambda m, y: y.max(1)[0] + y.min(dim=1).values),
    "logsumexp": Instruction("s", "r", lambda m, y: torch.logsumexp(y, 1)),
    "norm": Instruction("s", "r", lambda m, y: torch.linalg.vector_norm(y + 0.1, dim=1)),
    "var": Instruction("s", "r", lambda m, y: y.var(1).tanh()),
    "median": Instruction("s", "r", lambda m, y: y.median(1).values),
    "prod": Instruction("s", "r", lambda m, y: (1 + 0.3 * torch.tanh(y)).prod(1)),
    # Recurrent and attentive layers
    "lstm": Instruction("s", "s", first, _one(lambda: nn.LSTM(8, 8, batch_first=True))),
    "gru": Instruction("s", "s",
        first, _one(lambda: nn.GRU(8, 4, 2, batch_first=True, bidirectional=True))),
    "projected": Instruction("s", "s",
        first, _one(lambda: nn.LSTM(8, 9, proj_size=8, batch_first=True))),
    "rnn_state": Instruction("s", "r",
        last_state, _one(lambda: nn.RNN(8, 8, 2, batch_first=True))),
    "lstm_state": Instruction("s", "r", last_state, _one(lambda: nn.LSTM(8, 8, batch_first=True))),
    "gru_cell": Instruction("rr", "r",
        lambda m, x, y: m.one(x, torch.tanh(y)), _one(lambda: nn.GRUCell(8, 8))),
    "looped": Instruction("s", "s", looped, _one(lambda: nn.GRUCell(8, 8))),
    "lstm_cells": Instruction("s", "s", cells, _one(lambda: nn.LSTMCell(8, 8))),
    "attention": Instruction("s", "s",
        attend, _one(lambda: nn.MultiheadAttention(8, 2, batch_first=True))),
    "padded_attention": Instruction("si", "s",
        padded, _one(lambda: nn.MultiheadAttention(8, 2, batch_first=True))),
    "masked_attention": Instruction("sm", "s", masked_attention),
    "causal": Instruction("s", "s", causal, lambda: {k: make() for k, make in CAUSAL.items()}),
    "encoder": Instruction("s", "s", apply, _one(lambda: nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, batch_first=True, norm_first=True))),
    "checkpoint": Instruction("s", "s",
        lambda m, y: checkpoint(m.one, y, use_reentrant=False), _one(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))),
    # Pictures
    "picture": Instruction("s", "p", lambda m, y: y.view(-1, 3, 4, 4)),
    "steps": Instruction("p", "s", lambda m, p: p.permute(0, 2, 3, 1).reshape(-1, 6, 8)),
    "conv": Instruction("p", "p", apply, _one(lambda: nn.Conv2d(3, 3, 3, padding=1))),
    "depthwise": Instruction("p", "p",
        apply, _one(lambda: nn.Conv2d(3, 3, 3, padding=2, dilation=2, groups=3))),
    "mirrored": Instruction("p", "p",
        apply, _one(lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"))),
    "strided_conv": Instruction("p", "p", lambda m, p: m.two(m.one(p)), lambda: {
        "one": nn.Conv2d(3, 4, 2, stride=2), "two": nn.ConvTranspose2d(4, 3, 2, stride=2)}),
    "transposed": Instruction("p", "p", lambda m, p: m.one(p[:, :, ::2, ::2]), _one(
        lambda: nn.ConvTranspose2d(3, 3, 3, stride=2, padding=1, output_padding=1))),
    "deep": Instruction("p", "p", lambda m, p: m.one(p.unsqueeze(1)).squeeze(1), _one(
        lambda: nn.Conv3d(1, 1, 3, padding=1))),
    "conv1d": Instruction("s", "s", along, _one(lambda: nn.Conv1d(8, 8, 3, padding=1, groups=2))),
    "transposed1d": Instruction("s", "s", lambda m, y: m.one(y.mT[..., :3]).mT, _one(
        lambda: nn.ConvTranspose1d(8, 8, 2, stride=2))),
    "frames": Instruction("s", "s", frames, _one(lambda: nn.Conv2d(1, 1, 3, padding=1))),
    "normed_weight": Instruction("p", "p", normed_weight, _one(lambda: nn.Conv2d(3, 3, 3))),
    "max_pool": Instruction("p", "p", lambda m, p: F.max_pool2d(p, 3, stride=1, padding=1)),
    "avg_pool": Instruction("p", "p",
        lambda m, p: F.interpolate(F.avg_pool2d(p, 2), scale_factor=2)),
    "bilinear_pool": Instruction("p", "p", lambda m, p: F.interpolate(
        F.adaptive_avg_pool2d(p, (3, 2)), size=(4, 4), mode="bilinear")),
    "unpool": Instruction("p", "p", unpool),
    "sampled": Instruction("p", "p", sampled),
    "patches": Instruction("p", "p", lambda m, p: F.fold(F.unfold(p, 2, stride=1), 4, 2) * 0.3),
    "shuffle": Instruction("p", "p",
        lambda m, p: F.pixel_shuffle(F.pixel_unshuffle(p, 2).flip(1), 2)),
    "channel_norm": Instruction("p", "p", apply, _one(lambda: nn.GroupNorm(1, 3))),
    "response_norm": Instruction("p", "p", apply, _one(lambda: nn.LocalResponseNorm(2))),
    "picture_norm": Instruction("p", "p", apply, _one(lambda: nn.BatchNorm2d(3))),
    "channels_last": Instruction("p", "p",
        lambda m, p: p.contiguous(memory_format=torch.channels_last)),
    "squeeze": Instruction("p", "p",
        lambda m, p: p * m.one(p.mean((2, 3))).sigmoid()[:, :, None, None],
                           _one(lambda: nn.Linear(3, 3))),
}  # fmt: skip
