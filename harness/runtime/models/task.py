"""A training task: a model, its inputs, its loss, and the logits among its outputs."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from harness.errors import ModelError

# Names of the logits in models of transformers and of torchvision.
_NAMES = ("logits", "out")


def named_outputs(output: Any) -> Mapping[str, Any]:
    """The outputs of a dict, a dataclass or a tuple; empty for anything else."""
    if isinstance(output, Mapping):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if not isinstance(output, tuple):
        return {}
    names = getattr(output, "_fields", [f"output {k}" for k in range(len(output))])
    return dict(zip(names, output, strict=True))


def choose_logits(outputs: Mapping[str, Any], kind: str) -> Any:
    """Select the output that the loss takes.

    Args:
        kind: type of the model's return value, for the error.

    Raises:
        ModelError: there are several, and none has a name of logits.
    """
    for name in _NAMES:
        if name in outputs:
            return outputs[name]
    given = {name for name, output in outputs.items() if output is not None}
    if len(given) == 1 and given != {"loss"}:
        return outputs[given.pop()]
    has = f" with {', '.join(map(str, outputs))}" if outputs else ""
    raise ModelError(
        f"the model returns an output of type {kind}{has}, and the loss takes one tensor: return "
        "that tensor alone, or under the name 'logits' in a dict, a named tuple or a dataclass, "
        "and a loss of its own under the name 'loss'"
    )


LossName = Literal["cross_entropy", "binary_cross_entropy", "span_cross_entropy", "own"]
HeadName = Literal["classes", "span", "tokens"]

# The token that fills sequences up, which attention masks, and the target that no loss counts.
PADDING = 0
IGNORED = -100


def wide(outputs: Tensor) -> Tensor:
    """Outputs of at least 32 bits, for the loss."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def _sum_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.dim() > 1:
        has_pixels = outputs.dim() > 3 and (*outputs.shape[:1], *outputs.shape[2:]) == targets.shape
        if has_pixels or outputs.shape[:-1] != targets.shape:  # their classes are second
            outputs = outputs.movedim(1, -1)
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return F.cross_entropy(wide(outputs), targets, reduction="sum", ignore_index=IGNORED)


def _sum_binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = wide(outputs).reshape(-1)
    return F.binary_cross_entropy_with_logits(
        outputs, targets.to(outputs.dtype).reshape(-1), reduction="sum"
    )


LOSSES: dict[LossName, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _sum_cross_entropy,
    "binary_cross_entropy": _sum_binary_cross_entropy,
    # Of the first and last position of an answer: outputs (n, length, 2), targets (n, 2).
    "span_cross_entropy": lambda outputs, targets: _sum_cross_entropy(outputs.mT, targets),
}


def logits_of(output: Any) -> Tensor:
    """Select the logits from a model's return value.

    Raises:
        ModelError: it is not a tensor, and no output has a name of logits.
    """
    if isinstance(output, Tensor):
        return output
    chosen = choose_logits(named_outputs(output), type(output).__name__)
    if not isinstance(chosen, Tensor):
        raise ModelError(
            f"the model returns logits of type {type(chosen).__name__}: return a tensor"
        )
    return chosen


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """One input tensor of a model; its shape is without the sample dim.

    Attributes:
        n_values: number of values of integers (0 to n_values - 1); None for real and complex ones.
        rows: integers of samples of an example; None if any integers below n_values make a sample.
        is_fraction: whether real values lie between 0 and 1, as a loss of probabilities needs.
        n_rows: of the smallest embedding that looks up these integers; None if none does.
        ignored: the negative integer of an example, which marks labels that do not count.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    n_values: int | None = None
    rows: Tensor | None = field(default=None, compare=False, repr=False)
    is_fraction: bool = False
    n_rows: int | None = None
    ignored: int | None = None

    def draw(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw random samples; inputs with rows take those of the same samples for one seed."""
        if self.rows is not None:
            first = (generator or torch.default_generator).initial_seed() % len(self.rows)
            chosen = (first + torch.arange(n_samples)) % len(self.rows)
            return self.rows[chosen].to(chosen.device)
        shape, dtype = (n_samples, *self.shape), self.dtype
        if self.n_values is None and (dtype.is_floating_point or dtype.is_complex):
            draw = torch.rand if self.is_fraction else torch.randn
            return draw(shape, dtype=dtype, generator=generator)
        return torch.randint(self.n_values or 1, shape, dtype=dtype, generator=generator)

    def is_unforeseen(self, values: Tensor) -> bool:
        """Whether labels that do not count are among samples, and none was in the example."""
        is_known = self.ignored is not None or self.dtype.is_floating_point
        return not is_known and bool((values == IGNORED).any())


class Wrapper(nn.Module):
    """Calls a user's model, and has its name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def _get_name(self) -> str:
        return str(self.model._get_name())


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its inputs and its loss.

    Attributes:
        model: called with one tensor per entry of `inputs`, each (samples, *shape).
        n_classes: targets are integers below it; 0 for binary targets (floats 0 or 1).
        target_shape: of one sample's targets, such as one for each token. Their loss is the mean
            over all of a global batch, except those that are IGNORED.
        loss: a row of LOSSES; "own" is a loss that the model computes (`own_loss.py`).
        n_tokens: tokens of a sample; 0 if it has none.
    """

    model: nn.Module
    inputs: tuple[InputSpec, ...]
    loss: LossName = "cross_entropy"
    n_classes: int = 0
    target_shape: tuple[int, ...] = ()
    n_tokens: int = 0

    @property
    def prefix(self) -> str:
        """What stands before the names of the user's own parameters."""
        model, prefix = self.model, ""
        while isinstance(model, Wrapper):
            model, prefix = model.model, f"{prefix}model."
        return prefix

    @property
    def n_targets(self) -> int:
        """Targets of one sample."""
        return math.prod(self.target_shape)

    @property
    def has_classes(self) -> bool:
        """Whether a sample has one class, that of its largest logit."""
        return bool(self.n_classes) and not self.target_shape

    @property
    def target_dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def labels(self) -> tuple[InputSpec, ...]:
        """The labels of one sample that make its targets, without those among the inputs; a name
        is empty where the model gives none."""
        return (InputSpec(name="", shape=self.target_shape, dtype=self.target_dtype),)

    def join_labels(self, labels: Sequence[Tensor], n_samples: int) -> Tensor:
        """Labels of so many samples as targets."""
        return labels[0]

    def unforeseen(self, inputs: Sequence[Tensor], targets: Tensor) -> str:
        """A label that does not count in a mean over samples, with its name, where no label of the
        example was such; empty if there is none."""
        return ""

    def targets_among(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """The targets of samples whose inputs hold them; None if they do not."""
        return None

    def count_targets(self, targets: Tensor) -> int:
        """Number of targets that count for the loss."""
        return int((targets != IGNORED).sum())

    def classes_of(self, targets: Tensor) -> tuple[Tensor, int, int] | None:
        """The targets of the loss's only cross entropy, its number of classes, and the class that
        does not count; None if the loss has another form."""
        return (targets, self.n_classes, IGNORED) if self.loss == "cross_entropy" else None

    def draw_targets(self, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw random targets; (samples, *target_shape)."""
        shape = (n_samples, *self.target_shape)
        return torch.randint(max(2, self.n_classes), shape, generator=generator)

    def sum_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum the loss over the targets; the engine divides by their number in the global batch.

        Args:
            outputs: the logits, or outputs that hold them by name.

        Raises:
            ModelError: no output has a name of logits.
        """
        return LOSSES[self.loss](logits_of(outputs), targets)

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """Outputs and labels as the model names them, if the loss reads several."""
        return outputs, targets


@dataclass(frozen=True, kw_only=True)
class DlrmOptions:
    """Shape of a DLRM: MLPs as their layer widths, tables by their rows.

    Attributes:
        bottom_mlp: layer widths from the dense features to the embedding's width.
        top_mlp: layer widths from the interaction's width to one logit.
        n_lookups: indices per table and sample; their embeddings are summed.
    """

    bottom_mlp: tuple[int, ...] = (64, 512, 512, 64)
    top_mlp: tuple[int, ...] = (576, 1024, 1024, 1024, 1)
    table_rows: tuple[int, ...] = (10_000,) * 8
    n_lookups: int = 1
    interaction: Literal["cat", "dot"] = "cat"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Sizes of a model of text; 0 and None are the model's own.

    Attributes:
        sequence_length: tokens of a sample; of source and of target each.
        n_layers: of the encoder and of the decoder each.
        n_groups: heads of keys and values.
        n_experts: of a mixture in the place of each MLP; 0: no mixture.
        n_experts_per_token: experts that compute a token.
        capacity_factor: slots of all experts of a sample over the choices of its tokens.
        mlp_width: width between the two layers of an MLP.
        head: what is predicted: a class, the span of an answer, or tokens.
    """

    sequence_length: int = 0
    vocabulary_size: int = 0
    n_layers: int = 0
    width: int = 0
    n_heads: int = 0
    n_groups: int = 0
    mlp_width: int = 0
    n_experts: int = 0
    n_experts_per_token: int = 0
    capacity_factor: float = 0.0
    head: HeadName | None = None

    def filled(self, model: TextOptions) -> TextOptions:
        """Fill in missing sizes; heads and MLP keep their ratios to the model's own sizes."""
        width, n_heads = self.width or model.width, self.n_heads or model.n_heads
        known = dataclasses.asdict(model) | {
            "n_groups": max(1, n_heads * model.n_groups // model.n_heads),
            "mlp_width": max(1, width * model.mlp_width // model.width),
        }
        if not self.n_experts:
            known |= {"n_experts_per_token": 0, "capacity_factor": 0.0}
        given = dataclasses.asdict(self)
        return TextOptions(**{name: given[name] or size for name, size in known.items()})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a model.

    Attributes:
        n_classes, n_channels, image_size: 0: the data's or the model's.
        dropout: probability of all dropout layers; None: the model's.
        has_frozen_norms: batch norm uses running statistics and does not update them.
    """

    n_classes: int = 0
    n_channels: int = 0
    image_size: int = 0
    dropout: float | None = None
    has_frozen_norms: bool = False
    dlrm: DlrmOptions = field(default_factory=DlrmOptions)
    text: TextOptions = field(default_factory=TextOptions)


def check_model(model: nn.Module) -> None:
    """Refuse a model of which nothing is trained, and what `check_weights` refuses."""
    check_weights(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        n_parameters = sum(1 for _ in model.parameters())
        raise ModelError(
            f"none of the model's {n_parameters} parameters is trained: set requires_grad of the "
            "last layer at least"
        )


def check_weights(model: nn.Module) -> None:
    """Refuse weights that have no shape yet, and modules without Python code."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"module {path!r} is a ScriptModule, which can neither be copied nor captured: "
                "give the module that torch.jit.script was called on"
            )
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ModelError(
                f"the model has a {type(module).__name__}, and a strategy distributes a model that "
                "is not distributed yet: give its .module"
            )
        weights = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(is_lazy, weights)):
            raise ModelError(
                f"module {path!r} ({type(module).__name__}) has no weights before its first batch: "
                "call the model on a batch where it is made, or give the module its sizes"
            )


def check_memory(model: nn.Module) -> None:
    """Refuse trained weights that share memory with themselves or others: one device updates them
    as one, and devices that have parts of them would not."""
    owners: defaultdict[object, dict[str, Tensor]] = defaultdict(dict)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.layout is torch.strided and weight.numel():
            owners[weight.untyped_storage()._cdata, weight.dtype][name] = weight
    for weights in owners.values():
        trained = {n: w for n, w in weights.items() if w.requires_grad}
        for name, weight in trained.items():
            steps = zip(weight.shape, weight.stride(), strict=True)
            if any(n > 1 and not step for n, step in steps):
                raise ModelError(
                    f"elements of weight {name!r} share memory (expand), where no optimizer can "
                    "update them: give the model a copy (clone)"
                )
        if len(weights) > 1 and trained:
            _check_apart(trained | weights)


def _check_apart(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights of one storage, the trained ones first, of which a trained one overlaps."""
    names = list(weights)
    size = max(_last_place(weight) for weight in weights.values()) + 1
    owner = torch.full([size], -1, device="cpu")
    for k, weight in enumerate(weights.values()):
        places = owner.as_strided(weight.shape, weight.stride(), weight.storage_offset())
        other = int(places.max())
        if other >= 0:
            raise ModelError(
                f"weights {names[other]!r} and {names[k]!r} share memory but are two tensors, "
                "which a strategy would train apart: make them one parameter, or copy (clone) one"
            )
        if weight.requires_grad:
            places.fill_(k)


def _last_place(weight: Tensor) -> int:
    reach = sum((n - 1) * step for n, step in zip(weight.shape, weight.stride(), strict=True))
    return int(weight.storage_offset() + reach)
