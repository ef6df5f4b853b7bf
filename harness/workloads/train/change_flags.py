"""Check the flags of changes, freezing, the learning rate and the cache before a sweep begins."""

from __future__ import annotations

from harness.errors import ConfigError
from harness.workloads.train.config import TrainConfig, parse_change


def check_changes(config: TrainConfig) -> None:
    """Refuse changes of strategy that are malformed, out of order or outside the run."""
    if not 0 < config.freeze_alpha < 1:
        raise ConfigError(f"--freeze-alpha {config.freeze_alpha} must be above 0 and below 1")
    _check_rates(config)
    if config.cache != "off" and config.freeze == "none":
        raise ConfigError(
            f"--cache {config.cache} keeps the outputs of frozen layers, and --freeze none freezes "
            "none: add --freeze schedule"
        )
    half = next((dtype for dtype in config.dtype if dtype in ("bf16", "fp16")), None)
    if config.cache != "off" and half is not None:
        raise ConfigError(
            f"--cache {config.cache} is for fp32 and tf32, because ranks keep other dtypes than "
            f"they send with --dtype {half}: drop one of them"
        )
    if config.freeze != "none" and config.asynchronous:
        raise ConfigError("--freeze is for synchronous training: drop --asynchronous")
    if config.survive and config.asynchronous:
        raise ConfigError("--survive is for synchronous training: drop --asynchronous")
    if config.shrink != "none" and config.freeze == "none":
        raise ConfigError(
            f"--shrink {config.shrink} plans again when layers freeze, and none do: add --freeze "
            "schedule"
        )
    if config.replicate and config.shrink == "none":
        raise ConfigError("--replicate turns ranks that --shrink frees into replicas: add --shrink")
    last = 0
    for text in config.change:
        step, _ = parse_change(text)
        if step <= last or (config.epochs is None and step >= config.steps):
            bound = "" if config.epochs else f" and below --steps {config.steps}"
            raise ConfigError(
                f"--change {text} is for step {step}: steps must be above {last}{bound}, ascending"
            )
        last = step


def _check_rates(config: TrainConfig) -> None:
    """Refuse flags of the learning rate that contradict each other."""
    is_step = config.lr_schedule == "step"
    if is_step != (config.lr_step_size is not None):
        given = "none is given" if is_step else f"--lr-schedule is {config.lr_schedule}"
        remedy = "add it" if is_step else "drop it, or use --lr-schedule step"
        raise ConfigError(f"--lr-step-size is for --lr-schedule step, and {given}: {remedy}")
    if config.unfreeze is None:
        return
    if config.unfreeze <= 1:
        raise ConfigError(f"--unfreeze {config.unfreeze:g} must be above 1: 10 is to a tenth")
    if config.freeze == "none":
        raise ConfigError("--unfreeze trains frozen layers again, --freeze is none: add it")
    if config.lr_schedule == "constant":
        raise ConfigError(
            "--unfreeze waits for a drop of the learning rate, --lr-schedule is constant: use step "
            "or cosine"
        )
