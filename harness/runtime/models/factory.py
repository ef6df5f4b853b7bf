"""A user's own model: `--model package.module:factory`.

A task from a model and a batch of example inputs, and that batch for a transformers model.

An example is a dict of forward's keyword arguments or a tuple of positional ones. Its tensors may
be nested in dicts and tuples; the first dim of each is the samples. Integers are drawn from 0 to
the largest in the example.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.errors import ModelError, first_line
from harness.inputs import one_line
from harness.runtime.capture.meta_copy import fake, fake_copy
from harness.runtime.devices.precision import has_gradients
from harness.runtime.models.loss_split import CallRecorder, SplitLoss, split_loss
from harness.runtime.models.own_loss import Call, LabelledTask, join_outputs
from harness.runtime.models.task import InputSpec, ModelOptions, Task, check_weights, logits_of
from harness.runtime.models.torchvision_import import allow_torchvision
from harness.runtime.ranks.failures import users_line

_log = logging.getLogger(__name__)

_N_SAMPLES = 2
_N_TOKENS = 128
_TOKENS = "input_ids"
# Names of the largest number of tokens in configurations.
_LONGEST = (
    "max_position_embeddings", "max_seq_len", "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)  # fmt: skip
_EXPERTS = "batched_mm"
_REMEDY = "return (model, example) from the factory, with example a dict of forward's arguments"


class BoundInputs(nn.Module):
    """Calls a model with tensors at their places among its arguments.

    Args:
        structure: places of the example's tensors in (args, kwargs).
        positions: of the tensors that are given, among those of the example.
        blanks: the others, of zeros, by position; without an entry they are None.
        outputs: names of the outputs to return as one tensor; empty: all that the model returns.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: pytree.TreeSpec,
        positions: Sequence[int],
        outputs: Sequence[str] = (),
        blanks: Mapping[int, InputSpec] | None = None,
    ) -> None:
        super().__init__()
        self.model, self._n_leaves = model, structure.num_leaves
        # A function, because deepcopy of a structure warns.
        self._arguments: Callable[[list[Any]], Any] = lambda leaves: pytree.tree_unflatten(
            leaves, structure
        )
        self._positions, self._outputs = tuple(positions), tuple(outputs)
        self._blanks = dict(blanks or {})

    def forward(self, *tensors: Tensor) -> Any:
        leaves: list[Tensor | None] = [None] * self._n_leaves
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        for position, spec in self._blanks.items():
            size = (tensors[0].shape[0], *spec.shape)
            leaves[position] = tensors[0].new_zeros(size, dtype=spec.dtype)
        args, kwargs = self._arguments(leaves)
        output = self.model(*args, **kwargs)
        return join_outputs(output, self._outputs) if self._outputs else output


def task_from_example(name: str, model: nn.Module, example: Any) -> Task:
    """A task whose inputs are like those of an example.

    If the model computes a loss, that is the task's and its labels are the targets; else targets
    are classes of the logits.

    Raises:
        ModelError: the example has no tensors, the model does not take it, or its loss cannot be
            computed in parts of a batch.
    """
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    args = args if isinstance(args, tuple | list) else (args,)
    with_paths, structure = pytree.tree_flatten_with_path((tuple(args), kwargs))
    tensors = [leaf for _, leaf in with_paths]
    if not tensors or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in tensors):
        raise ModelError(
            f"--model {name!r}: its example holds {_kinds(tensors)}: give tensors of several "
            "samples, and leave out what has a default"
        )
    _prepare(name, model)
    names = [_name_of(path, k) for k, (path, _) in enumerate(with_paths)]
    specs = tuple(_spec(name, leaf) for name, leaf in zip(names, tensors, strict=True))
    is_plain = len(args) + len(kwargs) == len(tensors) and _are_first(model, kwargs, len(args))
    bound = model if is_plain else BoundInputs(model, structure, range(len(specs)))
    output, given, calls = _run_once(name, bound, tensors)
    split = split_loss(name, output, given, specs, calls)
    if split is not None:
        kept = [k for k in range(len(specs)) if k not in split.labels or k in split.also_read]
        is_named = list(split.loss.outputs) in (["logits"], ["out"])
        chosen = () if is_named else tuple(split.loss.outputs)
        without = BoundInputs(model, structure, kept, chosen)
        if not _runs(without, [tensors[k] for k in kept]):  # it always computes its loss
            blanks = {k: spec for k, spec in enumerate(specs) if k not in kept}
            without = BoundInputs(model, structure, kept, chosen, blanks)
        return _labelled(without, specs, kept, split)
    logits = logits_of(output)
    _check_logits(name, logits, len(tensors[0]))
    _, *sizes = logits.shape
    if sizes in ([], [1]):
        return Task(model=bound, inputs=specs, loss="binary_cross_entropy")
    # Logits have a class dim last for tokens, and second for pixels.
    n_classes, others = (sizes[-1], sizes[:-1]) if len(sizes) < 3 else (sizes[0], sizes[1:])
    return Task(
        model=bound,
        inputs=specs,
        n_classes=n_classes,
        target_shape=tuple(others),
        n_tokens=_n_tokens(specs),
    )


def _check_logits(name: str, logits: Tensor, n_samples: int) -> None:
    if logits.shape[:1] != (n_samples,) or not logits.is_floating_point():
        raise ModelError(
            f"--model {name!r}: its forward returns {logits.dtype} of shape {tuple(logits.shape)} "
            f"for {n_samples} samples: return one row of real logits for each sample"
        )


def _labelled(
    model: nn.Module, specs: Sequence[InputSpec], kept: Sequence[int], split: SplitLoss
) -> LabelledTask:
    """A task whose loss is the model's own, of the inputs that are kept."""
    own, inputs = split.loss, tuple(specs[k] for k in kept)
    is_read = all(k in split.also_read for k in split.labels)
    return LabelledTask(
        model=model,
        inputs=inputs,
        loss="own",
        n_classes=max((spec.n_values or 0 for spec in own.labels), default=0),
        target_shape=own.target_shape,
        n_tokens=_n_tokens(inputs),
        own_loss=own,
        positions=tuple(kept.index(k) for k in split.labels) if is_read else (),
    )


def _n_tokens(specs: Iterable[InputSpec]) -> int:
    return sum(s.shape[0] for s in specs if s.name.endswith(_TOKENS) and s.shape)


def _are_first(model: nn.Module, kwargs: dict[str, Any], n_before: int) -> bool:
    """Whether keyword arguments are forward's next parameters, so that it takes them in order."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return list(kwargs) == names[n_before : n_before + len(kwargs)]


def _kinds(leaves: list[Any]) -> str:
    return ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"


def _name_of(path: tuple[Any, ...], position: int) -> str:
    words = [entry.key for entry in path if isinstance(entry, pytree.MappingKey)]
    return "_".join(map(str, words)) or f"input_{position}"


def _spec(name: str, tensor: Tensor) -> InputSpec:
    n_values = None if has_gradients(tensor) else int(tensor.max()) + 1
    return InputSpec(
        name=name, shape=tuple(tensor.shape[1:]), dtype=tensor.dtype, n_values=n_values
    )


def _prepare(name: str, model: nn.Module) -> None:
    """Switch off the caches of keys and values of transformers, which training does not read, and
    compute experts without a dependence on values."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
    has_experts = getattr(model, "_can_set_experts_implementation", lambda: False)()
    if has_experts and model.config._experts_implementation != _EXPERTS:  # type: ignore[union-attr]
        model.set_experts_implementation(_EXPERTS)  # type: ignore[operator]
        _log.warning(
            "%s computes its experts by %s, because the others depend on values: it gathers the "
            "weights of each token's experts, which takes memory",
            name, _EXPERTS,
        )  # fmt: skip


def _run_once(
    name: str, model: nn.Module, tensors: list[Tensor]
) -> tuple[Any, list[Tensor], list[Call]]:
    """Call a model on fake tensors, or a copy of it on real ones if its control flow reads values;
    returns its output, the inputs and torch's calls."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        given = [fake(x, mode) for x in tensors]
        copied = fake_copy(model, mode)
        with mode, torch.no_grad(), CallRecorder() as recorder:
            output = copied(*given)
    except ModelError:
        raise
    except Exception as error:
        if any(x.is_meta for x in model.parameters()):
            raise _not_taken(name, tensors, error) from error
        return _run_copy(name, model, tensors)
    return output, given, recorder.calls


def _run_copy(
    name: str, model: nn.Module, tensors: list[Tensor]
) -> tuple[Any, list[Tensor], list[Call]]:
    try:
        copied = copy.deepcopy(model)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), CallRecorder() as recorder:
            output = copied(*tensors)
    except Exception as error:
        raise _not_taken(name, tensors, error) from error
    return output, tensors, recorder.calls


def _runs(model: nn.Module, tensors: list[Tensor]) -> bool:
    try:
        _run_once("", model, tensors)
    except ModelError:
        return False
    return True


def _not_taken(name: str, tensors: Iterable[Tensor], error: Exception) -> ModelError:
    shapes = ", ".join("x".join(map(str, x.shape)) for x in tensors)
    place = users_line(error)
    where = f" at {place}" if place else ""
    reason = f"{type(error).__name__}: {one_line(first_line(error))}"
    if "'NoneType'" in reason:
        reason = "it reads an input that the example has not"
    return ModelError(
        f"--model {name!r}: its forward fails on inputs of {shapes}{where} ({reason}): {_REMEDY}"
    )


def example_of(name: str, model: nn.Module, options: ModelOptions) -> Any:
    """Example inputs: of a transformers model by its configuration, else images.

    Raises:
        ModelError: a transformers model's main input is neither tokens nor images.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or not isinstance(main, str):
        side = options.image_size
        return torch.zeros(_N_SAMPLES, options.n_channels, side, side)
    if main == "pixel_values":
        n_channels = getattr(config, "num_channels", None) or options.n_channels
        size = getattr(config, "image_size", None) or options.image_size
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return {main: torch.zeros(_N_SAMPLES, n_channels, height, width)}
    if main != _TOKENS:
        raise ModelError(f"--model {name!r}: its main input is {main!r}: {_REMEDY}")
    limits = [getattr(config, key, None) or 0 for key in _LONGEST]
    longest = min((limit for limit in limits if limit > 0), default=sys.maxsize)
    n_tokens = options.text.sequence_length or min(_N_TOKENS, longest - _n_reserved(model))
    tokens = torch.zeros(_N_SAMPLES, n_tokens, dtype=torch.int64)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary is None:
        raise ModelError(f"--model {name!r}: its configuration has no vocab_size: {_REMEDY}")
    tokens[0, 0] = vocabulary - 1  # the largest
    names = [main, "decoder_input_ids"] if config.is_encoder_decoder else [main]
    return dict.fromkeys(names, tokens)


def _n_reserved(model: nn.Module) -> int:
    """Rows of a table of positions that no token has: those up to the padding's."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return 0 if part.padding_idx is None else part.padding_idx + 1
    return 0


_EXAMPLE = "write it like package.module:factory"


def _load(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"--model {name!r} does not name a factory: {_EXAMPLE}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    allow_torchvision()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = f"start in the directory that holds {module_name}, or set PYTHONPATH"
        if error.name is not None and not f"{module_name}.".startswith(f"{error.name}."):
            remedy = f"{module_name} needs it: install it into the environment"
        raise ModelError(f"--model {name!r}: {error}; {remedy}, on every node") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(f"--model {name!r}: {module.__file__} has no callable {attribute!r}")
    return factory  # type: ignore[no-any-return]


def task_from_factory(name: str, options: ModelOptions) -> Task:
    """Call a factory with those of `n_classes`, `n_channels`, `image_size` that it accepts.

    The factory returns a module over images (n, n_channels, image_size, image_size), a model of
    transformers, a pair of a module and example inputs, or a Task.

    Raises:
        ModelError: the factory is missing, fails or returns another type, or its model has
            weights without a shape.
    """
    factory = _load(name)
    offered = {
        "n_classes": options.n_classes,
        "n_channels": options.n_channels,
        "image_size": options.image_size,
    }
    signature = inspect.signature(factory)
    given = {key: value for key, value in offered.items() if key in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ModelError(f"--model {name!r}: {error}; give its arguments defaults") from error
    return task_of(name, factory(**given), options)


def task_of(name: str, built: Any, options: ModelOptions) -> Task:
    """The task of a factory's result.

    Raises:
        ModelError: it has another type, or its model has weights without a shape.
    """
    if isinstance(built, Task):
        check_weights(built.model)
        return built
    example: Any = None
    if isinstance(built, tuple) and len(built) == 2:
        built, example = built
    if not isinstance(built, nn.Module):
        raise ModelError(f"--model {name!r} returned a {type(built).__name__}, not an nn.Module")
    check_weights(built)
    if example is None:
        example = example_of(name, built, options)
    return task_from_example(name, built, example)
