"""Settings of a run, and the name of its strategy, which is made of them."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from harness.domain.prediction import STRATEGY_FILE
from harness.domain.run import Headed, telling_flags
from harness.inputs import MOST_NUMBER

ONE_DEVICE = "single device"  # which `search` calls a plan of one device, and no more words
_LONGEST = 200  # most characters of a setting
# Flags of training that let its strategy change between steps, in the order of a name.
CHANGING = ("freeze", "shrink", "replicate", "cache", "drift", "change", "controlled")
# Flags that choose how a run trains, but not what: another run may go on by others.
STRATEGY_FLAGS = frozenset({
    *CHANGING, "cache_memory", "drift_threshold", "strategy", "schedule", "microbatches", "stages",
    "recompute", "recompute_segments", "reduce_dtype", "shard_state", "search_seconds",
    "search_budget", "trials", "memory",
}) - {"freeze", "change"}  # fmt: skip
# Flags that define a strategy or its search, and the file of an imported log. Compared runs agree
# in all others but BETWEEN_STEPS.
COMPARED = STRATEGY_FLAGS | {
    *CHANGING, "freeze_alpha", "freeze_interval", "unfreeze", "survive", "rejoin",
    "strategy_digest", "engine", "n_ranks", "asynchronous", "channels_last", "compile", "predict",
    "sync_every", "outer_lr", "outer_momentum", "source",
}  # fmt: skip
# Settings of a run that goes on with another.
_CONTINUING = ("continues", "load_state", "asked_strategy")
# Settings that say how long a run trains, from where, or what it does between steps: none changes
# a step.
BETWEEN_STEPS = frozenset({
    *_CONTINUING, "steps", "epochs", "first_step", "until", "evaluate",
    "evaluate_every", "held_out_dir", "no_sync_steps", "noise_steps", "noise_every",
    "profiler_steps", "save_every", "save_model", "save_sharded",
})  # fmt: skip
# Settings that tell where a run's files are, or how many runs there are.
UNTELLING = (*_CONTINUING, "source", "samples_per_epoch", "repeats", "results", "run_name")
_MOST_TELLING = 3


def configured(run: Headed, name: str, default: str = "") -> str:
    value: Any = run.header.config.get(name, default)
    return default if value is None else str(value)[:_LONGEST]


def configured_number(run: Headed, name: str) -> float | None:
    """A setting that is a number above 0; else None."""
    value: Any = run.header.config.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value <= MOST_NUMBER else None


def rest_of_config(run: Headed, without: Collection[str] = ()) -> dict[str, Any]:
    """The settings in which compared runs agree, without some and without those that are off."""
    left_out = COMPARED.union(BETWEEN_STEPS, without)
    return {
        name: value
        for name, value in run.header.config.items()
        if name not in left_out and not is_off(value)
    }


def own_settings(run: Headed, without: Collection[str] = ()) -> dict[str, Any]:
    """The settings in which compared runs may differ, without some and without those that are off
    or that the run does not use: equal for repeats."""
    names = COMPARED.union(BETWEEN_STEPS).difference(("n_ranks",), without)
    used = telling_flags("train", run.header.config)
    return {name: used[name] for name in names & used.keys() if not is_off(used[name])}


def telling_settings(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each configuration the settings, three at most, that tell it from the others, in words;
    one that is off has none."""
    flat = [_scalars(config) for config in configs]
    names = sorted({name for config in flat for name in config})
    telling = [name for name in names if len({str(config.get(name)) for config in flat}) > 1]
    return [
        " · ".join(
            name if config[name] is True else f"{name} {str(config[name])[:80]}"
            for name in telling[:_MOST_TELLING]
            if name in config
        )
        for config in flat
    ]


def told_within(names: Sequence[object], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """As `telling_settings`, among the configurations of equal names."""
    places: dict[object, list[int]] = defaultdict(list)
    for at, name in enumerate(names):
        places[name].append(at)
    found = [""] * len(names)
    for own in places.values():
        for at, words in zip(own, telling_settings([configs[at] for at in own]), strict=True):
            found[at] = words
    return found


def told_apart(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names, equal ones followed by the settings that differ."""
    pairs = zip(names, told_within(names, configs), strict=True)
    return [" · ".join(filter(None, pair)) for pair in pairs]


def _scalars(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _scalars(value, f"{prefix}{name}.")
        elif name not in UNTELLING and not is_off(value):
            flat[f"{prefix}{name}"] = value
    return flat


def is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [])


def strategy_name(run: Headed) -> str:
    """The strategy's name, prefixed by the engine if several engines train it, and followed by the
    schedule, microbatches and flags of a pipeline or of degrees, by the state that is sharded, by
    the dtype of summed gradients, by channels-last order and by compilation; a strategy that was
    read from a file is named after the file, and a run that goes on after its first step."""
    strategy, engine = configured(run, "strategy", "?"), configured(run, "engine", "torch")
    is_file = strategy.endswith(".json")
    has_flow = strategy == "pipeline" or ("=" in strategy and not is_file)  # or degrees
    config = run.header.config
    if has_flow and engine == "executor":
        schedule, microbatches = configured(run, "schedule", "1f1b"), config.get("microbatches")
        strategy += "" if schedule == "1f1b" else f"-{schedule}"
        strategy += f"-{microbatches}-microbatches" if microbatches else ""
        strategy += "-asynchronous" if config.get("asynchronous") else ""
    if config.get("recompute"):
        segments = config.get("recompute_segments")
        strategy += f"-recompute-{segments}-segments" if segments else "-recompute"
    state = config.get("shard_state", "auto")
    strategy += "" if state in ("auto", "none") or is_file else f"-sharded-{state}"
    is_usual = engine == "torch" or (engine == "executor" and strategy not in ("single", "ddp"))
    if is_file:
        strategy = file_name(PurePath(strategy))
        strategy += "-asynchronous" if config.get("asynchronous") else ""
    strategy += _elastic_name(run)
    reduce_dtype = config.get("reduce_dtype", "fp32")
    strategy += "" if reduce_dtype == "fp32" else f"-reduced-{reduce_dtype}"
    sync_every = configured_number(run, "sync_every") or 1
    strategy += f"-sync-every-{sync_every:.0f}" if sync_every > 1 else ""
    strategy += "-channels-last" if config.get("channels_last") else ""
    strategy += "-compiled" if config.get("compile") else ""
    first = configured_number(run, "first_step")  # of a run that goes on with another
    strategy += f"-from-step-{first:.0f}" if first else ""
    return strategy if is_usual else f"{engine}-{strategy}"


def unlike_one_device(run: Headed) -> str:
    """Why the run does not train like one device; empty if it does."""
    config = run.header.config
    strategy = configured(run, "strategy")
    if config.get("asynchronous") and (strategy == "pipeline" or strategy.endswith(".json")):
        n_stages = run.header.summary.get("n_stages", "S")
        return (
            f"every microbatch is a minibatch, and stage s of {n_stages} (from 0) computes "
            f"gradients with weights that are {n_stages} - 1 - s updates old"
        )
    if config.get("freeze", "none") != "none":
        return "it freezes layers"
    if (configured_number(run, "sync_every") or 1) > 1:
        return "it averages replicas of the parameters, not gradients"
    if run.header.summary.get("has_local_loss"):
        return (
            "each rank computes the loss of its own samples, which is not known to be a mean over "
            "samples: use --engine executor"
        )
    return ""


def file_name(path: PurePath) -> str:
    """A strategy that was read from a file: the file's name, or the run's, because runs write
    theirs as strategy.json."""
    return path.stem if path.name != STRATEGY_FILE else path.parent.name or path.stem


def changing_flags(config: Mapping[str, Any]) -> list[str]:
    """The flags that are set by which a run may change its strategy."""
    return [name for name in CHANGING if config.get(name) and config[name] not in ("none", "off")]


def _elastic_name(run: Headed) -> str:
    """The reasons for which a run may change its strategy: `-freeze-shrink-replicate-cache`."""
    suffix = ""
    for flag in changing_flags(run.header.config):
        value = run.header.config[flag]
        is_usual = value in ("schedule", "search", "on") or not isinstance(value, str)
        suffix += f"-{flag}" if is_usual else f"-{flag}-{configured(run, flag)}"
    return suffix
