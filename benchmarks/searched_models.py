"""Reduced models for `searched.py`: factories for `--model benchmarks.searched_models:alexnet`.

Each keeps what makes its full model hard or easy to spread: alexnet and vgg16 hold most parameters
in a few linear layers behind convolutions, vit computes much for each parameter. Convolutions and
layers are those of torchvision; only widths, depths and image sizes are smaller.
"""

from __future__ import annotations

from torch import nn

from harness.runtime.torchvision_import import import_torchvision

_WIDTH = 1024  # of hidden linear layers; 4096 in the full models


def _classifier(n_inputs: int, n_classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(n_inputs, _WIDTH),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(_WIDTH, n_classes),
    )


def alexnet(n_classes: int = 10) -> nn.Module:
    """13 million parameters, of which 11 in the first two linear layers."""
    model: nn.Module = import_torchvision("models").alexnet(weights=None, num_classes=n_classes)
    model.classifier = _classifier(256 * 6 * 6, n_classes)
    return model


def vgg16(n_classes: int = 10) -> nn.Module:
    """17 million parameters, of which 14 in the first two linear layers; its convolutions have less
    than half of their channels."""
    vgg = import_torchvision("models.vgg")
    plan = (24, 24, "M", 48, 48, "M", 96, 96, 96, "M", 192, 192, 192, "M", 256, 256, 256, "M")
    model: nn.Module = vgg.VGG(vgg.make_layers(plan), num_classes=n_classes)
    model.classifier = _classifier(256 * 7 * 7, n_classes)
    return model


def vit(n_classes: int = 10, image_size: int = 32) -> nn.Module:
    """1.8 million parameters: four layers of width 192 over 64 patches of 4 x 4."""
    models = import_torchvision("models")
    model: nn.Module = models.VisionTransformer(
        image_size=image_size,
        patch_size=4,
        num_layers=4,
        num_heads=4,
        hidden_dim=192,
        mlp_dim=768,
        num_classes=n_classes,
    )
    return model
