"""Models of transformers, timm and torchvision at tiny width, from their own configurations.

The language models are in `language`. Dropout and stochastic depth are off, because their numbers
differ between strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from equivalence_models import _torchvision
from torch import Tensor, nn

from harness.runtime.models.factory import task_of
from harness.runtime.models.task import ModelOptions, Task
from harness.runtime.models.torchvision_import import allow_torchvision, import_torchvision
from zoo.base import N_CLASSES, ZooModel

_SIDE = 32
_OPTIONS = ModelOptions(n_classes=N_CLASSES, n_channels=3, image_size=_SIDE)
N_TOKENS = 8
VOCABULARY = 50


@dataclass(frozen=True, kw_only=True)
class LibraryModel(ZooModel):
    """A model of a library; `build` returns the result of a user's factory.

    Attributes:
        side: height and width of images.
    """

    build: Callable[[], Any]
    side: int = _SIDE

    def task(self, *, seed: int = 0, has_construct: bool = True) -> Task:
        torch.manual_seed(seed)
        allow_torchvision()
        task = task_of("zoo", self.build(), replace(_OPTIONS, image_size=self.side))
        for part in task.model.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
        inputs = tuple(
            replace(spec, dtype=torch.float64) if spec.n_values is None else spec
            for spec in task.inputs
        )
        return replace(task, model=_widened(task.model), inputs=inputs)


def _widened(model: nn.Module) -> nn.Module:
    """A model in float64, and in complex128 where it is complex."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.complex128 if weight.is_complex() else torch.float64)
    return model.double()


def from_config(name: str, **settings: Any) -> nn.Module:
    """A model of transformers by its class."""
    import transformers

    model = getattr(transformers, name)
    made = model.config_class(**settings)
    for key, value in vars(made).items():
        if "drop" in key and isinstance(value, float):
            setattr(made, key, 0.0)
    made.num_labels = 2 if "QuestionAnswering" in name else N_CLASSES
    return model(made)


def with_labels(name: str, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with labels in its example, so that its own loss is trained."""
    made = from_config(name, **settings)
    if made.main_input_name == "pixel_values":
        images = torch.zeros(2, 3, made.config.image_size, made.config.image_size)
        return made, {"pixel_values": images, "labels": torch.tensor([0, N_CLASSES - 1])}
    tokens = torch.arange(2 * N_TOKENS).view(2, N_TOKENS) + VOCABULARY - 2 * N_TOKENS
    classes = torch.tensor([0, N_CLASSES - 1])
    if "QuestionAnswering" in name:
        ends = torch.tensor([1, N_TOKENS - 1])
        return made, {"input_ids": tokens, "start_positions": ends, "end_positions": ends}
    return made, {"input_ids": tokens, "labels": classes if "Class" in name else tokens}


def with_example(
    name: str, example: Callable[[], dict[str, Any]], **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    made = from_config(name, **settings)
    for weight in made.parameters():
        if weight.dim() > 2 and not weight.any():  # queries of 0, whose gradients only round
            nn.init.normal_(weight)
    return made, example()


def _pairs() -> dict[str, Any]:
    tokens = torch.arange(2 * N_TOKENS).view(2, N_TOKENS)
    return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def _captioned() -> dict[str, Any]:
    """Tokens of which four are those of an image, at other places in each sample."""
    tokens = torch.arange(2 * N_TOKENS).view(2, N_TOKENS) + VOCABULARY - 2 * N_TOKENS
    tokens[0, :4] = tokens[1, 2:6] = _IMAGE_TOKEN
    return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16)}


def _captioned_with_types() -> dict[str, Any]:
    given = _captioned()
    return {**given, "token_type_ids": (given["input_ids"] != _IMAGE_TOKEN).long()}


def _boxed() -> dict[str, Any]:
    """Words and the boxes around them: left, top, right, bottom."""
    corners = torch.arange(2 * N_TOKENS).view(2, N_TOKENS, 1)
    return {
        "input_ids": corners.squeeze(2) + 1,
        "bbox": corners.repeat(1, 1, 4) + torch.tensor([0, 0, 3, 2]),
    }


def _padded() -> dict[str, Any]:
    tokens = torch.arange(2 * N_TOKENS).view(2, N_TOKENS) + 1
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _photos() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


_IMAGE_TOKEN = 5
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def models_of(
    models: dict[str, tuple[str, dict[str, Any]]], make: Callable[..., Any]
) -> dict[str, ZooModel]:
    """Rows of the zoo, by classes of transformers and the settings of their configurations."""
    return {
        f"transformers_{name}": LibraryModel(build=partial(make, model, **settings))
        for name, (model, settings) in models.items()
    }


_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", _VISION),
    "deit": ("DeiTForImageClassification", _VISION),
    "beit": ("BeitForImageClassification", _VISION),
    "dinov2": ("Dinov2ForImageClassification", {**_VISION, "mlp_ratio": 2}),
    "swin": (
        "SwinForImageClassification",
        {"image_size": _SIDE, "patch_size": 4, "embed_dim": 8, "depths": [1, 2],
         "num_heads": [2, 4], "window_size": 4},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"image_size": _SIDE, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
}  # fmt: skip

_TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (8, 8, 16, 16)},
    "resnext26ts": {},
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4},
    "deit_tiny_patch16_224": {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4},
    "mixer_s32_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 32},
    "gmlp_ti16_224": {"img_size": 32},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1, 2),
        "num_heads": (2, 4), "drop_path_rate": 0.0,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2,),
        "num_heads": (2,), "drop_path_rate": 0.0,
    },
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "mnasnet_small": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2)},
    "ghostnet_050": {"drop_rate": 0.0},
    "pvt_v2_b0": {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (1, 2),
                  "sr_ratios": (2, 1), "mlp_ratios": (2, 2)},
    "repvgg_a0": {},
}  # fmt: skip
_WITHOUT_NORM = ("vit", "deit", "mixer", "resmlp", "gmlp", "swin", "convnext", "pvt")


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=N_CLASSES, **settings)


def _of_class(path: str, **settings: Any) -> nn.Module:
    """A model of torchvision by its class."""
    module, name = path.split(".")
    made: nn.Module = getattr(import_torchvision(f"models.{module}"), name)(
        num_classes=N_CLASSES, **settings
    )
    return made


def _convnext() -> nn.Module:
    kind = import_torchvision("models.convnext").CNBlockConfig
    return _of_class("convnext.ConvNeXt", block_setting=[kind(8, 16, 1), kind(16, None, 1)])


def _regnet() -> nn.Module:
    kind = import_torchvision("models.regnet").BlockParams
    blocks = kind.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=8)
    return _of_class("regnet.RegNet", block_params=blocks)


_TORCHVISION: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "alexnet": (
        partial(_torchvision, "alexnet.AlexNet", width=lambda n: n // 16), False
    ),
    "squeezenet": (partial(_of_class, "squeezenet.SqueezeNet", version="1_1"), False),
    "densenet": (
        partial(
            _of_class, "densenet.DenseNet", growth_rate=4, block_config=(2, 2),
            num_init_features=8,
        ), True,
    ),
    "mobilenet_v2": (partial(_of_class, "mobilenetv2.MobileNetV2", width_mult=0.25), True),
    "mnasnet": (partial(_of_class, "mnasnet.MNASNet", alpha=0.25), True),
    "shufflenet": (
        partial(
            _of_class, "shufflenetv2.ShuffleNetV2", stages_repeats=[1, 1, 1],
            stages_out_channels=[8, 16, 16, 16, 32],
        ), True,
    ),
    "vit": (
        partial(
            _of_class, "vision_transformer.VisionTransformer", image_size=_SIDE, patch_size=16,
            num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=24,
        ), False,
    ),
    "swin": (
        partial(
            _of_class, "swin_transformer.SwinTransformer", patch_size=[4, 4], embed_dim=8,
            depths=[1, 2], num_heads=[2, 4], window_size=[4, 4], stochastic_depth_prob=0.0,
        ), False,
    ),
    "convnext": (_convnext, False),
    "regnet": (_regnet, True),
}  # fmt: skip


def _has_norm(name: str) -> bool:
    return not name.startswith(_WITHOUT_NORM)


_LABELLED = {"vit_labels": _TRANSFORMERS["vit"]}
_TEXT_OF_CLIP = {
    "vocab_size": VOCABULARY, "max_position_embeddings": N_TOKENS, "eos_token_id": 2,
    **{key: value for key, value in _VISION.items() if not key.endswith("_size")},
    "hidden_size": 16, "intermediate_size": 24,
}  # fmt: skip
_BACKBONE = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip
_LLAMA = {**_TEXT, "num_key_value_heads": 2}
_WITH_EXAMPLE: dict[str, tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "clip": (
        "CLIPModel", _pairs,
        {"text_config": _TEXT_OF_CLIP, "vision_config": _VISION, "projection_dim": 16},
    ),
    "detr": (
        "DetrForObjectDetection", _photos,
        {"backbone_config": _BACKBONE, "num_queries": 6, "d_model": 16, "encoder_layers": 1,
         "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    ),
    "llama_padded": ("LlamaForCausalLM", _padded, _LLAMA),
    "layoutlm": ("LayoutLMForTokenClassification", _boxed, _TEXT),
    "llava": (
        "LlavaForConditionalGeneration", _captioned,
        {"vision_config": {**_VISION, "model_type": "clip_vision_model"},
         "text_config": {**_LLAMA, "model_type": "llama"}, "image_token_index": _IMAGE_TOKEN},
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration", _captioned_with_types,
        {"vision_config": {**_VISION, "model_type": "siglip_vision_model",
                           "vision_use_head": False},
         "text_config": {**_LLAMA, "model_type": "gemma", "head_dim": 4},
         "image_token_index": _IMAGE_TOKEN, "projection_dim": 16},
    ),
    "blip2": (
        "Blip2ForConditionalGeneration", _captioned,
        {"vision_config": _VISION, "num_query_tokens": 4, "image_token_index": _IMAGE_TOKEN,
         "qformer_config": {**_TEXT, "encoder_hidden_size": 16,
                            "attention_probs_dropout_prob": 0.0},
         "text_config": {**_TEXT, "model_type": "opt", "ffn_dim": 24, "dropout": 0.0,
                         "word_embed_proj_dim": 16}},
    ),
}  # fmt: skip

LIBRARIES: dict[str, ZooModel] = {
    **models_of(_LABELLED, with_labels),
    **models_of(_TRANSFORMERS, from_config),
    **{
        f"transformers_{name}": LibraryModel(
            build=partial(with_example, model, example, **settings), has_norm=name == "detr"
        )
        for name, (model, example, settings) in _WITH_EXAMPLE.items()
    },
    **{
        f"timm_{name}": LibraryModel(
            build=partial(_timm, name, **settings),
            has_norm=_has_norm(name),
            side=settings.get("img_size", _SIDE),
        )
        for name, settings in _TIMM.items()
    },
    **{
        f"torchvision_{name}": LibraryModel(
            build=build, has_norm=has_norm, side=64 if name == "alexnet" else _SIDE
        )
        for name, (build, has_norm) in _TORCHVISION.items()
    },
}
