"""The MODELS table, and models from a user's factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from harness.errors import ModelError
from harness.runtime.models.dlrm import Dlrm, check_dlrm
from harness.runtime.models.factory import task_from_factory
from harness.runtime.models.lenet import LeNet
from harness.runtime.models.task import HeadName, InputSpec, ModelOptions, Task, TextOptions
from harness.runtime.models.text import T5, Bert, Gpt2, Llama, Nmt, check_text
from harness.runtime.models.torchvision_import import import_torchvision
from harness.runtime.models.user_code import UserFunction, source_of

InputKind = Literal["images", "dlrm", "text"]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One row of MODELS.

    Attributes:
        build: makes the module from options that `fit_options` has filled in.
        takes: kind of its inputs; images (n, channels, side, side) give logits (n, classes).
        library: of the module to import once for all runs; empty: none.
        image_size: default height and width of images; 0 if the model takes none.
        min_image_size: smallest height and width that its layers accept.
        size_multiple: height and width must be a multiple of this.
        text: default sizes of a model of text; None for others.
        inputs: names of a text model's inputs, which are tokens, and of which the last is shifted
            right if it is the target.
        heads: what a text model can predict.
    """

    build: Callable[[ModelOptions], nn.Module]
    takes: InputKind = "images"
    library: Literal["torchvision", ""] = ""
    image_size: int = 224
    min_image_size: int = 32
    size_multiple: int = 1
    n_channels: int = 3
    n_classes: int = 1000
    text: TextOptions | None = None
    inputs: tuple[str, ...] = ("tokens",)
    heads: tuple[HeadName, ...] = ("tokens",)


def _torchvision(
    name: str, more: Callable[[ModelOptions], dict[str, Any]] = lambda _: {}, **sizes: Any
) -> ModelEntry:
    """A torchvision model with random weights, without downloads.

    Args:
        more: its factory's other arguments.
    """

    def build(options: ModelOptions) -> nn.Module:
        factory = getattr(import_torchvision("models"), name)
        model: nn.Module = factory(weights=None, num_classes=options.n_classes, **more(options))
        return model

    return ModelEntry(build=build, library="torchvision", **sizes)


def _text_entry(
    build: Callable[[ModelOptions], nn.Module],
    sizes: TextOptions,
    *inputs: str,
    heads: tuple[HeadName, ...] = ("tokens",),
) -> ModelEntry:
    return ModelEntry(
        build=build, takes="text", image_size=0, n_channels=0, n_classes=2, text=sizes,
        inputs=inputs, heads=heads,
    )  # fmt: skip


_BERT = TextOptions(
    sequence_length=128, vocabulary_size=30_522, n_layers=12, width=768, n_heads=12, n_groups=12,
    mlp_width=3072, head="classes",
)  # fmt: skip
_GPT2 = TextOptions(
    sequence_length=1024, vocabulary_size=50_257, n_layers=12, width=768, n_heads=12, n_groups=12,
    mlp_width=3072, head="tokens",
)  # fmt: skip
# TinyLlama of 1.1 billion parameters, T5-small, and Luong's network of 2015.
_LLAMA = TextOptions(
    sequence_length=2048, vocabulary_size=32_000, n_layers=22, width=2048, n_heads=32, n_groups=4,
    mlp_width=5632, n_experts_per_token=2, capacity_factor=1.25, head="tokens",
)  # fmt: skip
_T5 = TextOptions(
    sequence_length=512, vocabulary_size=32_128, n_layers=6, width=512, n_heads=8, n_groups=8,
    mlp_width=2048, head="tokens",
)  # fmt: skip
_NMT = TextOptions(
    sequence_length=50, vocabulary_size=50_000, n_layers=4, width=1000, n_heads=1, n_groups=1,
    mlp_width=1000, head="tokens",
)  # fmt: skip

MODELS: dict[str, ModelEntry] = {
    "lenet": ModelEntry(
        build=lambda given: LeNet(given.n_classes, given.n_channels, given.image_size),
        image_size=28,
        min_image_size=28,
        n_channels=1,
        n_classes=10,
    ),
    "alexnet": _torchvision("alexnet", min_image_size=63),
    **{n: _torchvision(n) for n in ("vgg16", "resnet18", "resnet50", "resnet101", "resnet152")},
    "inception_v3": _torchvision(
        "inception_v3",
        lambda _: {"aux_logits": False, "init_weights": True},
        image_size=299,
        min_image_size=75,
    ),
    "densenet121": _torchvision("densenet121"),
    "vit_b_16": _torchvision(
        "vit_b_16",
        lambda given: {"image_size": given.image_size},
        min_image_size=16,
        size_multiple=16,
    ),
    "dlrm": ModelEntry(
        build=lambda given: Dlrm(given.dlrm), takes="dlrm", image_size=0, n_channels=0
    ),
    "bert_base": _text_entry(
        Bert, _BERT, "tokens", "segments", heads=("classes", "span", "tokens")
    ),
    "gpt2": _text_entry(Gpt2, _GPT2, "tokens"),
    "llama": _text_entry(Llama, _LLAMA, "tokens"),
    "t5": _text_entry(T5, _T5, "source", "target"),
    "nmt": _text_entry(Nmt, _NMT, "source", "target"),
}


def entry_of(name: str) -> ModelEntry | None:
    """Look up a model in the table; None for a user's factory.

    Raises:
        ModelError: the name is in neither form.
    """
    if ":" in name:
        UserFunction(name, "--model", ModelError).parts()
    if name in MODELS or ":" in name:
        return MODELS.get(name)
    raise ModelError(
        f"there is no model {name!r}: choose one of {', '.join(MODELS)}, or give "
        "--model package.module:factory"
    )


def input_kind(name: str) -> InputKind:
    """The inputs of a model; a user's factory takes images unless it returns a Task.

    Raises:
        ModelError: there is no such model.
    """
    entry = entry_of(name)
    return "images" if entry is None else entry.takes


def preloads_of(name: str) -> list[str]:
    """Modules that import the libraries which building a model needs, once for all runs."""
    libraries: list[str] = [MODELS[name].library] if name in MODELS else ["torchvision"]
    if name not in MODELS and "transformers" in source_of(name):
        libraries.append("transformers")
    return [f"harness.runtime.models.preload_{library}" for library in libraries if library]


def fit_options(
    name: str, options: ModelOptions, data_image_size: int = 0, data_channels: int = 0
) -> ModelOptions:
    """Fill in missing classes, channels and image size from the data, else from the model.

    What neither the flags nor the data determine stays 0 for a user's model, because the defaults
    of its factory count then.

    Raises:
        ModelError: the model is unknown or does not accept the size or channels of the images.
    """
    entry = entry_of(name)
    if entry is None:
        return replace(
            options,
            image_size=options.image_size or data_image_size,
            n_channels=options.n_channels or data_channels,
        )
    if entry.takes == "dlrm":
        check_dlrm(options.dlrm)
        return options
    if entry.text is not None:
        return _fit_text(name, entry, options)
    size = options.image_size
    if not size:
        size = entry.image_size
        if data_image_size and _takes(entry, data_image_size):
            size = data_image_size
    elif not _takes(entry, size):
        raise ModelError(
            f"{name} cannot take images of {size} x {size}: use --image-size of at least "
            f"{entry.min_image_size}"
            + (f", a multiple of {entry.size_multiple}" if entry.size_multiple > 1 else "")
        )
    n_channels = options.n_channels or data_channels or entry.n_channels
    if entry.n_channels == 3 != n_channels:
        raise ModelError(
            f"{name} takes images of 3 channels, the data has {n_channels}: use lenet or a factory "
            "of your own"
        )
    n_classes = options.n_classes or entry.n_classes
    return replace(options, image_size=size, n_channels=n_channels, n_classes=n_classes)


def _fit_text(name: str, entry: ModelEntry, options: ModelOptions) -> ModelOptions:
    assert entry.text is not None
    text = options.text.filled(entry.text)
    if text.n_experts and not entry.text.capacity_factor:
        raise ModelError(
            f"{name} has no mixture of experts, and --n-experts is {text.n_experts}: use llama"
        )
    check_text(name, text)
    if text.head not in entry.heads:
        raise ModelError(
            f"{name} predicts {' or '.join(entry.heads)}, not {text.head}, as --head or --data "
            "asks: change them, or use bert_base"
        )
    n_classes = {
        "tokens": text.vocabulary_size,
        "span": text.sequence_length,
        "classes": options.n_classes or entry.n_classes,
    }[text.head]
    return replace(options, text=text, n_classes=n_classes, image_size=0, n_channels=0)


def _takes(entry: ModelEntry, size: int) -> bool:
    return size >= entry.min_image_size and size % entry.size_multiple == 0


def _dlrm_task(entry: ModelEntry, options: ModelOptions) -> Task:
    dlrm = options.dlrm
    inputs = (
        InputSpec(name="dense", shape=(dlrm.bottom_mlp[0],)),
        InputSpec(
            name="indices",
            shape=(len(dlrm.table_rows) * dlrm.n_lookups,),
            dtype=torch.int64,
            n_values=min(dlrm.table_rows),
        ),
    )
    return Task(model=entry.build(options), inputs=inputs, loss="binary_cross_entropy")


def _text_task(entry: ModelEntry, options: ModelOptions) -> Task:
    text = options.text
    length = (text.sequence_length,)
    inputs = tuple(
        InputSpec(
            name=name,
            shape=length,
            dtype=torch.int64,
            n_values=2 if name == "segments" else text.vocabulary_size,
        )
        for name in entry.inputs
    )
    shapes: dict[HeadName | None, tuple[int, ...]] = {"span": (2,), "tokens": length}
    return Task(
        model=entry.build(options),
        inputs=inputs,
        loss="span_cross_entropy" if text.head == "span" else "cross_entropy",
        n_classes=options.n_classes,
        target_shape=shapes.get(text.head, ()),
        n_tokens=text.sequence_length * (2 if "source" in entry.inputs else 1),
    )


def build_task(name: str, options: ModelOptions, seed: int = 0) -> Task:
    """Build a model on the current default device, with random weights from `seed`.

    Args:
        options: as `fit_options` returns them.

    Raises:
        ModelError: the model is unknown or does not accept the options.
    """
    torch.manual_seed(seed)
    entry = entry_of(name)
    if entry is None:
        task = task_from_factory(name, options)
    elif entry.text is not None:
        task = _text_task(entry, options)
    elif entry.takes == "dlrm":
        task = _dlrm_task(entry, options)
    else:
        shape = (options.n_channels, options.image_size, options.image_size)
        inputs = (InputSpec(name="images", shape=shape),)
        task = Task(model=entry.build(options), inputs=inputs, n_classes=options.n_classes)
    has_dropout = False
    for module in task.model.modules():
        if options.has_frozen_norms and isinstance(module, _BatchNorm):
            module.eval()
        if isinstance(module, _DropoutNd | nn.MultiheadAttention | nn.RNNBase):
            has_dropout, name_of_p = True, "p" if isinstance(module, _DropoutNd) else "dropout"
            if options.dropout is not None:
                setattr(module, name_of_p, options.dropout)
    if options.dropout and not has_dropout:
        raise ModelError(
            f"--dropout {options.dropout} sets the dropout layers of a model, and {name} has none: "
            "drop it"
        )
    return task
