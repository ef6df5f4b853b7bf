"""Models of `elastic_events.py`: factories for `--model benchmarks.elastic_models:wide`."""

from __future__ import annotations

from torch import nn


def _layers(n_inputs: int, width: int, n_layers: int, n_classes: int) -> nn.Module:
    hidden = [part for _ in range(n_layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(n_inputs, width), *hidden, nn.Linear(width, n_classes)
    )


def wide(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """50 MB of weights in 48 equal layers, with little computing."""
    return _layers(n_channels * image_size**2, 512, 47, n_classes)


def deep(n_classes: int, n_channels: int, image_size: int) -> nn.Module:
    """Convolutions: much computing for each byte of weights."""
    blocks: list[nn.Module] = [nn.Conv2d(n_channels, 32, 3, padding=1), nn.ReLU()]
    for _ in range(8):
        blocks += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, n_classes))
