"""Check the flags of training and expand them into the runs of a sweep."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from harness.domain.checkpoints import MOST_OF_STAGE
from harness.domain.schedule import SCHEDULES, check_schedule
from harness.errors import ConfigError
from harness.plan.layouts.degrees import parse_layout
from harness.runtime.data import DATA, OF_TEXT, entry_for
from harness.runtime.engines.optimizers import check_optimizer
from harness.runtime.models import fit_options
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
    ZERO_STAGES,
    ZERO_STATES,
    EngineName,
    TrainCase,
    TrainConfig,
    TrainSettings,
    is_file,
    is_layout,
    is_shardable,
    parse_change,
)
from harness.workloads.train.keeper import digest_of

# Strategies that need at least one sample per rank.
_BY_SAMPLES = ("ddp", *ZERO_STAGES)

_DEGREES = "tp=T,dp=D,pp=P"
_OWN_DATA = "package.module:factory"
# Flags and the only strategies that use them; a strategy's file holds its own schedule and stages.
_USED_BY = {
    "stages": ("pipeline",),
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
    "vocabulary": ("data", OF_TEXT),
    "evaluate": ("data", (*(name for name, row in DATA.items() if row.held_out), _OWN_DATA)),
}

_AT_LEAST = {
    **dict.fromkeys((
        "warm_up", "no_sync_steps", "n_workers", "momentum", "weight_decay", "lr_warm_up",
        "cache_memory", "seed",
    ), 0),
    **dict.fromkeys((
        "steps", "epochs", "n_samples", "repeats", "stages", "batch_size", "per_device_batch",
        "n_ranks", "microbatches", "freeze_interval", "lr_step_size", "save_every", "rejoin",
        "recompute_segments",
    ), 1),
}  # fmt: skip


def engine_of(strategy: str, engine: str, *, needs_executor: bool = False) -> EngineName:
    """Choose the engine that trains by a strategy.

    Args:
        engine: value of --engine.
        needs_executor: a flag is set that only the executor supports.

    Raises:
        ConfigError: there is no such strategy, or the engine does not support it.
    """
    known = [name for name, strategies in STRATEGIES.items() if strategy in strategies]
    if is_layout(strategy):
        parse_layout(strategy)
    if is_file(strategy) or is_layout(strategy):
        known = ["executor"]
    if not known:
        every = dict.fromkeys(name for names in STRATEGIES.values() for name in names)
        raise ConfigError(
            f"there is no strategy {strategy!r}: choose from {', '.join(every)} (several: parted "
            "by blanks), or give degrees (tp=2,dp=2,pp=1) or a strategy's file, FILE.json; FSDP is "
            "ddp with --shard-state parameters"
        )
    if engine not in ("auto", *STRATEGIES):
        raise ConfigError(f"there is no engine {engine!r}: choose auto, {', '.join(STRATEGIES)}")
    if engine == "auto":
        return "executor" if needs_executor and "executor" in known else known[0]
    for name in known:
        if name == engine:
            return name
    raise ConfigError(
        f"--engine {engine} does not train {strategy!r}: choose --engine {' or '.join(known)}"
    )


def _check_unused(config: TrainConfig) -> None:
    """Refuse flags that none of the strategies uses."""
    strategies = " ".join(config.strategy)
    given = {_DEGREES if is_layout(strategy) else strategy for strategy in config.strategy}
    is_searched_beside = config.shrink == "search" or config.drift or config.survive
    for name, users in _USED_BY.items():
        if given.isdisjoint(users) and not (is_searched_beside and name in _SEARCHED_BESIDE):
            why = f"--strategy {' or '.join(users)}, {strategies} does not use it"
            _check_unset(config, name, why, f"add {users[0]}")
    for name, (other, values) in _REFINES.items():
        value = getattr(config, other)
        if (_OWN_DATA if other == "data" and ":" in value else value) not in values:
            words = [flag(other) if one is True else f"{flag(other)} {one}" for one in values]
            is_given = "it is not given" if value is False else f"{flag(other)} is {value}"
            _check_unset(config, name, f"{' or '.join(words)}, {is_given}", f"use {words[0]}")
    is_pipelined = "pipeline" in config.strategy or any(map(is_file, config.strategy))
    if config.asynchronous and not is_pipelined:
        raise ConfigError(
            f"--asynchronous is for --strategy pipeline or a strategy's file, not {strategies}: "
            "drop it, or add one of them"
        )


def _check_unset(config: TrainConfig, name: str, why: str, remedy: str) -> None:
    """Refuse a flag that is set, but has no effect beside the others."""
    value = getattr(config, name)
    if value != getattr(TrainConfig(), name):
        given = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise ConfigError(
            f"{flag(name)}{'' if value is True else f' {given}'} is for {why}: drop the flag, or "
            f"{remedy}"
        )


def _check(config: TrainConfig, n_ranks: int) -> None:
    config.check()
    check_at_least(config, _AT_LEAST)
    n_segments = config.recompute_segments or 0
    if n_segments > MOST_OF_STAGE:
        raise ConfigError(f"--recompute-segments {n_segments} must be at most {MOST_OF_STAGE}")
    check_above_zero(
        config, ("learning_rate", "lr_gamma", "bucket_mib", "drift_threshold", "max_grad_norm")
    )
    config.check_search()
    check_dtypes(config.dtype)
    check_optimizer(config.optimizer)
    _check_unused(config)
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


def _check_pipeline(case: TrainCase) -> None:
    """Refuse flags that contradict the pipeline's schedule or that the engine does not support."""
    if case.asynchronous and case.strategy == "pipeline":
        if case.schedule != "1f1b":
            raise ConfigError(
                f"--asynchronous follows 1f1b, not --schedule {case.schedule}: drop one of them"
            )
        if case.recompute:
            raise ConfigError("--asynchronous does not support recomputation: drop --recompute")
    if case.strategy == "pipeline":
        _check_flow(case)
    if is_layout(case.strategy):
        _check_degrees(case)
    if case.microbatches is not None and case.microbatches > case.batch:
        raise ConfigError(
            f"--microbatches {case.microbatches} need a sample each, the batch has {case.batch}: "
            "lower it"
        )
    if (given := case.executor_flags) and case.engine != "executor":
        state = ZERO_STATES.get(case.strategy)
        remedy = f"use --strategy ddp --shard-state {state}" if state else "add --engine executor"
        raise ConfigError(
            f"{flag(given[0])} needs the executor, {case.strategy} is trained by {case.engine}: "
            f"{remedy}"
        )
    if case.sharded_state != "none" and case.n_ranks == 1:
        raise ConfigError(
            f"--shard-state {case.shard_state} divides weights among ranks, the run of "
            f"{case.strategy} has 1: drop it, or start more ranks (mpirun -np)"
        )
    if case.is_asynchronous and case.sharded_state != "none":
        raise ConfigError(f"--asynchronous has no --shard-state {case.shard_state}: drop one")
    if case.sharded_state == "parameters" and SCHEDULES[case.schedule].splits_backward:
        raise ConfigError(
            f"--shard-state parameters frees weights after a backward, --schedule {case.schedule} "
            "computes their gradients later: use 1f1b, or --shard-state gradients"
        )
    if case.is_asynchronous and case.dtype == "fp16":
        raise ConfigError("--asynchronous has no loss scaling for --dtype fp16: use bf16")
    if case.engine == "executor" and case.balance == "speed":
        raise ConfigError(
            f"--balance speed is for --engine torch, {case.strategy} is trained by the executor: "
            "drop it; searched and pipeline balance by the profile"
        )


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


def _batches(config: TrainConfig, strategy: str, n_ranks: int, n_most: int) -> list[int]:
    if config.batch_size:
        return list(config.batch_size)
    if strategy == "single" and not config.per_device_batch:
        n_ranks = n_most  # the batch of the others, which are compared with it
    return [batch * n_ranks for batch in config.per_device_batch or (32,)]


def _flows(config: TrainConfig) -> list[dict[str, Any]]:
    """Combinations of schedules and numbers of microbatches, as fields of TrainCase."""
    return [
        {"schedule": schedule, "microbatches": None if n == "auto" else n}
        for schedule in config.schedule
        for n in config.microbatches
    ]


def _combinations(config: TrainConfig, n_ranks: int) -> list[TrainCase]:
    names = [field.name for field in dataclasses.fields(TrainSettings)]
    shared: dict[str, Any] = {name: getattr(config, name) for name in names}
    shared["steps"] = config.steps or TrainCase.steps
    cases: list[TrainCase] = []
    for strategy in config.strategy:
        has_flow = strategy == "pipeline" or is_layout(strategy)
        own = shared if is_shardable(strategy) else shared | {"shard_state": TrainCase.shard_state}
        is_sharded = config.asked_state not in (None, "none") and is_shardable(strategy)
        needs_executor = bool(config.executor_flags) or is_sharded
        engine = engine_of(strategy, config.engine, needs_executor=needs_executor)
        counts = config.n_ranks or (n_ranks,)
        for count in (1,) if strategy == "single" else counts:
            cases += [
                TrainCase(
                    strategy=strategy,
                    strategy_digest=digest_of(strategy),
                    engine=engine,
                    dtype=dtype,
                    reduce_dtype=reduce_dtype,
                    batch=batch,
                    n_ranks=count,
                    **flow,
                    **own,
                )
                for dtype in config.dtype
                for reduce_dtype in (config.reduce_dtype if count > 1 else ("fp32",))
                for batch in _batches(config, strategy, count, max(counts))
                for flow in (_flows(config) if has_flow else [{}])
            ]
    return cases


def train_cases(config: TrainConfig, n_ranks: int) -> list[TrainCase]:
    """Check the flags and expand the sweep; each repeat runs all combinations in random order."""
    _check(config, n_ranks)
    combinations = _combinations(config, n_ranks)
    if config.predict and all(case.engine == "deepspeed" for case in combinations):
        raise ConfigError(
            f"--predict cannot simulate deepspeed ({' '.join(config.strategy)}): drop --predict"
        )
    entry = entry_for(config.data, config.model)
    fit_options(config.model, combinations[0].given_options(), entry.image_size, entry.n_channels)
    order = random.Random(config.seed)
    cases: list[TrainCase] = []
    for _ in range(config.repeats):
        cases += order.sample(combinations, len(combinations))
    for case in combinations:
        _check_pipeline(case)
        _check_compiled(case)
        if case.batch < case.n_ranks and case.strategy in _BY_SAMPLES:
            raise ConfigError(
                f"a global batch of {case.batch} leaves some of {case.n_ranks} ranks without a "
                f"sample: raise --batch-size to {case.n_ranks} or more"
            )
    return cases


def _check_compiled(case: TrainCase) -> None:
    """Refuse to compile where that is not possible."""
    if case.compile and case.engine == "deepspeed":
        raise ConfigError(
            f"--compile is for the engines torch and executor, {case.strategy} is trained by "
            "deepspeed: drop it"
        )
    if case.compile and (case.is_asynchronous or case.is_elastic):
        kind = "asynchronous" if case.is_asynchronous else "elastic"
        raise ConfigError(f"{kind} training has no --compile: drop one of them")


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
