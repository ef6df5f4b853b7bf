"""Flags of several workloads: of the model, the search and every run, with their checks and
`--help`.

None and `auto` mean automatic and pass every check.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from harness.domain.shard_state import ShardState
from harness.errors import ConfigError
from harness.inputs import MOST_COUNT
from harness.runtime.models import MODELS, input_kind
from harness.runtime.models.task import DlrmOptions, HeadName, ModelOptions, TextOptions
from harness.runtime.ranks.introduction import HEARTBEAT_TIMEOUT_S, RUN_TIMEOUT_S
from harness.units import parse_memory

Dtype = Literal["fp32", "tf32", "bf16", "fp16"]
DTYPES = get_args(Dtype)
_METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


def flag(name: str) -> str:
    """The command-line spelling of a field's name."""
    return f"--{name.replace('_', '-')}"


def check_at_least(config: Any, bounds: Mapping[str, float]) -> None:
    """Refuse values below their bounds."""
    for name, bound in bounds.items():
        _check(config, name, partial(operator.le, bound), f"at least {bound}")


def check_dtypes(names: Iterable[str]) -> None:
    """Refuse a data type that is not in DTYPES."""
    for dtype in names:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}: choose one")


def check_above_zero(config: Any, names: Iterable[str]) -> None:
    """Refuse values of 0 or less."""
    for name in names:
        _check(config, name, partial(operator.lt, 0), "above 0")


def _check(config: Any, name: str, is_within: Callable[[float], bool], bound: str) -> None:
    given = getattr(config, name)
    values, each = (given, " each") if isinstance(given, tuple) else ((given,), "")
    numbers = [value for value in values if value not in (None, "auto")]
    is_whole = all(isinstance(value, int) for value in numbers)
    most = MOST_COUNT if is_whole else sys.float_info.max
    if all(is_within(value) and value <= most for value in numbers):
        return
    text = " ".join(map(str, values))
    is_large = is_whole and any(value > most for value in numbers)
    finite = ", and at most 2**53" if is_large else "" if is_whole else ", and finite"
    raise ConfigError(f"{flag(name)} {text} must be {bound}{each}{finite}")


@dataclass(frozen=True, kw_only=True)
class DlrmFlags:
    """Sizes of dlrm."""

    dlrm_bottom_mlp: tuple[int, ...] = (64, 512, 512, 64)
    """dlrm: layer widths of the bottom MLP; the first is the number of dense features, the last the
    width of the embeddings."""
    dlrm_top_mlp: tuple[int, ...] = (576, 1024, 1024, 1024, 1)
    """dlrm: layer widths of the top MLP, from the interaction's output to one logit."""
    dlrm_table_rows: tuple[int, ...] = (10_000,) * 8
    """dlrm: rows of each embedding table, one number per table."""
    dlrm_lookups: int = 1
    """dlrm: indices that a sample looks up (and sums) in each table."""
    dlrm_interaction: Literal["cat", "dot"] = "cat"
    """dlrm: how the vectors are combined: concatenated (cat), or by pairwise dot products (dot)."""

    def dlrm_options(self) -> DlrmOptions:
        return DlrmOptions(
            bottom_mlp=self.dlrm_bottom_mlp,
            top_mlp=self.dlrm_top_mlp,
            table_rows=self.dlrm_table_rows,
            n_lookups=self.dlrm_lookups,
            interaction=self.dlrm_interaction,
        )


_TEXT_COUNTS = (
    *("sequence_length", "vocabulary_size", "n_layers", "width", "n_heads", "n_groups"),
    *("mlp_width", "n_experts", "n_experts_per_token"),
)
_SIZES = (*_TEXT_COUNTS, "capacity_factor")


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """Sizes of a model of text."""

    sequence_length: int | None = None
    """text: tokens of a sample (t5, nmt: of source and of target each). Default: the model's."""
    vocabulary_size: int | None = None
    """text: number of tokens. Default: that of the vocabulary file, else the model's."""
    n_layers: int | None = None
    """text: layers (t5, nmt: of encoder and of decoder each)."""
    width: int | None = None
    """text: features of a token between layers."""
    n_heads: int | None = None
    """text: heads of an attention."""
    n_groups: int | None = None
    """text: heads of keys and values, each shared by n_heads / n_groups heads of queries."""
    mlp_width: int | None = None
    """text: features inside an MLP."""
    n_experts: int | None = None
    """llama: number of experts of the mixture that replaces each MLP. Default: no mixture."""
    n_experts_per_token: int | None = None
    """llama: experts that compute a token. Default: 2."""
    capacity_factor: float | None = None
    """llama: an expert takes at most this many times its equal share of the tokens that a sample
    sends to experts, and drops further tokens. Default: 1.25."""
    head: HeadName | None = None
    """text: prediction of bert_base: classes, span (of an answer) or tokens. Default: that of the
    data set, else classes."""

    def text_options(self) -> TextOptions:
        sizes = {name: getattr(self, name) or 0 for name in _SIZES}
        return TextOptions(**sizes, head=self.head)


_LEAST_MODEL = dict.fromkeys((
    "dlrm_bottom_mlp", "dlrm_top_mlp", "dlrm_table_rows", "dlrm_lookups", *_TEXT_COUNTS,
    "image_size", "n_classes",
), 1)  # fmt: skip
# Sizes that models of one kind have.
_OF_KIND = {
    "images": ("image_size",),
    "text": (*_SIZES, "head"),
    "dlrm": tuple(field.name for field in fields(DlrmFlags)),
}


@dataclass(frozen=True, kw_only=True)
class ModelFlags(DlrmFlags, TextFlags):
    """A model's name and its options."""

    model: str = "resnet18"
    f"""{", ".join(MODELS)}, or your own as package.module:factory (a function that returns an
    nn.Module, or a pair of an nn.Module and a batch of example inputs; docs/models.md)."""
    image_size: int | None = None
    """Height and width of the images in pixels. Default: that of the data set if the model accepts
    this size, else the model's (usually 224). Small images, such as 64, suit CPUs."""
    n_classes: int | None = None
    """Number of classes. Default: that of the data set, else the model's."""
    dropout: float | None = None
    """Probability of every dropout layer. Default: the model's."""
    batch_norm: Literal["local", "global", "frozen"] = "local"
    """Statistics of batch norm. local: each rank uses its own samples, as DDP does, so results
    differ from one device's. global: all samples of a microbatch (the torch engine needs GPUs for
    it, because it uses SyncBatchNorm). frozen: running statistics, not updated."""
    compile: bool = False
    """Compile forward and backward by torch.compile (torch engine and executor). The first step
    then takes half a minute or more. A prediction scales the times of operators, which are not
    compiled, to the whole compiled step of one device; `profile --compile` measures that step and
    has its own profile file."""
    channels_last: bool = False
    """Keep the filters and outputs of convolutions in channels-last order, which GPUs' tensor cores
    compute faster (torch engine and executor). Each order has its own profile file."""

    def check(self) -> None:
        """Refuse numbers that no model accepts."""
        check_at_least(self, _LEAST_MODEL)
        check_above_zero(self, ("capacity_factor",))
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ConfigError(
                f"--dropout {self.dropout} is a probability: give 0 or more, and below 1"
            )
        self._check_kind()

    def _check_kind(self) -> None:
        """Refuse sizes that models of this kind have not."""
        used = (
            *_OF_KIND[input_kind(self.model)],
            *(["sequence_length"] if ":" in self.model else []),
        )
        for kind, names in _OF_KIND.items():
            for name in names:
                if name not in used and getattr(self, name) != getattr(ModelFlags(), name):
                    raise ConfigError(
                        f"{flag(name)} is for built-in models of {kind}, not for --model "
                        f"{self.model}: drop it, or change --model"
                    )

    def given_options(self) -> ModelOptions:
        """Options as given; `fit_options` fills the missing ones in from the model and the data."""
        return ModelOptions(
            n_classes=self.n_classes or 0,
            image_size=self.image_size or 0,
            dropout=self.dropout,
            has_frozen_norms=self.batch_norm == "frozen",
            dlrm=self.dlrm_options(),
            text=self.text_options(),
        )

    @property
    def norm_scope(self) -> Literal["local", "global"]:
        """Samples that batch statistics are computed over; without effect if they are frozen."""
        return "global" if self.batch_norm == "global" else "local"


def fitted_flags(fitted: ModelOptions) -> dict[str, Any]:
    """Flags of a model after `fit_options` filled in the missing ones, so that runs of equal models
    have equal configurations."""
    return {
        "image_size": fitted.image_size or None,
        "n_classes": fitted.n_classes or None,
        "n_channels": fitted.n_channels or None,
        **{name: getattr(fitted.text, name) or None for name in (*_SIZES, "head")},
    }


def shared_flags(source: Any, kind: type) -> dict[str, Any]:
    """Values of the fields of `source` that the dataclass `kind` has too, by name."""
    names = {field.name for field in fields(kind)}
    return {f.name: getattr(source, f.name) for f in fields(source) if f.name in names}


def flag_words(config: Mapping[str, Any], names: Iterable[str], defaults: Any) -> list[str]:
    """Command-line words for the model, and for those flags that differ from their defaults."""
    words: list[str] = []
    for name in names:
        given, default = _as_tuple(config[name]), _as_tuple(getattr(defaults, name))
        if given != default or name == "model":
            words += [flag(name), *(str(value) for value in given if value is not True)]
    return words


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Limits of a search in time and memory."""

    search_seconds: float = 120.0
    """Time limit of the search, after which it returns the best plan found."""
    search_budget: int | None = None
    """Maximum number of plans that the search simulates. Default: as many as take some seconds."""
    trials: int = 4
    """Number of best predicted plans that are trained for a few steps each, in turn. The plan with
    the fastest measured step is chosen. 1 chooses by prediction alone."""
    memory: str | None = None
    """Memory that a plan may use on each device, such as 12GB. Default: after a reserve, 95 % of a
    GPU's memory, or half of a rank's share of its host's (docs/metrics.md: memory for training)."""
    shard_state: Literal["auto"] | ShardState = "auto"
    """State that is sharded, so that each of the n devices that hold a weight keeps 1/n of it.
    optimizer: the optimizer's state (ZeRO-1). gradients: gradients, too (ZeRO-2, SHARD_GRAD_OP).
    parameters: parameters, too (ZeRO-3, FULL_SHARD). With _in_node, n counts the devices of one
    node (HSDP, HYBRID_SHARD). auto: in a search as much as memory requires, and the optimizer's
    state if this is predicted to make a step 2 % faster; else none."""
    ema: float | None = None
    """Keep an exponential moving average of each trained parameter, with this decay, such as 0.999,
    beside the optimizer's state. --evaluate and --save-model give the weights and their average."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_memory(self.memory)

    @property
    def asked_state(self) -> ShardState | None:
        """The state that must be sharded; None if a search decides."""
        return None if self.shard_state == "auto" else self.shard_state

    def check_search(self) -> None:
        """Refuse limits that are too small."""
        check_at_least(self, {"search_budget": 1, "trials": 1})
        check_above_zero(self, ("search_seconds",))
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"--ema {self.ema} must be above 0 and below 1, such as 0.999")
        _ = self.memory_bytes  # which refuses what is no size of a device


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Flags that every workload shares."""

    results: Path = Path("results")
    """Results directory; each run gets a directory in it."""
    resume: bool = False
    """Skip runs that the results directory already holds with status ok or oom (out of memory)."""
    dry_run: bool = False
    """Print the runs in order and exit without running them."""
    run_timeout_s: float = RUN_TIMEOUT_S
    """Stop a run after this many seconds and record it with status timeout. The sweep then goes on,
    except after links, which has no processes of its own."""
    collective_timeout_s: float = 300.0
    """Fail a run in which a rank has waited for other ranks in a collective for this long."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    """End the sweep on all hosts, with a record of the run, if a rank or host has sent no sign of
    life for this long (or for --run-timeout-s, if that is shorter)."""

    def check(self, config: Any) -> None:
        """Refuse limits that are not positive or too short for the workload.

        Args:
            config: the configuration of the workload or the comparison.
        """
        check_above_zero(self, ("run_timeout_s", "collective_timeout_s", "heartbeat_timeout_s"))
        wait_s = getattr(config, "longest_wait_s", 0.0)
        if wait_s > self.collective_timeout_s:
            raise ConfigError(
                f"--time-budget-s {wait_s:g} is longer than a rank waits for another, "
                f"--collective-timeout-s {self.collective_timeout_s:g}: lower the first or raise "
                "the second"
            )


def prepare_help(config: Any) -> None:
    """Order the flags of a dataclass, its own before those of its bases, and show each docstring as
    one paragraph, without None and defaults that mean automatic."""
    bases = [base for base in config.__mro__ if "__annotations__" in vars(base)]
    known, hints = config.__dataclass_fields__, get_type_hints(config, include_extras=True)
    for base in bases:
        docs = dict(_docstrings(base))
        for name in base.__annotations__:
            if name not in known or known[name].metadata:
                continue
            known[name].metadata = MappingProxyType({"help": docs.get(name, "")})
            if known[name].default in (None, ()):
                base.__annotations__[name] = _automatic(hints[name])
    names = [name for base in bases for name in base.__annotations__ if name in known]
    config.__dataclass_fields__ = {name: known[name] for name in names}


def _automatic(hint: Any) -> Any:
    """A type whose flag shows neither None nor its default."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    metavar = None
    if NoneType in get_args(hint) and len(kinds) == 1:
        choices = ",".join(map(str, get_args(kinds[0])))
        metavar = f"{{{choices}}}" if choices else _METAVARS[kinds[0]]
    return Annotated[hint, tyro.conf.arg(metavar=metavar, help_behavior_hint="")]


def _docstrings(config: type) -> Iterator[tuple[str, str]]:
    """The docstring below each field of a class, without its line breaks; one that lists the rows
    of a table is an f-string."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(body, ast.ClassDef)
    names = vars(sys.modules[config.__module__])
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            # A string, or an f-string, of this package's own source.
            assert isinstance(below.value, ast.Constant | ast.JoinedStr)
            text = eval(compile(ast.Expression(below.value), "", "eval"), names)
            yield field.target.id, " ".join(text.split())
