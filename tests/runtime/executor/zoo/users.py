"""Models as users write them by themselves, with losses, masks and several inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.base import ZooModel
from zoo.libraries import LibraryModel

_V, _T, _D, _C = 20, 6, 12, 5


def _tokens(n_values: int = _V) -> Tensor:
    return (torch.arange(2 * _T) * (n_values - 1) // (2 * _T - 1)).view(2, _T)


class Seq2SeqTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(_V, _D), nn.Embedding(_V, _D)
        self.positions = nn.Parameter(torch.randn(1, _T, _D) * 0.1)
        self.body = nn.Transformer(_D, 3, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(_D, _V)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        y = self.body(
            self.source(src) + self.positions,
            self.target(tgt) + self.positions,
            tgt_mask=mask,
            src_key_padding_mask=src == 0,
        )
        return self.head(y)


class Autoencoder(nn.Module):
    """Its loss is inside; nothing is random."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ELU(), nn.Conv2d(4, 8, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(4, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Any:
        reconstruction = self.decoder(self.encoder(x))
        return {"loss": F.mse_loss(reconstruction, x), "reconstruction": reconstruction}


class EdgeList(nn.Module):
    """Each sample has edges of its own; scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, _D), nn.Linear(_D, _C)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = self.a(x)
        index = source.unsqueeze(-1).expand(-1, -1, x.size(-1))
        sent = torch.gather(x, 1, index)
        got = torch.zeros_like(x).scatter_add_(1, target.unsqueeze(-1).expand_as(sent), sent)
        return self.head(F.relu(got + x).sum(1))


class Fourier(nn.Module):
    """The spectral layer of a Fourier neural operator, its weights complex."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.local = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1)
        self.weight = nn.Parameter(0.1 * torch.randn(6, 6, 3, 3, dtype=torch.cfloat))
        self.project = nn.Conv2d(6, _C, 1)

    def spectral(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        ft = torch.fft.rfft2(x)
        out = torch.zeros(n, 6, x.size(-2), x.size(-1) // 2 + 1, dtype=ft.dtype, device=x.device)
        out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", ft[:, :, :3, :3], self.weight)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return self.project(F.gelu(self.spectral(x) + self.local(x)))


class MaskedAttention(nn.Module):
    def __init__(self, needs_weights: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(_V, _D, padding_idx=0)
        self.attend = nn.MultiheadAttention(_D, 3, batch_first=True)
        self.norm, self.head = nn.LayerNorm(_D), nn.Linear(_D, _C)
        self.needs_weights = needs_weights

    def forward(self, tokens: Tensor) -> Tensor:
        x, t = self.embed(tokens), tokens.size(1)
        causal = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
        padding = tokens.eq(0) & (torch.arange(t, device=x.device) > 0)
        y, weights = self.attend(
            x, x, x, attn_mask=causal, key_padding_mask=padding, need_weights=self.needs_weights
        )
        x = self.norm(x + y)
        if weights is not None:
            x = weights.detach() @ x
        return self.head(x.mean(1))


class Spatial(nn.Module):
    """A spatial transformer: affine_grid and grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(True))
        self.theta = nn.Linear(4 * 3 * 3, 6)
        with torch.no_grad():
            self.theta.bias.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.head = nn.Linear(3 * 64, _C)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(self.locate(x).view(-1, 36)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.head(x.flatten(1))


class Unpooled(nn.Module):
    """SegNet: a max pool's indices are read by an unpooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, _C, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y, where = self.pool(self.a(x))
        return self.b(self.unpool(torch.tanh(y), where))


class Scan(nn.Module):
    """A selective state space: a loop over steps and a cumulative sum."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.dt = nn.Linear(4, 2 * _D), nn.Linear(_D, _D)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, 4.0)).repeat(_D, 1))
        self.bc, self.head = nn.Linear(_D, 6), nn.Linear(_D, _C)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.inward(x).chunk(2, dim=-1)
        dt = F.softplus(self.dt(x))
        b, c = self.bc(x).split([3, 3], dim=-1)
        decay = torch.exp(torch.einsum("bld,dn->bldn", dt, -torch.exp(self.log_a)))
        put = torch.einsum("bld,bln,bld->bldn", dt, b, x)
        h = torch.zeros(x.size(0), _D, 3, device=x.device, dtype=x.dtype)
        ys = []
        for k in range(x.size(1)):
            h = decay[:, k] * h + put[:, k]
            ys.append(torch.einsum("bdn,bn->bd", h, c[:, k]))
        y = torch.stack(ys, 1) * F.silu(gate) + torch.cumsum(x, dim=1)
        return self.head(y[:, -1])


class DynamicConv(nn.Module):
    """Each sample has a kernel of its own: the batch becomes groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
        self.kernels = nn.Parameter(0.3 * torch.randn(3, 6, 4, 3, 3))
        self.head = nn.Linear(6, _C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, h, w = x.shape
        routes = torch.softmax(self.route(x.mean((2, 3))), dim=1)
        kernels = torch.einsum("bk,koihw->boihw", routes, self.kernels).reshape(b * 6, c, 3, 3)
        y = F.conv2d(x.reshape(1, b * c, h, w), kernels, padding=1, groups=b)
        return self.head(y.view(b, 6, h, w).mean((2, 3)))


class Contrastive(nn.Module):
    """CLIP: each image is compared with all texts; a flag asks for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, _D)
        )
        self.text = nn.EmbeddingBag(_V, _D)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor, *, return_loss: bool = False) -> Any:
        image, text = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        scores = self.scale.exp() * image @ text.t()
        if not return_loss:
            return {"logits_per_image": scores}
        own = torch.arange(len(scores), device=scores.device)
        return {"loss": (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2}


class Transcriber(nn.Module):
    """The loss of connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(4, _D, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * _D, _C)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        chances = self.head(self.body(x)[0]).log_softmax(-1)
        n, n_steps = x.shape[:2]
        lengths = torch.full((n,), n_steps, dtype=torch.long, device=x.device)
        loss = F.ctc_loss(
            chances.transpose(0, 1), labels, lengths, (labels > 0).sum(1), reduction="sum"
        )
        return {"loss": loss / n, "chances": chances}


class Packed(nn.Module):
    """An RNN over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(_V, _D), nn.LSTM(_D, _D, batch_first=True)
        self.head = nn.Linear(_D, _C)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.body(packed)
        return self.head(hidden[-1])


def _image() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 8, 8)}


USERS: dict[str, Any] = {
    "transformer": lambda: (Seq2SeqTransformer(), {"src": _tokens(), "tgt": _tokens()}),
    "autoencoder": Autoencoder,
    "edge_list": lambda: (
        EdgeList(), {"x": torch.randn(2, 5, 4), "source": _tokens(5), "target": _tokens(5)}
    ),
    "fourier": lambda: (Fourier(), _image()),
    "masked_attention": lambda: (MaskedAttention(), {"tokens": _tokens()}),
    "spatial": lambda: (Spatial(), _image()),
    "unpooled": lambda: (Unpooled(), _image()),
    "contrastive": lambda: (
        Contrastive(),
        {"image": torch.randn(2, 3, 8, 8), "text": _tokens(), "return_loss": True},
    ),
    "transcriber": lambda: (
        Transcriber(), {"x": torch.randn(2, 8, 4), "labels": torch.tensor([[1, 2], [3, 4]])}
    ),
    "packed": lambda: (Packed(), {"tokens": _tokens(), "lengths": torch.tensor([3, _T])}),
    "scan": lambda: (Scan(), (torch.randn(2, 5, 4),)),
    "dynamic_conv": lambda: (DynamicConv(), _image()),
}  # fmt: skip
OWN: dict[str, ZooModel] = {
    f"user_{name}": LibraryModel(build=build, side=8) for name, build in USERS.items()
}
