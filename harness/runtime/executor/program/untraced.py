"""Modules that the graph holds as single operators, as the executor calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from harness.runtime.devices.compiling import uncompiled
from harness.runtime.tracing.constructs import detach


class KeepsBuffers(nn.Module):
    """Wraps a module whose forward assigns buffers, and copies new ones into the old memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = [(m, dict(m._buffers)) for m in self.module.modules()]
        output = self.module(*args, **kwargs)
        for module, buffers in held:
            for name, buffer in buffers.items():
                assigned = module._buffers.get(name)
                if buffer is not None and assigned is not None and assigned is not buffer:
                    with torch.no_grad():
                        buffer.copy_(assigned)
                    module._buffers[name] = buffer
        return output


class KeepsGradients(nn.Module):
    """Wraps a module that may differentiate in its forward, which needs gradients also where the
    segment around it keeps none because it will run again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_kept = torch.is_grad_enabled()
        with torch.enable_grad():
            output = self.module(*args, **kwargs)
        return output if is_kept else detach(output)
