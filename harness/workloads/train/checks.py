"""Refuse flags of training that contradict each other."""

from __future__ import annotations

from harness.errors import ConfigError
from harness.workloads.train.config import (
    TrainCase,
    TrainConfig,
    parse_change,
)


def check_compiled(case: TrainCase) -> None:
    """Refuse to compile where that is not possible."""
    if case.compile and case.engine == "deepspeed":
        raise ConfigError(
            f"--compile is for the engines torch and executor, {case.strategy} is trained by "
            "deepspeed: drop it"
        )
    if case.compile and (case.is_asynchronous or case.is_elastic):
        kind = "asynchronous" if case.is_asynchronous else "elastic"
        raise ConfigError(f"{kind} training has no --compile: drop one of them")


def check_changes(config: TrainConfig) -> None:
    """Refuse changes of strategy that are malformed, out of order or outside the run."""
    if not 0 < config.freeze_alpha < 1:
        raise ConfigError(f"--freeze-alpha {config.freeze_alpha} must be above 0 and below 1")
    _check_rates(config)
    half = next((dtype for dtype in config.dtype if dtype in ("bf16", "fp16")), None)
    if config.cache != "off" and half is not None:
        raise ConfigError(
            f"--cache {config.cache} is for fp32 and tf32, because ranks keep other dtypes than "
            f"they send with --dtype {half}: drop one of them"
        )
    is_on = {
        "freeze": config.freeze != "none",
        "survive": config.survive,
        "drift": config.drift,
        "max-grad-norm": config.max_grad_norm is not None,
    }
    for name in filter(is_on.__getitem__, is_on):
        if config.asynchronous:
            raise ConfigError(f"--{name} is for synchronous training: drop --asynchronous")
    if config.shrink == "pipetransformer" and {"single", "ddp", "tensor", "hybrid"}.issuperset(
        config.strategy
    ):
        raise ConfigError(
            f"--shrink pipetransformer shortens a pipeline, {' '.join(config.strategy)} has none: "
            "use --strategy pipeline, or --shrink search"
        )
    last, n_steps = 0, config.steps or TrainCase.steps
    for text in config.change:
        step, _ = parse_change(text)
        if step <= last or (config.epochs is None and step >= n_steps):
            bound = "" if config.epochs else f" and below --steps {n_steps}"
            raise ConfigError(
                f"--change {text} is for step {step}: steps must be above {last}{bound}, ascending"
            )
        last = step


def _check_rates(config: TrainConfig) -> None:
    """Refuse flags of the learning rate or the weight decay that contradict each other."""
    if config.no_decay and not config.weight_decay:
        raise ConfigError(
            f"--no-decay {' '.join(config.no_decay)} leaves parameters out of --weight-decay, "
            "which is 0: drop it, or give --weight-decay"
        )
    if config.lr_schedule == "step" and config.lr_step_size is None:
        raise ConfigError("--lr-schedule step drops after --lr-step-size, none is given: add it")
    if config.unfreeze is None:
        return
    if config.unfreeze <= 1:
        raise ConfigError(f"--unfreeze {config.unfreeze:g} must be above 1: 10 is to a tenth")
    if config.lr_schedule == "constant":
        raise ConfigError(
            "--unfreeze waits for a drop of the learning rate, --lr-schedule is constant: use step "
            "or cosine"
        )
