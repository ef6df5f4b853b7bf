"""Remember in a file which graphs passed the comparison with their models.

The key hashes the graph, its generated code, each module's type, numbers and hooks, the source
files of their classes, torch's version and this harness's runtime. An unreadable file counts as
empty and is overwritten.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import nn

from harness.domain.files import FileKind, JsonFile
from harness.errors import HarnessError, ResultsError
from harness.measure.store import write_atomically
from harness.runtime.capture.capture import Captured
from harness.runtime.faithfulness.comparison import hold_to_model
from harness.runtime.faithfulness.state import simple_attributes
from harness.runtime.models.task import Task
from harness.runtime.ranks.host import code_hash
from harness.runtime.tracing.hooks import hooks_of

_log = logging.getLogger(__name__)

HELD_FILE = "held-graphs.json"
_MAX_MODELS = 1000
_PLACE = re.compile(r"device\(type='[a-z]+'(, index=[0-9]+)?\)")


class _HeldGraphs(JsonFile, frozen=True, kw_only=True):
    """Names of models by key, the latest last."""

    FILE = FileKind("file of held graphs", "harness-held", 1, ResultsError, "remove it")

    models: dict[str, str] = msgspec.field(default_factory=dict)
    schema: str = "harness-held"
    version: int = 1


def hold_once(
    captured: Captured, task: Task, name: str, dtype: str, directory: Path,
    make: Callable[[], tuple[Task, Captured]] | None = None,
) -> None:  # fmt: skip
    """Run `hold_to_model` unless the file in `directory` lists the graph; call in one process.

    Args:
        make: makes task and graph with weights, if the given ones are on the meta device.

    Raises:
        ModelError: as `hold_to_model`.
    """
    path, key = directory / HELD_FILE, key_of(task, captured, dtype)
    known = _read(path)
    if key in known:
        return
    whole, with_weights = (task, captured) if make is None else make()
    hold_to_model(whole, with_weights, name, dtype)
    kept = dict([*known.items(), (key, name)][-_MAX_MODELS:])
    try:
        write_atomically(path, _HeldGraphs(models=kept).to_json())
    except HarnessError as error:  # the comparison then runs again next time
        _log.warning("%s", error)


def _read(path: Path) -> dict[str, str]:
    try:
        return _HeldGraphs.load(path).models if path.is_file() else {}
    except (HarnessError, OSError) as error:
        _log.info("the file of held graphs is ignored: %s", error)
        return {}


def key_of(task: Task, captured: Captured, dtype: str) -> str:
    """A key for a graph, its model and the harness's code; equal with and without weights."""
    digest = hashlib.sha256(msgspec.json.encode([str(torch.__version__), dtype, code_hash()]))
    digest.update(captured.graph.content_hash().encode())
    digest.update(_PLACE.sub("device", captured.module.code).encode())
    fields = [getattr(task, f.name) for f in dataclasses.fields(task) if f.name != "model"]
    digest.update(repr(fields).encode())
    for text in _texts_of(task.model):
        digest.update(text.encode())
    return digest.hexdigest()[:32]


def _texts_of(model: nn.Module) -> Iterator[str]:
    files: dict[str, None] = {}
    for path, module in model.named_modules():
        kinds = (k for k in type(module).__mro__ if not k.__module__.startswith("torch."))
        files |= dict.fromkeys(filter(None, map(_file_of, kinds)))
        hooks = [str(getattr(hook, "__qualname__", type(hook))) for hook in hooks_of(module)]
        numbers = sorted(simple_attributes(module).items())
        yield f"{path} {type(module).__qualname__} {numbers} {hooks}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        yield f"{len(tensor._backward_hooks or ())}"
    for file in files:
        yield hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _file_of(kind: type) -> str | None:
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None
    return file if file is not None and Path(file).is_file() else None
