"""Refuse flags of training that contradict each other."""

from __future__ import annotations

from typing import Any

from harness.domain.checkpoints import MOST_OF_STAGE
from harness.domain.schedule import SCHEDULES, check_schedule
from harness.domain.shard_state import shards_parameters
from harness.errors import ConfigError
from harness.measure.derive.settings import CHANGING
from harness.plan.layouts.degrees import parse_layout
from harness.runtime.data import DATA, OF_TEXT, entry_of
from harness.runtime.engines.optimizers import check_optimizer
from harness.workloads.common.flags import (
    check_above_zero,
    check_at_least,
    check_dtypes,
    flag,
    flag_words,
)
from harness.workloads.train.config import (
    SHARDABLE,
    STRATEGIES,
    ZERO_STATES,
    TrainCase,
    TrainConfig,
    is_file,
    is_layout,
    parse_change,
)

_DEGREES = "tp=T,dp=D,pp=P"
_FILE = "a strategy's file"
_OWN_DATA = "package.module:factory"
# Flags and the only strategies that use them; a strategy's file holds its own schedule and stages.
_USED_BY = {
    "stages": ("pipeline",),
    "sync_every": ("ddp", _DEGREES, _FILE),
    "asynchronous": ("pipeline", _FILE),
    "shard_state": (*SHARDABLE, _DEGREES),
    "recompute": (*STRATEGIES["executor"][:-1], _DEGREES),
    **dict.fromkeys(("schedule", "microbatches"), ("pipeline", _DEGREES)),
    **dict.fromkeys(("search_seconds", "search_budget", "trials", "memory"), ("searched",)),
}
_SEARCHED_BESIDE = ("search_seconds", "search_budget", "memory")
# Flags that refine another one, and its values with which they do.
_REFINES: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("freeze_alpha", "freeze_interval", "unfreeze", "shrink", "cache"),
        ("freeze", ("schedule", "gradient")),
    ),
    "cache_memory": ("cache", ("auto", "on")),
    "replicate": ("shrink", ("search", "pipetransformer")),
    "drift_threshold": ("drift", (True,)),
    "rejoin": ("survive", (True,)),
    "recompute_segments": ("recompute", (True,)),
    **dict.fromkeys(("lr_step_size", "lr_gamma"), ("lr_schedule", ("step",))),
    "momentum": ("optimizer", ("sgd",)),
    "n_samples": ("data", ("synthetic",)),
    "data_dir": ("data", (*(name for name in DATA if name != "synthetic"), _OWN_DATA)),
    "vocabulary": ("data", OF_TEXT),
    **dict.fromkeys(("held_out_dir", "evaluate_every"), ("evaluate", (True,))),
}

# Flags that act after so many steps, and the most of them beside --steps.
_ACTS_AFTER = {
    "freeze_interval": ("freezes layers", -1),
    "lr_step_size": ("lowers the learning rate", -1),
    "lr_warm_up": ("reaches the learning rate", 0),
    "noise_every": ("measures the gradient noise scale", -1),
    "save_every": ("saves the state", 0),
}

_FEWEST_NOISE_STEPS = 16

_AT_LEAST = {
    **dict.fromkeys((
        "warm_up", "no_sync_steps", "noise_steps", "profiler_steps", "n_workers", "momentum",
        "outer_momentum", "weight_decay", "lr_warm_up", "cache_memory", "seed",
    ), 0),
    **dict.fromkeys((
        "steps", "epochs", "n_samples", "repeats", "stages", "batch_size", "per_device_batch",
        "n_ranks", "microbatches", "freeze_interval", "lr_step_size", "save_every", "rejoin",
        "recompute_segments", "sync_every", "evaluate_every", "noise_every",
    ), 1),
}  # fmt: skip


def _check_unused(config: TrainConfig) -> None:
    """Refuse flags that none of the strategies uses."""
    strategies = " or ".join(config.strategy)
    given = {_kind_of(strategy) for strategy in config.strategy}
    is_searched_beside = config.shrink == "search" or config.drift or config.survive
    for name, users in _USED_BY.items():
        if given.isdisjoint(users) and not (is_searched_beside and name in _SEARCHED_BESIDE):
            why = f"--strategy {' or '.join(users)}, not for {strategies}"
            _check_unset(config, name, why, f"add {users[0]}")
    for name, (other, values) in _REFINES.items():
        value = getattr(config, other)
        if (_OWN_DATA if other == "data" and ":" in value else value) not in values:
            words = [flag(other) if one is True else f"{flag(other)} {one}" for one in values]
            is_given = "it is not given" if value is False else f"{flag(other)} is {value}"
            _check_unset(config, name, f"{' or '.join(words)}, {is_given}", f"use {words[0]}")


def _check_held_out(config: TrainConfig) -> None:
    """Refuse an evaluation without held-out samples, or with those of two places."""
    is_elsewhere = config.held_out_dir is not None
    has_held_out = entry_of(config.data).held_out is not None
    others = [n for n, row in DATA.items() if not row.held_out and n != "synthetic"]
    if is_elsewhere and config.data not in others:
        why = f"--data {' or '.join(others)}, --data is {config.data}"
        _check_unset(config, "held_out_dir", why, f"use --data {others[0]}")
    if config.evaluate and not (has_held_out or is_elsewhere):
        raise ConfigError(
            f"--evaluate measures held-out samples, --data {config.data} has none: give "
            "--held-out-dir, or use digits, cifar or your own data"
        )


def _kind_of(strategy: str) -> str:
    if is_layout(strategy):
        return _DEGREES
    return _FILE if is_file(strategy) else strategy


def _check_unset(config: TrainConfig, name: str, why: str, remedy: str) -> None:
    """Refuse a flag that is set, but has no effect beside the others."""
    value = getattr(config, name)
    if value != getattr(TrainConfig(), name):
        given = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise ConfigError(
            f"{flag(name)}{'' if value is True else f' {given}'} is for {why}: drop the flag, or "
            f"{remedy}"
        )


def check_config(config: TrainConfig, n_ranks: int) -> None:
    config.check()
    check_at_least(config, _AT_LEAST)
    n_segments = config.recompute_segments or 0
    if n_segments > MOST_OF_STAGE:
        raise ConfigError(f"--recompute-segments {n_segments} must be at most {MOST_OF_STAGE}")
    if max(config.sync_every) == 1:
        for name in ("outer_lr", "outer_momentum"):
            _check_unset(config, name, "--sync-every above 1", "give that")
    check_above_zero(
        config,
        ("learning_rate", "lr_gamma", "outer_lr", "bucket_mib", "drift_threshold", "max_grad_norm"),
    )
    config.check_search()
    check_dtypes(config.dtype)
    check_optimizer(config.optimizer)
    _check_unused(config)
    _check_held_out(config)
    _check_changes(config)
    for name, other, what in (
        ("batch_size", "per_device_batch", "batch"), ("steps", "epochs", "number of steps"),
    ):  # fmt: skip
        if getattr(config, name) and getattr(config, other):
            words = " ".join(flag_words(vars(config), (name, other), TrainConfig()))
            raise ConfigError(f"{words} both set the {what}: give one of them")
    for count in config.n_ranks:
        if count > n_ranks:
            raise ConfigError(
                f"--n-ranks {count} needs {count} ranks, {n_ranks} were started: lower it or "
                "start more (mpirun -np)"
            )


def check_case(case: TrainCase) -> None:
    """Refuse flags that contradict each other, or that the engine of a run does not support."""
    if case.is_asynchronous:
        _check_asynchronous(case)
    if case.strategy == "pipeline":
        _check_flow(case)
    if is_layout(case.strategy):
        _check_degrees(case)
    if case.microbatches is not None and case.microbatches > case.batch:
        raise ConfigError(
            f"--microbatches {case.microbatches} need a sample each, the batch has {case.batch}: "
            "lower it"
        )
    _check_engine(case)
    if case.sharded_state != "none":
        _check_sharded_state(case)
    for name in ("profiler_steps", "noise_steps"):
        if (n_steps := getattr(case, name)) and case.is_elastic:
            raise ConfigError(
                f"{flag(name)} {n_steps} is for one strategy, "
                f"{flag(case.elastic_flags[0])} may change it: drop one of them"
            )
    _check_noise(case)
    _check_average(case)
    _check_compiled(case)


def _check_asynchronous(case: TrainCase) -> None:
    if case.strategy == "pipeline" and case.schedule != "1f1b":
        raise ConfigError(
            f"--asynchronous follows 1f1b, not --schedule {case.schedule}: drop one of them"
        )
    if case.strategy == "pipeline" and case.recompute:
        raise ConfigError("--asynchronous does not support recomputation: drop --recompute")
    if case.sharded_state != "none":
        raise ConfigError(f"--asynchronous has no --shard-state {case.shard_state}: drop one")
    if case.dtype == "fp16":
        raise ConfigError("--asynchronous has no loss scaling for --dtype fp16: use bf16")


def _check_engine(case: TrainCase) -> None:
    """Refuse flags of other engines than the one that trains the strategy."""
    state = ZERO_STATES.get(case.strategy)
    remedy = f"use --strategy ddp --shard-state {state}" if state else "add --engine executor"
    if (given := case.executor_flags) and case.engine != "executor":
        raise ConfigError(
            f"{flag(given[0])} needs the executor, {case.strategy} is trained by {case.engine}: "
            f"{remedy}"
        )
    # DeepSpeed broadcasts weights as bytes, which it cannot view in channels-last order.
    others = {"--reduce-dtype int8": case.reduce_dtype == "int8"}
    others["--channels-last"] = case.channels_last
    if case.engine == "deepspeed" and any(others.values()):
        raise ConfigError(
            f"{next(filter(others.get, others))} is for torch and the executor, {case.strategy} is "
            f"trained by deepspeed: {remedy}"
        )
    if case.engine == "executor" and case.balance == "speed" and case.strategy != "ddp":
        raise ConfigError(
            f"--balance speed shares the samples of ddp, not of {case.strategy}: drop it; searched "
            "and pipeline balance by the profile, and degrees take shares=2-1"
        )


def _check_sharded_state(case: TrainCase) -> None:
    if case.n_ranks == 1:
        raise ConfigError(
            f"--shard-state {case.shard_state} divides weights among ranks, the run of "
            f"{case.strategy} has 1: drop it, or start more ranks (mpirun -np)"
        )
    if shards_parameters(case.sharded_state) and SCHEDULES[case.schedule].splits_backward:
        raise ConfigError(
            f"--shard-state {case.shard_state} frees weights after a backward, --schedule "
            f"{case.schedule} computes their gradients later: use 1f1b, or --shard-state gradients"
        )


def _check_noise(case: TrainCase) -> None:
    """Refuse to measure the gradient noise scale where the norm of a batch's gradient is none."""
    if not case.noise_steps:
        if case.noise_every:
            raise ConfigError(
                f"--noise-every {case.noise_every} is for --noise-steps, it is not given: drop the "
                "flag, or add --noise-steps 64"
            )
        return
    asked = f"--noise-steps {case.noise_steps}"
    if case.noise_steps < _FEWEST_NOISE_STEPS:
        raise ConfigError(f"{asked} are too few for an interval: give {_FEWEST_NOISE_STEPS} or 0")
    if case.batch < 2:
        raise ConfigError(f"{asked} compares batches of one sample and more: raise --batch-size 1")
    if case.engine == "deepspeed" or case.is_asynchronous or case.sync_every > 1:
        others = {"--asynchronous": case.is_asynchronous, "--sync-every": case.sync_every > 1}
        other = next((name for name, is_given in others.items() if is_given), case.strategy)
        raise ConfigError(
            f"{asked} needs one gradient of a whole batch, and {other} gives none: measure with "
            "--strategy single or ddp"
        )


def _check_average(case: TrainCase) -> None:
    """Refuse to average replicas where that is not possible."""
    if case.sync_every == 1:
        return
    if case.engine == "deepspeed":
        raise ConfigError(
            f"--sync-every {case.sync_every} is for the engines torch and executor, "
            f"{case.strategy} is trained by deepspeed: drop it"
        )
    of_one = {name: case.is_set(name) for name in ("ema", *CHANGING)}
    of_one["asynchronous"] = case.is_asynchronous
    for name in filter(of_one.__getitem__, of_one):
        raise ConfigError(
            f"{flag(name)} is for the training of one replica, --sync-every {case.sync_every} "
            "trains several: drop one of them"
        )
    if case.epochs is None:
        case.check_averages(case.steps)


def _check_degrees(case: TrainCase) -> None:
    n_devices = parse_layout(case.strategy).n_devices
    if n_devices > case.n_ranks:
        raise ConfigError(
            f"--strategy {case.strategy} needs {n_devices} ranks, the run has {case.n_ranks}: "
            "lower a degree, or start more ranks (mpirun -np)"
        )
    if case.schedule == "interleaved":
        raise ConfigError(
            f"--schedule interleaved gives ranks two stages, {case.strategy} one: use 1f1b, or "
            "--strategy pipeline"
        )


def _check_flow(case: TrainCase) -> None:
    """Refuse numbers of stages and microbatches that the schedule does not allow on these ranks."""
    n_stages = case.stages or case.n_ranks * (2 if case.schedule == "interleaved" else 1)
    if n_stages > case.n_ranks and case.schedule != "interleaved":
        raise ConfigError(
            f"--stages {n_stages} need a rank each under {case.schedule}, the run has "
            f"{case.n_ranks}: lower it, or use --schedule interleaved"
        )
    check_schedule(
        case.schedule,
        n_stages=n_stages,
        n_microbatches=case.microbatches or min(case.n_ranks, case.batch),
        n_ranks=min(n_stages, case.n_ranks),
    )


def _check_compiled(case: TrainCase) -> None:
    """Refuse to compile where that is not possible."""
    if case.compile and case.engine == "deepspeed":
        raise ConfigError(
            f"--compile is for the engines torch and executor, {case.strategy} is trained by "
            "deepspeed: drop it"
        )
    others = ["asynchronous"] if case.is_asynchronous else case.elastic_flags
    if case.compile and others:
        raise ConfigError(f"{flag(others[0])} has no --compile: drop one of them")


def _check_changes(config: TrainConfig) -> None:
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
    for name in filter(config.is_set, ("freeze", "survive", "drift", "max_grad_norm")):
        if config.asynchronous:
            raise ConfigError(f"{flag(name)} is for synchronous training: drop --asynchronous")
    if config.shrink == "pipetransformer" and not any(map(_may_have_stages, config.strategy)):
        raise ConfigError(
            f"--shrink pipetransformer shortens a pipeline, {' '.join(config.strategy)} has none: "
            "use --strategy pipeline, or --shrink search"
        )
    last, n_steps = 0, config.steps or TrainCase.steps
    for name, (what, n_most) in _ACTS_AFTER.items():
        after = getattr(config, name) or 0
        if config.epochs is None and after > n_steps + n_most:
            raise ConfigError(
                f"{flag(name)} {after} {what} after as many steps, the run has --steps {n_steps}: "
                "lower it, or train more steps"
            )
    for text in config.change:
        step, _ = parse_change(text)
        if step <= last or (config.epochs is None and step >= n_steps):
            bound = "" if config.epochs else f" and below --steps {n_steps}"
            raise ConfigError(
                f"--change {text} is for step {step}: steps must be above {last}{bound}, ascending"
            )
        last = step


def _may_have_stages(strategy: str) -> bool:
    if is_layout(strategy):
        return parse_layout(strategy).pp > 1
    return strategy not in ("single", "ddp", "tensor", "hybrid")


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
