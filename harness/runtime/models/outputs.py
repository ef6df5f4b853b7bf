"""Select the logits from a model's outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harness.errors import ModelError

# Names of the logits in models of transformers and of torchvision.
_NAMES = ("logits", "out")


def named_outputs(output: Any) -> Mapping[str, Any]:
    """The outputs of a dict, a named tuple or a dataclass; empty for anything else."""
    if isinstance(output, Mapping):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    fields = getattr(output, "_fields", None)
    return dict(zip(fields, output, strict=True)) if isinstance(fields, tuple) else {}


def choose_logits(outputs: Mapping[str, Any], kind: str) -> Any:
    """Select the output that the loss takes.

    Args:
        kind: type of the model's return value, for the error.

    Raises:
        ModelError: no output has a name of logits.
    """
    for name in _NAMES:
        if name in outputs:
            return outputs[name]
    has = f" with {', '.join(map(str, outputs))}" if outputs else ""
    raise ModelError(
        f"the model returns a {kind}{has}, and the loss takes one tensor: return that tensor "
        "alone, or under the name 'logits' in a dict, a named tuple or a dataclass"
    )
