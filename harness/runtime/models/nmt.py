"""A network that translates: stacks of LSTMs with attention after the decoder.

Luong et al., Effective Approaches to Attention-based Neural Machine Translation, 2015; Wu et al.,
"GNMT", 2016 (stacks with residuals).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.runtime.models.attention import GroupedAttention
from harness.runtime.models.task import PADDING, ModelOptions


class LstmStack(nn.Module):
    """LSTM layers, each a module of its own, so that a pipeline can cut between them; with
    residuals from the second on."""

    def __init__(self, width: int, n_layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(n_layers)
        )
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, length, width) to the last layer's outputs, of the same shape."""
        for number, (layer, dropout) in enumerate(zip(self.layers, self.dropouts, strict=True)):
            y = dropout(layer(x)[0])
            x = x + y if number else y
        return x


class Nmt(nn.Module):
    """Called with source and target tokens (n, length), the target shifted right.

    Source padding is masked in the attention. The decoder starts from a state of zeros.
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        sizes = options.text
        self.source_tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.target_tokens = nn.Embedding(sizes.vocabulary_size, sizes.width)
        self.encoder = LstmStack(sizes.width, sizes.n_layers, 0.2)
        self.decoder = LstmStack(sizes.width, sizes.n_layers, 0.2)
        self.attention = GroupedAttention(
            sizes.width, sizes.n_heads, n_groups=sizes.n_groups, has_bias=False
        )
        self.combine = nn.Linear(2 * sizes.width, sizes.width, bias=False)
        self.activation = nn.Tanh()
        self.output = nn.Linear(sizes.width, sizes.vocabulary_size, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source_tokens(source))
        x = self.decoder(self.target_tokens(target))
        context = self.attention(x, memory, source.ne(PADDING))
        combined = self.activation(self.combine(torch.cat((context, x), dim=2)))
        logits: Tensor = self.output(combined)
        return logits
