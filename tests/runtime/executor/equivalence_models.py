"""Narrow versions of every model that can be trained, in float64, as tasks of the executor's tests.

The topologies are the real ones (torchvision's own classes); widths, depths and images are small,
so that hundreds of cases take minutes. Weights are drawn so that no parameter has a special value:
nothing vanishes, no bias is 0, no scale is 1, and a term that is missing cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from equivalence_attentions import ATTENTIONS
from equivalence_attentions import SHAPE as TOKENS_SHAPE
from equivalence_constructs import CONSTRUCTS, N_TOKENS
from equivalence_mixtures import MIXTURES, SHAPE
from equivalence_modules import (
    N_CLASSES,
    Branchy,
    Disordered,
    Exported,
    MergedRows,
    NormedWeights,
    Perceptron,
    TimeFirstLstm,
    TinyLstm,
    Tokens,
    TrackedNorms,
)
from equivalence_operators import OPERATORS, SHAPED
from equivalence_programs import is_dropping, is_normed, is_program, program_task
from torch import nn

from harness.domain.graph import Graph
from harness.runtime.capture.capture import Captured, capture
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.models import build_task, fit_options
from harness.runtime.models.dlrm import Dlrm, interaction_width
from harness.runtime.models.lenet import LeNet
from harness.runtime.models.task import (
    DlrmOptions,
    HeadName,
    InputSpec,
    ModelOptions,
    Task,
    TextOptions,
)
from harness.runtime.models.torchvision_import import import_torchvision

GRAPH_BATCH = 8


def _narrowed(module: nn.Module, width: Callable[[int], int]) -> nn.Module | None:
    """A fresh module like `module` with narrower channels; None if it has none."""
    if isinstance(module, nn.Conv2d):
        n_in = module.in_channels if module.in_channels == 3 else width(module.in_channels)
        return nn.Conv2d(
            n_in,
            width(module.out_channels),
            module.kernel_size,  # type: ignore[arg-type]
            module.stride,  # type: ignore[arg-type]
            module.padding,  # type: ignore[arg-type]
            bias=module.bias is not None,
        )
    if isinstance(module, nn.Linear):
        n_out = module.out_features
        n_out = n_out if n_out == N_CLASSES else width(n_out)
        return nn.Linear(width(module.in_features), n_out)
    if isinstance(module, nn.BatchNorm2d):
        return nn.BatchNorm2d(width(module.num_features))
    return None


def _torchvision(path: str, *arguments: Any, width: Callable[[int], int], **options: Any) -> Any:
    """A model of torchvision's own class, narrowed; the wide one takes no memory."""
    module, name = path.split(".")
    factory = getattr(import_torchvision(f"models.{module}"), name)
    with torch.device("meta"):
        model = factory(*arguments, num_classes=N_CLASSES, **options)
    for name, part in list(model.named_modules()):
        fresh = _narrowed(part, width)
        if fresh is not None:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, fresh)
    return model


def _resnet(block: str, depths: list[int]) -> nn.Module:
    kind = getattr(import_torchvision("models.resnet"), block)
    model: nn.Module = _torchvision("resnet.ResNet", kind, depths, width=lambda n: n // 16)
    return model


def _vit() -> nn.Module:
    model: nn.Module = import_torchvision("models.vision_transformer").VisionTransformer(
        image_size=12,
        patch_size=4,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        mlp_dim=24,
        dropout=0.1,
        num_classes=N_CLASSES,
    )
    return model


def _dlrm(interaction: Any) -> Task:
    bottom, rows = (6, 10, 4), (7, 5, 9)
    sizes = DlrmOptions(bottom_mlp=bottom, table_rows=rows, interaction=interaction)
    top = (interaction_width(sizes), 12, 1)
    options = replace(sizes, top_mlp=top, n_lookups=2)
    indices = InputSpec(name="indices", shape=(6,), dtype=torch.int64, n_values=min(rows))
    dense = InputSpec(name="dense", shape=(6,))
    return Task(model=Dlrm(options), inputs=(dense, indices), loss="binary_cross_entropy")


def _classifier(model: nn.Module, *shape: int, n_classes: int = N_CLASSES) -> Task:
    return Task(model=model, inputs=(InputSpec(name="x", shape=shape),), n_classes=n_classes)


def _reader(model: nn.Module, *shape: int) -> Task:
    """A classifier of tokens."""
    spec = InputSpec(name="x", shape=shape, dtype=torch.int64, n_values=N_TOKENS)
    return Task(model=model, inputs=(spec,), n_classes=N_CLASSES)


def _text(name: str, head: HeadName | None = None, **mixture: Any) -> Task:
    sizes = TextOptions(
        sequence_length=8, vocabulary_size=22, n_layers=2, width=16, n_heads=4, n_groups=2,
        mlp_width=24, head=head, **mixture,
    )  # fmt: skip
    return build_task(name, fit_options(name, ModelOptions(text=sizes)))


def _tokens() -> Task:
    spec = InputSpec(name="tokens", shape=(5,), dtype=torch.int64, n_values=11)
    return Task(model=Tokens(), inputs=(spec,), n_classes=11)


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """One line of SMALL_MODELS.

    Attributes:
        min_microbatch: batch normalisation of a sample or two is ill-conditioned: its output hardly
            depends on its input, and what little it does is rounding.
    """

    build: Callable[[], Task]
    min_microbatch: int = 1
    has_dropout: bool = False


def _small(
    make: Callable[[], nn.Module],
    *shape: int,
    n_classes: int = N_CLASSES,
    min_microbatch: int = 1,
    has_dropout: bool = False,
) -> SmallModel:
    """A classifier of samples of this shape."""
    return SmallModel(
        build=lambda: _classifier(make(), *shape, n_classes=n_classes),
        min_microbatch=min_microbatch,
        has_dropout=has_dropout,
    )


def _small_resnet(block: str, *depths: int) -> SmallModel:
    return _small(partial(_resnet, block, list(depths)), 3, 64, 64, min_microbatch=2)


SMALL_MODELS: dict[str, SmallModel] = {
    "mlp": _small(Perceptron, 10, has_dropout=True),
    "lenet": _small(lambda: LeNet(N_CLASSES, 1, 28), 1, 28, 28),
    "alexnet": _small(
        lambda: _torchvision("alexnet.AlexNet", width=lambda n: n // 16), 3, 63, 63,
        has_dropout=True,
    ),
    "vgg16": _small(
        lambda: _torchvision("vgg.vgg16", width=lambda n: max(4, n // 32)), 3, 32, 32,
        has_dropout=True,
    ),
    "resnet18": _small_resnet("BasicBlock", 2, 2, 2, 2),
    "resnet50": _small_resnet("Bottleneck", 1, 2, 1, 1),
    "resnet152": _small_resnet("Bottleneck", 1, 1, 4, 1),
    "vit": _small(_vit, 3, 12, 12, has_dropout=True),
    "dlrm_cat": SmallModel(build=lambda: _dlrm("cat")),
    "dlrm_dot": SmallModel(build=lambda: _dlrm("dot")),
    "lstm": _small(TinyLstm, 7, 5),
    "lstm_time_first": _small(TimeFirstLstm, 7, 5),
    "branchy": _small(Branchy, 3, 8, 8, min_microbatch=2),
    "tokens": SmallModel(build=_tokens),
}  # fmt: skip
# The real depths: one case takes seconds, so only a few run.
DEEP_MODELS: dict[str, SmallModel] = {
    "resnet50_deep": _small_resnet("Bottleneck", 3, 4, 6, 3),
    "resnet152_deep": _small_resnet("Bottleneck", 3, 8, 36, 3),
}
TEXT_MODELS: dict[str, SmallModel] = {
    "bert_classes": SmallModel(build=lambda: _text("bert_base"), has_dropout=True),
    "bert_span": SmallModel(build=lambda: _text("bert_base", "span"), has_dropout=True),
    "gpt2": SmallModel(build=lambda: _text("gpt2"), has_dropout=True),
    "llama": SmallModel(build=lambda: _text("llama")),
    "mixture": SmallModel(build=lambda: _text("llama", n_experts=4, capacity_factor=0.6)),
    "t5": SmallModel(build=lambda: _text("t5"), has_dropout=True),
    "nmt": SmallModel(build=lambda: _text("nmt"), has_dropout=True),
}
# Not among those that `random_case` takes in turn.
OTHER_MODELS: dict[str, SmallModel] = {
    "disordered": _small(Disordered, 8),
    "exported": _small(Exported, 6, has_dropout=True),
    "merged_rows": _small(MergedRows, 7, 5),
    "tracked_norms": _small(TrackedNorms, 2, 6, 6),
    "normed_weights": _small(NormedWeights, 10),
    **TEXT_MODELS,
    **{
        name: SmallModel(build=lambda make=make: _reader(make(), *TOKENS_SHAPE))
        for name, make in ATTENTIONS.items()
    },
    **{name: _small(make, *SHAPE) for name, make in MIXTURES.items()},
    **{name: _small(make, 10) for name, make in OPERATORS.items()},
    **{name: _small(make, *shape, n_classes=n) for name, (make, shape, n) in SHAPED.items()},
    **{
        name: _small(make, *shape, min_microbatch=2 if name == "norms" else 1)
        if shape[1:]
        else SmallModel(build=lambda make=make, shape=shape: _reader(make(), *shape))
        for name, (make, shape) in CONSTRUCTS.items()
    },
}
_ALL = {**SMALL_MODELS, **DEEP_MODELS, **OTHER_MODELS}


def _draw_weights(model: nn.Module) -> None:
    """Keep the signal's size from layer to layer; offsets and scales are random too."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embedding" not in name:
            fan_in = parameter[0].numel()
            nn.init.normal_(parameter, std=(1.5 / fan_in) ** 0.5)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter)
        elif name.endswith("weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.2)


def _as_dtype(task: Task, dtype: torch.dtype) -> Task:
    inputs = tuple(
        replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec for spec in task.inputs
    )

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return replace(task, model=task.model._apply(cast), inputs=inputs)


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def small_task(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, has_dropout: bool = False
) -> Task:
    """Build a task, its weights drawn from `seed`; equal in every process."""
    torch.manual_seed(seed)
    if is_program(name):
        task = program_task(name)
    else:
        task = _ALL[name].build() if name in _ALL else _of_zoo(name)
    with torch.no_grad():
        _draw_weights(task.model)
    if not has_dropout:
        _without_dropout(task.model)
    return _as_dtype(task, dtype)


def _of_zoo(name: str) -> Task:
    from zoo import ZOO  # which imports this module

    return _classifier(ZOO[name].build(), *ZOO[name].shape)


def min_microbatch(name: str) -> int:
    """Fewest samples of a microbatch."""
    if is_program(name):
        return 2 if is_normed(name) else 1
    return _ALL[name].min_microbatch


def has_dropout(name: str) -> bool:
    """Whether a model draws masks."""
    return is_dropping(name) if is_program(name) else _ALL[name].has_dropout


def described(task: Task, batch: int) -> tuple[Captured, MetaModel]:
    """A task's captured model for a batch, and the shapes of its values."""
    captured = capture(task, batch, "model")
    return captured, MetaModel(captured, task.inputs, torch.device("cpu"))


@cache
def small_described(name: str) -> tuple[Captured, MetaModel]:
    """The same of a model, for GRAPH_BATCH samples."""
    return described(small_task(name), GRAPH_BATCH)


def small_graph(name: str) -> Graph:
    """A model's graph, for GRAPH_BATCH samples."""
    return small_described(name)[0].graph
