"""Expand the flags of training into the runs of a sweep."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

from harness.errors import ConfigError
from harness.plan.layouts.degrees import parse_layout
from harness.runtime.data import entry_for
from harness.runtime.models import fit_options
from harness.runtime.models.user_code import code_digest
from harness.workloads.common.flags import shared_flags
from harness.workloads.train.checks import check_case, check_config
from harness.workloads.train.config import (
    STRATEGIES,
    ZERO_STAGES,
    EngineName,
    TrainCase,
    TrainConfig,
    TrainSettings,
    is_file,
    is_layout,
    is_shardable,
)
from harness.workloads.train.keeper import digest_of

# Strategies that need at least one sample per rank.
_BY_SAMPLES = ("ddp", *ZERO_STAGES)


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


def _batches(config: TrainConfig, strategy: str, n_ranks: int, n_most: int) -> list[int]:
    if config.batch_size:
        return list(config.batch_size)
    if strategy == "single" and not config.per_device_batch:
        n_ranks = n_most  # the batch of the others, which are compared with it
    return [batch * n_ranks for batch in config.per_device_batch or (32,)]


def _has_replicas(strategy: str, n_ranks: int) -> bool:
    """Whether --sync-every is for a strategy; a file may have one replica all the same."""
    if is_layout(strategy):
        return parse_layout(strategy).dp > 1
    return n_ranks > 1 and (strategy == "ddp" or is_file(strategy))


def _flows(config: TrainConfig) -> list[dict[str, Any]]:
    """Combinations of schedules and numbers of microbatches, as fields of TrainCase."""
    return [
        {"schedule": schedule, "microbatches": None if n == "auto" else n}
        for schedule in config.schedule
        for n in config.microbatches
    ]


def _combinations(config: TrainConfig, n_ranks: int) -> list[TrainCase]:
    shared = shared_flags(config, TrainSettings) | {"steps": config.steps or TrainCase.steps}
    code = code_digest(config.model, config.data)
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
                    code_digest=code,
                    engine=engine,
                    dtype=dtype,
                    reduce_dtype=reduce_dtype,
                    sync_every=sync_every,
                    batch=batch,
                    n_ranks=count,
                    **flow,
                    **own,
                )
                for dtype in config.dtype
                for reduce_dtype in (config.reduce_dtype if count > 1 else ("fp32",))
                for sync_every in (config.sync_every if _has_replicas(strategy, count) else (1,))
                for batch in _batches(config, strategy, count, max(counts))
                for flow in (_flows(config) if has_flow else [{}])
            ]
    return cases


def train_cases(config: TrainConfig, n_ranks: int) -> list[TrainCase]:
    """Check the flags and expand the sweep; each repeat runs all combinations in random order."""
    for strategy in config.strategy:
        engine_of(strategy, config.engine)  # because flags look unused by a misspelt strategy
    check_config(config, n_ranks)
    combinations = _combinations(config, n_ranks)
    if config.predict and all(case.engine == "deepspeed" for case in combinations):
        raise ConfigError(
            f"--predict cannot simulate deepspeed ({' '.join(config.strategy)}): drop --predict"
        )
    every = max(config.sync_every)
    if every > 1 and n_ranks > 1 and all(case.sync_every == 1 for case in combinations):
        raise ConfigError(
            f"--sync-every {every} averages replicas, and no run of {' '.join(config.strategy)} on "
            f"{n_ranks} ranks has several: drop it, or use ddp, or degrees with dp above 1"
        )
    entry = entry_for(config.data, config.model)
    fit_options(config.model, combinations[0].given_options(), entry.image_size, entry.n_channels)
    for case in combinations:
        check_case(case)
        if case.batch < case.n_ranks and case.strategy in _BY_SAMPLES:
            raise ConfigError(
                f"a global batch of {case.batch} leaves some of {case.n_ranks} ranks without a "
                f"sample: raise --batch-size to {case.n_ranks} or more"
            )
    order = random.Random(config.seed)
    repeats = [order.sample(combinations, len(combinations)) for _ in range(config.repeats)]
    return list(chain.from_iterable(repeats))
