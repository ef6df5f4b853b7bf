"""The OPTIMIZERS that a run can use, and the LR_SCHEDULES of their learning rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from harness.domain.profile import OPTIMIZER_STEPS
from harness.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """An optimizer and its hyperparameters; only sgd uses `momentum`.

    Attributes:
        factory: makes a user's own optimizer of named parameters, or slices of them, in the place
            of the one that the other attributes describe.
        no_decay: parameters that `weight_decay` leaves alone: patterns of names such as
            `*.bias`, and `1d` for those of fewer than two dims.
        max_grad_norm: norm of all gradients, down to which larger ones are scaled; None: any.
        ema: decay of an exponential moving average of each parameter; None: there is none.
    """

    name: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()
    max_grad_norm: float | None = None
    ema: float | None = None
    factory: Callable[[list[tuple[str, nn.Parameter]]], Optimizer] | None = None

    @property
    def n_states(self) -> int:
        """Tensors of a parameter's shape that are kept beside it."""
        return OPTIMIZER_STEPS[self.variant].n_states + (self.ema is not None)

    @property
    def variant(self) -> str:
        """The kind of step, one of OPTIMIZER_STEPS: sgd with momentum is its own."""
        return "momentum" if self.name == "sgd" and self.momentum > 0 else self.name

    def group_of(self, name: str, n_dims: int) -> int:
        """The optimizer's group of a parameter: 0, or 1 if its weights do not decay."""
        return int(any(is_matched(name, n_dims, pattern) for pattern in self.no_decay))


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """How often replicas are averaged, and the optimizer of their mean.

    Attributes:
        sync_every: steps between two averages of a parameter.
        learning_rate, momentum: 1 and 0 make the mean, 0.7 and 0.9 are DiLoCo's.

    Raises:
        ConfigError: a number is out of range.
    """

    sync_every: int
    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.sync_every < 1 or not self.learning_rate > 0 or not self.momentum >= 0:
            raise ConfigError(
                f"{self} is out of range: give sync_every of at least 1, a learning_rate above 0 "
                "and a momentum of at least 0"
            )


def is_matched(name: str, n_dims: int, pattern: str) -> bool:
    """Whether a pattern of `no_decay` is for a parameter."""
    return n_dims < 2 if pattern == "1d" else fnmatchcase(name, pattern)


class KnownOptimizer(NamedTuple):
    """One row of OPTIMIZERS; its kinds of step are rows of OPTIMIZER_STEPS.

    Attributes:
        make: called with the groups, lr, weight_decay and fused.
        keeps: tensors of each parameter in its state, beside the number of steps and others by its
            options.
        options: names of further `OptimizerOptions` that it takes.
    """

    make: Callable[..., Optimizer]
    keeps: set[str]
    options: tuple[str, ...] = ()


OPTIMIZERS = {
    "sgd": KnownOptimizer(SGD, {"momentum_buffer"}, ("momentum",)),
    "adamw": KnownOptimizer(AdamW, {"exp_avg", "exp_avg_sq"}),
}


def check_optimizer(name: str) -> None:
    if name not in OPTIMIZERS:
        raise ConfigError(f"there is no optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerOptions, device: torch.device
) -> Optimizer:
    """Make an optimizer; on a GPU a fused one, which unscales fp16 gradients without waiting, but
    updates no complex parameters.

    Args:
        parameters: by name. With `no_decay` they are two groups, either of which may be empty.

    Raises:
        ConfigError: there is no such optimizer.
    """
    if options.factory is not None:
        optimizer = options.factory(list(parameters))
    else:
        optimizer = _known_optimizer(parameters, options, device)
    if options.ema is not None:
        _keep_averages(optimizer, options.ema)
    return optimizer


def check_factory(factory: object) -> None:
    """Check that a program gives a function that makes an optimizer."""
    if isinstance(factory, Optimizer):
        raise ConfigError(
            f"optimizer is of type {type(factory).__name__}, and a rank holds slices of the "
            "model: give a function that makes it of the parameters that it gets"
        )


def checked_optimizer(
    factory: Callable[[list[tuple[str, nn.Parameter]]], Any], named: list[tuple[str, nn.Parameter]]
) -> Optimizer:
    """The optimizer that a user's factory makes of named parameters.

    Raises:
        ConfigError: it is none, leaves out a parameter, or computes the loss in its step; or the
            factory hooks a parameter.
    """
    before = [_count_hooks(parameter) for _, parameter in named]
    optimizer = factory(named)
    for n_before, (name, parameter) in zip(before, named, strict=True):
        if _count_hooks(parameter) > n_before:
            raise ConfigError(
                f"the optimizer's factory hooks the gradient of {name}, of which a hook gets this "
                "rank's part: change gradients after their sum, by optimizer.register_step_pre_hook"
            )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the optimizer's factory returned an object of type {type(optimizer).__name__}, not a "
            "torch.optim.Optimizer: return the optimizer of the parameters that it is given"
        )
    parts = inspect.signature(optimizer.step).parameters.values()
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parts):
        raise ConfigError(
            f"the optimizer is of type {type(optimizer).__name__}, whose step takes a closure that "
            "runs the model again, and a strategy runs it once a step: use another, such as AdamW"
        )
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for name, parameter in named if parameter not in held]:
        n_parts = [name for name, _ in named].count(missing[0])
        remedy = "give it all, and set requires_grad to False before for what shall not be trained"
        if n_parts > 1:
            remedy = f"a dict by name keeps one of its {n_parts} parts here, so take all pairs"
        raise ConfigError(
            f"the optimizer has {len(named) - len(missing)} of {len(named)} parameters, "
            f"{missing[0]} is missing: {remedy}"
        )
    return optimizer


def _count_hooks(parameter: nn.Parameter) -> int:
    kinds = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return sum(len(hooks or ()) for hooks in kinds)


class KnownParameters:
    """Parameters as they are when a strategy has been laid out."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._known = [(p, name, p.requires_grad, _count_hooks(p)) for p, name in names.items()]

    def check(self) -> None:
        """Check that the program has neither frozen, freed nor hooked one since.

        Raises:
            ConfigError: it has.
        """
        for parameter, name, is_trained, n_hooks in self._known:
            if parameter.requires_grad != is_trained:
                raise ConfigError(
                    f"requires_grad of {name} is {parameter.requires_grad}, and was {is_trained} "
                    "when the Trainer was made: save(), make the model again, change that one, and "
                    "load() into another Trainer"
                )
            if _count_hooks(parameter) > n_hooks:
                raise ConfigError(
                    f"{name} has a hook that the Trainer was made without, which would get this "
                    "rank's part of a gradient: hook the model before, or change gradients after "
                    "their sum, by trainer.optimizer.register_step_pre_hook"
                )


def _known_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerOptions, device: torch.device
) -> Optimizer:
    check_optimizer(options.name)
    groups: list[dict[str, Any]] = [{"params": []}]
    if options.no_decay:
        groups.append({"params": [], "weight_decay": 0.0})
    is_fused = device.type == "cuda"
    for name, parameter in parameters:
        groups[options.group_of(name, parameter.dim())]["params"].append(parameter)
        is_fused = is_fused and parameter.is_floating_point()
    row = OPTIMIZERS[options.name]
    return row.make(
        groups,
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        fused=is_fused or None,
        **{name: getattr(options, name) for name in row.options},
    )


# Key of a parameter's average in the optimizer's state, with which it is saved, cut and moved; key
# of the decay in the optimizer's groups.
AVERAGE, DECAY = "average", "ema"
# Key of the momentum of a parameter's outer value, in a saved state.
OUTER_MOMENTUM = "outer_momentum"


def _keep_averages(optimizer: Optimizer, decay: float) -> None:
    """Average each parameter, from its value before its first update on, after every update."""
    for group in optimizer.param_groups:
        group[DECAY] = decay
    first: dict[Tensor, Tensor] = {}

    # The optimizer makes a parameter's state at its first step, and only if there is none.
    def remember(*_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_new = AVERAGE not in optimizer.state.get(parameter, {})
                if is_new and parameter.grad is not None:
                    first[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def average(*_: object) -> None:
        for parameter, value in first.items():
            optimizer.state[parameter][AVERAGE] = value
        first.clear()
        kept = [parameter for parameter, values in optimizer.state.items() if AVERAGE in values]
        weight: Any = 1 - decay
        # A fused optimizer is called for a step of fp16 that it skips, too.
        if (is_skipped := getattr(optimizer, "found_inf", None)) is not None:
            weight = [weight * (1 - is_skipped)] * len(kept)
        if kept:
            torch._foreach_lerp_([optimizer.state[p][AVERAGE] for p in kept], kept, weight)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(average)


def average_of(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """The average of a parameter; the parameter itself if it has not been updated."""
    average: Tensor = optimizer.state.get(parameter, {}).get(AVERAGE, parameter)
    return average.detach()


def kept_keys(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The keys of a saved state that the optimizer keeps; averages only if it has some.

    Raises:
        ConfigError: another optimizer has saved it.
    """
    saved = {key for values in state.values() for key in values} - {OUTER_MOMENTUM}
    known = (row.keeps for row in OPTIMIZERS.values() if row.make is type(optimizer))
    kept = next(known, frozenset[str]())  # a user's own may keep any
    for values in state.values():
        found = set(values) - {"step", AVERAGE, OUTER_MOMENTUM}
        if found and not kept <= found:
            raise ConfigError(
                f"the state has {' and '.join(sorted(found))} of a parameter, this optimizer keeps "
                f"{' and '.join(sorted(kept))}: give the optimizer that saved it"
            )
    return saved if DECAY in optimizer.param_groups[0] else saved - {AVERAGE}


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Use a learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


LrSchedule = Literal["constant", "step", "cosine"]

# From an optimizer, the period in steps, and the factor of each drop.
LR_SCHEDULES: dict[LrSchedule, Callable[[Optimizer, int, float], LRScheduler | None]] = {
    "constant": lambda optimizer, period, gamma: None,
    "step": lambda optimizer, period, gamma: StepLR(optimizer, period, gamma),
    "cosine": lambda optimizer, period, gamma: CosineAnnealingLR(optimizer, period),
}


class LearningRates:
    """The rates of one run. They depend on the step alone, so every engine and every strategy has
    the same ones, and so has a run that continues another.

    Args:
        period: steps between two drops, or until the cosine is 0.
        gamma: factor of each drop of `step`.
        n_rising: steps before the schedule, over which the rate rises linearly.
    """

    def __init__(
        self, rate: float, schedule: LrSchedule, period: int, gamma: float, n_rising: int = 0
    ) -> None:
        self._n_rising = n_rising
        # The scheduler's own, because an engine may be replaced while training.
        self._optimizer = SGD([torch.zeros(1)], lr=rate)
        self._scheduler = LR_SCHEDULES[schedule](self._optimizer, period, gamma)
        self._rates = [rate]

    def at(self, step: int) -> float:
        """The rate of a measured step; warm-up steps, below 0, have that of the first."""
        step = max(0, step)
        if step < self._n_rising:
            return self._rates[0] * (step + 1) / self._n_rising
        step -= self._n_rising
        while self._scheduler is not None and len(self._rates) <= step:
            self._optimizer.step()  # else torch warns about the order
            self._scheduler.step()
            self._rates.append(float(self._scheduler.get_last_lr()[0]))
        return self._rates[min(step, len(self._rates) - 1)]

    def first_drop(self, factor: float, start: int, stop: int) -> int | None:
        """The first step below `stop` whose rate is at most the `factor`-th part of the highest
        since `start`; None if there is none."""
        highest = self.at(start)
        for step in range(start + 1, stop):
            highest = max(highest, self.at(step))
            if self.at(step) <= highest / factor * (1 + 1e-9):  # rates are rounded
                return step
        return None
