"""Models for benchmarks/executor.py: models of the MODELS table, small ones, chains, MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.runtime.models import build_task, fit_options
from harness.runtime.models.attention import GroupedAttention
from harness.runtime.models.task import InputSpec, ModelOptions, Task, TextOptions
from harness.runtime.models.text import Block, Mlp
from harness.runtime.models.torchvision_import import import_torchvision

# Layers of an attention that are cut by columns.
PROJECTIONS = ("query", "key", "value")
# Heads of keys and values of the model with long sequences.
LONG_GROUPS = 2
_N_CLASSES = 10
_LENGTH = 64
_VOCABULARY = 1000
_IMAGE = InputSpec(name="images", shape=(3, 64, 64))


def vit_small() -> nn.Module:
    """ViT-S/16 for images of 64 pixels, with half of the layers."""
    model: nn.Module = import_torchvision("models").VisionTransformer(
        image_size=64, patch_size=16, num_layers=6, num_heads=6, hidden_dim=384, mlp_dim=1536,
        num_classes=_N_CLASSES,
    )  # fmt: skip
    return model


def whole(name: str) -> Task:
    """A model as its author wrote it, but without dropout; equal on all ranks."""
    if name == "vit_small":
        torch.manual_seed(1)
        return Task(model=vit_small(), inputs=(_IMAGE,), n_classes=_N_CLASSES)
    size = 0 if name == "lenet" else _IMAGE.shape[-1]
    asked = ModelOptions(dropout=0.0, image_size=size, n_classes=_N_CLASSES)
    return build_task(name, fit_options(name, asked), seed=1)


def _alexnet() -> nn.Sequential:
    model = import_torchvision("models").alexnet(num_classes=_N_CLASSES)
    tail = [layer for layer in model.classifier if not isinstance(layer, nn.Dropout)]
    return nn.Sequential(*model.features, model.avgpool, nn.Flatten(1), *tail)


def _resnet18() -> nn.Sequential:
    model = import_torchvision("models").resnet18(num_classes=_N_CLASSES)
    blocks = [
        b for group in (model.layer1, model.layer2, model.layer3, model.layer4) for b in group
    ]
    stem = [model.conv1, model.bn1, model.relu, model.maxpool]
    return nn.Sequential(*stem, *blocks, model.avgpool, nn.Flatten(1), model.fc)


def _mlp() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, _N_CLASSES))


def _block(width: int) -> Block:
    attention = GroupedAttention(width, 8, is_causal=True)
    mlp = Mlp(width, 4 * width, nn.GELU(approximate="tanh"), has_bias=True)
    return Block(width, attention, mlp, nn.LayerNorm, 0.0)


def _gpt(width: int = 256, n_blocks: int = 6) -> nn.Sequential:
    blocks = [_block(width) for _ in range(n_blocks)]
    return nn.Sequential(
        nn.Embedding(_VOCABULARY, width),
        *blocks,
        nn.LayerNorm(width),
        nn.Linear(width, _VOCABULARY),
    )


_CHAINS = {
    "alexnet": _alexnet,
    "resnet18": _resnet18,
    "mlp": _mlp,
    "gpt": _gpt,
    "wide gpt": lambda: _gpt(512, 6),
}


def chain(name: str) -> Task:
    """A model as a sequence of children, so that both sides can split it equally."""
    torch.manual_seed(1)
    model = _CHAINS[name]()
    for layer in model.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False  # a stage may begin with this layer, on a leaf tensor
    if name.endswith("gpt"):
        tokens = InputSpec(name="tokens", shape=(_LENGTH,), dtype=torch.int64, n_values=_VOCABULARY)
        return Task(model=model, inputs=(tokens,), n_classes=_VOCABULARY, target_shape=(_LENGTH,))
    spec = InputSpec(name="features", shape=(512,)) if name == "mlp" else _IMAGE
    return Task(model=model, inputs=(spec,), n_classes=_N_CLASSES)


class _SeparateProjections(GroupedAttention):
    """The same attention, which calls its projections as modules, as parallelize_module needs."""

    def forward(self, queries: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.form.head_dim)).transpose(1, 2)
            for project, x in ((self.query, queries), (self.key, memory), (self.value, memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.form.is_causal)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


def separate_projections(model: nn.Module) -> None:
    """Let attentions call their projections as modules."""
    for module in model.modules():
        if type(module) is GroupedAttention:
            module.__class__ = _SeparateProjections


class _GptBlocks(nn.Module):
    """Blocks of GPT-2 over features, and a small head."""

    def __init__(self, n_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_block(width) for _ in range(n_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def tensor_gpt(n_blocks: int, width: int = 512) -> Task:
    """Blocks of GPT-2, a target for each position."""
    torch.manual_seed(1)
    spec = InputSpec(name="features", shape=(_LENGTH, width))
    model = _GptBlocks(n_blocks, width)
    return Task(model=model, inputs=(spec,), n_classes=_N_CLASSES, target_shape=(_LENGTH,))


def long_llama() -> Task:
    """A Llama whose sequences are long beside its width, with grouped queries."""
    sizes = TextOptions(
        sequence_length=2048, vocabulary_size=512, n_layers=1, width=256, n_heads=8,
        n_groups=LONG_GROUPS, mlp_width=512,
    )  # fmt: skip
    return build_task("llama", fit_options("llama", ModelOptions(text=sizes)), seed=1)


def tensor_mlp(n_blocks: int, width: int = 480) -> Task:
    """Pairs of a widening and a narrowing layer, as in a transformer."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for block in range(n_blocks):
        is_last = block == n_blocks - 1
        narrow = nn.Linear(4 * width, 64 if is_last else width)
        layers += [nn.Linear(width, 4 * width), nn.ReLU(), narrow]
    spec = InputSpec(name="features", shape=(width,))
    return Task(model=nn.Sequential(*layers), inputs=(spec,), n_classes=64)
