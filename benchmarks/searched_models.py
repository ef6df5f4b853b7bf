"""Models of other benchmarks: factories for `--model benchmarks.searched_models:alexnet`.

Those of `searched.py` keep the property that decides how well their full model parallelizes:
alexnet and vgg16 have most parameters in a few linear layers after convolutions, vit has much
computation per parameter. Layers are those of torchvision, with smaller widths, depths and images.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from harness.runtime.models.torchvision_import import import_torchvision

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


def _with_classifier(features: nn.Module, side: int, n_channels: int, n_classes: int) -> nn.Module:
    """A model like torchvision's, with a small classifier: drawing the full one takes seconds."""
    parts: dict[str, nn.Module] = {
        "features": features,
        "avgpool": nn.AdaptiveAvgPool2d((side, side)),
        "flatten": nn.Flatten(),
        "classifier": _classifier(n_channels * side * side, n_classes),
    }
    return nn.Sequential(OrderedDict(parts))


def alexnet(n_classes: int = 10) -> nn.Module:
    """13 million parameters, of which 11 in the first two linear layers."""
    features = nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(64, 192, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(192, 384, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
    )
    return _with_classifier(features, 6, 256, n_classes)


def vgg16(n_classes: int = 10) -> nn.Module:
    """17 million parameters, of which 14 in the first two linear layers; its convolutions have less
    than half of VGG16's channels."""
    vgg = import_torchvision("models.vgg")
    plan = (24, 24, "M", 48, 48, "M", 96, 96, 96, "M", 192, 192, 192, "M", 256, 256, 256, "M")
    return _with_classifier(vgg.make_layers(plan), 7, 256, n_classes)


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


def deep_vit(n_classes: int = 10, n_channels: int = 1, image_size: int = 8) -> nn.Module:
    """0.4 million parameters: eight layers of width 64 over 16 patches and a class token."""
    models = import_torchvision("models")
    patch = image_size // 4
    model: nn.Module = models.VisionTransformer(
        image_size=image_size,
        patch_size=patch,
        num_layers=8,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=256,
        num_classes=n_classes,
    )
    model.conv_proj = nn.Conv2d(n_channels, 64, kernel_size=patch, stride=patch)
    nn.init.normal_(model.heads[0].weight, std=0.02)  # torchvision's zeros stop all gradients
    return model


def wide(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """50 MB of weights in 48 equal layers, with little computing."""
    hidden = [part for _ in range(47) for part in (nn.Linear(512, 512), nn.Tanh())]
    first = nn.Linear(n_channels * image_size**2, 512)
    return nn.Sequential(nn.Flatten(), first, *hidden, nn.Linear(512, n_classes))


def deep(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """Convolutions: much computing for each byte of weights."""
    blocks: list[nn.Module] = [nn.Conv2d(n_channels, 32, 3, padding=1), nn.ReLU()]
    for _ in range(8):
        blocks += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, n_classes))
