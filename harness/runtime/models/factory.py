"""A user's own model: `--model package.module:factory`.

A task from a model and a batch of example inputs, and that batch for a transformers model.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional

from harness.errors import ModelError, first_line
from harness.inputs import one_line
from harness.runtime.capture.meta_copy import fake, fake_copy, forgotten_stand_ins, restored_buffers
from harness.runtime.models.closures import copy_closures
from harness.runtime.models.example import BoundInputs, Example
from harness.runtime.models.loss_split import (
    CallRecorder,
    ModelRun,
    SplitLoss,
    loss_name,
    split_loss,
)
from harness.runtime.models.own_loss import BatchLoss, BatchLossTask, LabelledTask
from harness.runtime.models.task import InputSpec, ModelOptions, Task, check_model, logits_of
from harness.runtime.models.user_code import UserFunction
from harness.runtime.ranks.failures import users_line
from harness.runtime.tracing.patches import replaced, without_values
from harness.runtime.tracing.refusals import refusal

_log = logging.getLogger(__name__)

# Arguments of factories whose values neither flags, data nor the factory say.
_USUAL = {"n_classes": 1000, "n_channels": 3, "image_size": 224}
_N_SAMPLES = 2
_N_COPIES = 8  # of the example's samples, to find a loss that branches on their number
_N_TOKENS = 128
_TOKENS = "input_ids"
# Names of the largest number of tokens in configurations.
_LONGEST = (
    "max_position_embeddings", "max_seq_len", "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)  # fmt: skip
_EXPERTS = "batched_mm"
_REMEDY = "give a pair (model, example), with example a dict of forward's arguments"
_REMEDY_OF_EXAMPLE = "call the model with the example where it is made, and mend what fails there"
_REMEDY_OF_MORE = "the model takes the example, which has fewer samples: let it take any number"


def task_from_example(name: str, model: nn.Module, example: Any, *, is_users: bool) -> Task:
    """A task whose inputs are like those of an example.

    If the model computes a loss, that is the task's and its labels are the targets; else targets
    are classes of the logits. A loss that parts of a batch cannot compute stays in the model.

    Args:
        is_users: whether the factory returned the example. In any other, all integers from 0 to the
            largest make a sample.

    Raises:
        ModelError: the example has no tensors, or the model does not take it.
    """
    given = Example(name, example, has_rows=is_users)
    remedy = _REMEDY_OF_EXAMPLE if is_users else _REMEDY
    _prepare(name, model)
    tensors = given.tensors
    bound = model if given.fits(model) else BoundInputs(model, given)
    run = _run_once(name, bound, tensors, remedy)
    output = run.output
    specs = _with_rows(name, given.specs, run)

    def rerun() -> ModelRun:
        # Values differ where they are read: all samples are the first.
        n, is_real = run.n_samples, run.given is tensors
        which = [0] * (n + 1) if is_real else [*range(n)] * _N_COPIES + [0]
        more = [x[which] for x in tensors]
        return _run_once(name, bound, more, _REMEDY_OF_MORE)

    loss = loss_name(output)
    split = split_loss(loss, run, specs, rerun) if loss else None
    if isinstance(output, Tensor) and not output.dim() and output.requires_grad:
        split = "its forward returns the loss alone"
    if isinstance(split, str):
        whole = BatchLoss(BoundInputs(model, given, outputs=[loss]) if loss else bound, split)
        n_tokens = _n_tokens(specs)
        return BatchLossTask(model=whole, inputs=specs, loss="own", n_tokens=n_tokens, reason=split)
    if split is not None:
        kept = [k for k in range(len(specs)) if k not in split.labels or k in split.also_read]
        is_named = list(split.loss.outputs) in (["logits"], ["out"])
        chosen = () if is_named else tuple(split.loss.outputs)
        unlabelled = BoundInputs(model, given, kept)
        has_blanks = not _is_alike(split, unlabelled, [tensors[k] for k in kept])
        without = BoundInputs(model, given, kept, chosen, has_blanks=has_blanks)
        return _labelled(without, specs, kept, split)
    logits, n_samples = logits_of(output), len(tensors[0])
    if logits.shape[:1] != (n_samples,) or not logits.is_floating_point():
        raise ModelError(
            f"{name}: its forward returns {logits.dtype} of shape {tuple(logits.shape)} "
            f"for {n_samples} samples: return one row of real logits for each sample"
        )
    _, *sizes = logits.shape
    sizes = sizes or [1]
    # Logits have a class dim last for tokens, and second for pixels.
    n_classes, others = (sizes[-1], sizes[:-1]) if len(sizes) < 3 else (sizes[0], sizes[1:])
    return Task(
        model=bound,
        inputs=specs,
        loss="cross_entropy" if n_classes > 1 else "binary_cross_entropy",
        n_classes=n_classes if n_classes > 1 else 0,
        target_shape=tuple(others),
        n_tokens=_n_tokens(specs),
    )


def _with_rows(name: str, specs: Sequence[InputSpec], run: ModelRun) -> tuple[InputSpec, ...]:
    """Add how many rows the embeddings of a model have that look up all numbers of an input.

    Raises:
        ModelError: the example has a number beyond them, which on a GPU would end the process.
    """
    lookups = [
        call.arguments
        for call in run.calls
        if call.function in (functional.embedding, functional.embedding_bag)
    ]
    found = []
    for spec, x in zip(specs, run.given, strict=True):
        n = min(
            (len(each["weight"]) for each in lookups if _is_view_of_all(each["input"], x)),
            default=None,
        )
        if n is not None and (spec.n_values or 0) > n:
            raise ModelError(
                f"{name}: its example has {spec.name} up to {(spec.n_values or 0) - 1}, and the "
                f"embedding has {n} rows: give the model a larger vocabulary, or other numbers"
            )
        found.append(replace(spec, n_rows=n))
    return tuple(found)


def _is_view_of_all(view: Tensor, x: Tensor) -> bool:
    is_shared = view.untyped_storage()._cdata == x.untyped_storage()._cdata
    return is_shared and view.numel() == x.numel()


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


def _prepare(name: str, model: nn.Module) -> None:
    """Switch off the caches of keys and values of transformers, which training does not read, and
    compute experts without a dependence on values; copies of functions read copied modules."""
    copy_closures(model)
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


def _run_once(name: str, model: nn.Module, tensors: list[Tensor], remedy: str) -> ModelRun:
    """Call a model on fake tensors, or a copy of it on real ones if its control flow reads
    values."""
    with restored_buffers(model):
        return _run_copy(name, model, tensors, remedy)


def _run_copy(name: str, model: nn.Module, tensors: list[Tensor], remedy: str) -> ModelRun:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        given = [fake(x, mode) for x in tensors]
        copied = fake_copy(model, mode)
        for part in copied.modules():
            if isinstance(part, nn.modules.batchnorm._NormBase):
                part.num_batches_tracked = None  # a norm without momentum reads its value
        with forgotten_stand_ins(model), without_values(), mode, CallRecorder() as recorder:
            output = copied(*given)
    except ModelError:
        raise
    except Exception as error:
        if any(x.is_meta for x in model.parameters()):
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                raise refusal(name, error) from error
            raise _not_taken(name, tensors, error, remedy) from error
    else:
        return ModelRun(output, given, recorder.calls)
    try:
        copied = copy.deepcopy(model)
        with torch.random.fork_rng(devices=[]), CallRecorder() as recorder:
            output = copied(*tensors)
    except Exception as error:
        raise _not_taken(name, tensors, error, remedy) from error
    return ModelRun(output, tensors, recorder.calls)


def _is_alike(split: SplitLoss, model: nn.Module, tensors: list[Tensor]) -> bool:
    """Whether a model runs without labels, and then computes its outputs as it does with them."""
    try:
        return split.is_made_of(_run_once("", model, tensors, ""))
    except ModelError:
        return False


def _not_taken(name: str, tensors: Iterable[Tensor], error: Exception, remedy: str) -> ModelError:
    shapes = ", ".join("x".join(map(str, x.shape)) for x in tensors)
    place = users_line(error)
    where = f" at {place}" if place else ""
    reason = f"{type(error).__name__}: {one_line(first_line(error))}"
    if "'NoneType'" in reason:
        reason += ", as an attribute or an input that the example has not is None"
    return ModelError(
        f"{name}: its forward fails on inputs of {shapes}{where} ({reason}): {remedy}"
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
        raise ModelError(f"{name}: its main input is {main!r}: {_REMEDY}")
    limits = [getattr(config, key, None) or 0 for key in _LONGEST]
    longest = min((limit for limit in limits if limit > 0), default=sys.maxsize)
    n_tokens = options.text.sequence_length or min(_N_TOKENS, longest - _n_reserved(model))
    tokens = torch.zeros(_N_SAMPLES, n_tokens, dtype=torch.int64)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary is None:
        raise ModelError(f"{name}: its configuration has no vocab_size: {_REMEDY}")
    tokens[0, 0] = vocabulary - 1  # the largest
    names = [main, "decoder_input_ids"] if config.is_encoder_decoder else [main]
    return dict.fromkeys(names, tokens)


def _n_reserved(model: nn.Module) -> int:
    """Rows of a table of positions that no token has: those up to the padding's."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return 0 if part.padding_idx is None else part.padding_idx + 1
    return 0


def task_from_factory(name: str, options: ModelOptions) -> Task:
    """Call a factory with those of `n_classes`, `n_channels`, `image_size` that it accepts; of
    those that the options leave out, the factory's own defaults count.

    The factory returns a module over images (n, n_channels, image_size, image_size), a model of
    transformers, a pair of a module and example inputs, or a Task.

    Raises:
        ModelError: the factory is missing, fails or returns another type, or its model has
            weights without a shape.
    """
    function = UserFunction(name, "--model", ModelError)
    own = function.defaults()
    offered: dict[str, Any] = {
        size: getattr(options, size) or own.get(size) or usual for size, usual in _USUAL.items()
    }
    options = replace(options, **offered)
    built = function.call(offered)
    return task_of(f"--model {name!r}", built, options)


def task_of(name: str, built: Any, options: ModelOptions) -> Task:
    """The task of a factory's result.

    Args:
        name: subject of errors: what the user calls the model.

    Raises:
        ModelError: it has another type, or its model has weights without a shape or trains none.
    """
    if isinstance(built, Task):
        check_model(built.model)
        return built
    example: Any = None
    if isinstance(built, tuple) and len(built) == 2:
        built, example = built
    if not isinstance(built, nn.Module):
        raise ModelError(
            f"{name} is of type {type(built).__name__}, not an nn.Module: give the model, or the "
            "pair (model, example inputs)"
        )
    check_model(built)
    is_users = example is not None
    if not is_users:
        example = example_of(name, built, options)
    return task_from_example(name, built, example, is_users=is_users)


def task_of_program(built: Any, example: Any) -> Task:
    """The task of a model that a program of one's own has made, or of its pair with an example.

    Raises:
        ModelError: as `task_of`, or a model that is not of transformers has no example.
    """
    model, *given = built if isinstance(built, tuple) else (built,)
    is_own = isinstance(model, nn.Module) and not hasattr(model, "main_input_name")
    if is_own and example is None and not given:
        raise ModelError(
            f"Trainer has no example inputs of {type(model).__name__}: give a dict of forward's "
            "arguments, or a tuple, of two or more samples"
        )
    return task_of("the model", built if example is None else (model, example), ModelOptions())


@contextlib.contextmanager
def on_registration(act: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call `act` with each parameter when a module registers it."""
    register: Any = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if isinstance(parameter, nn.Parameter) and type(parameter) is nn.Parameter:
            act(parameter)

    with replaced(nn.Module, "register_parameter", registered):
        yield


def weights_on_meta() -> contextlib.AbstractContextManager[None]:
    """Move each parameter to the meta device when a module registers it.

    Buffers and other tensors are real, because constructors read some of them
    (`torch.linspace(...).tolist()`) and a graph contains values that are computed from others.
    """
    return on_registration(to_meta)


def to_meta(parameter: nn.Parameter) -> None:
    """Move a parameter in place, so that a second name of it stays tied."""
    if parameter.is_meta:
        return
    moved = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    torch.utils.swap_tensors(parameter, moved)
