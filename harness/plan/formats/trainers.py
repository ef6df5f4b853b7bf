"""A strategy as the settings of torchtitan, Megatron-LM or DeepSpeed.

| trainer | file | names as in |
|---|---|---|
| torchtitan 0.3 | arguments | `torchtitan/config/configs.py` and `trainer.py` |
| Megatron-LM with Megatron-Core 0.20 | arguments | `megatron/training/arguments.py` |
| DeepSpeed 0.19 | ds_config.json | deepspeed.ai/docs/config-json |

All three number ranks as `layouts.degrees` numbers devices: the parts of a layer first, then
replicas, then stages; stage s is on pipeline rank s modulo their number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from msgspec import json

from harness.domain.partition import REPLICA, SAMPLE, n_parts
from harness.domain.schedule import check_schedule
from harness.domain.shard_state import shards_in_nodes, shards_parameters
from harness.domain.sharding import CONTRACTION, HEADS
from harness.domain.strategy import Strategy, check_numbers
from harness.errors import ConfigError, StrategyError
from harness.inputs import shorten

DTYPES = ("fp32", "bf16", "fp16")
_CUTS = {"feature", HEADS, CONTRACTION, "seq", REPLICA}
_LAYER = re.compile(r"(.*?(?:\.|layer|block)[_-]?)(\d+)(?:\.|$)")


class TrainerPlan:
    """A strategy of equal replicas in the terms of trainers.

    Attributes:
        n_samples: of a microbatch in one replica.
        n_sharing: replicas that keep one state in parts.
        layers: their number in each stage; empty without a pipeline.
        is_head_alone: the last stage begins behind the norm that follows the layers.
        cuts_positions: norms are cut by positions (sequence parallelism).
        notes: of what a reader could miss.
    """

    def __init__(self, strategy: Strategy, to: str, devices_per_node: int | None) -> None:
        check_numbers(strategy)
        self.strategy, self._to = strategy, to
        self.state, self.schedule = strategy.shard_state, strategy.schedule
        order = self._read_grid()
        self.pp = pp = strategy.n_ranks()
        self.degrees = f"tp={self.tp},dp={self.dp},pp={pp}"
        devices = [device for stage in range(pp) for device in order[stage]]
        is_round = all(order[stage] == order[stage % pp] for stage in order)
        is_round &= len(set(devices)) == len(devices) and min(devices) >= 0
        self.need(is_round, f"stages on {shorten(list(order.values()))}", "equal or separate ones")
        n = self.n_microbatches = strategy.n_microbatches
        check_schedule(self.schedule, n_stages=len(order), n_microbatches=n, n_ranks=pp)
        if self.schedule == "interleaved" and len(order) == pp:
            self.schedule = "1f1b"
        is_possible = len(order) == pp or self.schedule == "interleaved"
        self.need(is_possible, f"{len(order)} stages on {pp} ranks", "schedule interleaved")
        self.n_samples, rest = divmod(strategy.batch, self.dp * n)
        flow = f"{n} microbatches x {self.dp} replicas"
        self.need(not rest, f"a batch of {strategy.batch} for {flow}", "a multiple of these")
        self.recomputes = strategy.stages[0].recompute
        is_everywhere = all(stage.recompute == self.recomputes for stage in strategy.stages)
        self.need(is_everywhere, "recomputation in some stages", "it in all or none")
        self.n_sharing = self._count_sharing(devices, devices_per_node)
        self.cuts_positions = any("seq" in plan.partition for plan in strategy.operators.values())
        self.notes = ["rank k is device k of the strategy"]
        if devices != list(range(len(devices))):
            named = ", ".join(map(str, devices))
            self.notes = [f"ranks 0, 1, ... are devices {named}: start them in this order"]
        self.layers: list[int] = []
        self.is_head_alone = False
        if pp > 1:
            self._read_layers()
        if self.tp > 1:
            self.notes.append("layers are cut as the trainer cuts them: heads, columns, then rows")
        if self.recomputes:
            self.notes.append("layers run again one by one; by train, whole stages or segments")

    def need(self, is_met: bool, has: str, needs: str) -> None:
        """Refuse the strategy unless it has what the trainer needs."""
        if not is_met:
            name = self.strategy.name
            raise StrategyError(f"strategy {name!r} has {has}, --to {self._to} needs {needs}")

    def _read_grid(self) -> dict[int, list[int]]:
        """Find tp and dp, and the devices of each stage in their order."""
        plans, n_stages = self.strategy.operators, len(self.strategy.stages)
        used = sorted({plan.stage for plan in plans.values()})
        self.need(used == list(range(n_stages)), f"{n_stages} stages", f"all used, not {used}")
        sizes = [len(own) for own in self.strategy.stage_devices()]
        listed = "-".join(map(str, sizes))
        self.need(len(set(sizes)) == 1, f"stages on {listed} devices", "equally many for each")
        cuts = {
            name: {
                dim: n_parts(cut)
                for dim, cut in plan.partition.items()
                if dim != SAMPLE and cut != 1
            }
            for name, plan in plans.items()
        }
        self.tp = max(1, *(math.prod(own.values()) for own in cuts.values()))
        self.dp = sizes[0] // self.tp
        order: dict[int, list[int]] = {}
        alike: dict[str, dict[str, int]] = {}
        for name, plan in plans.items():
            devices, own = order.setdefault(plan.stage, plan.devices), cuts[name]
            is_grid = n_parts(plan.partition.get(SAMPLE, 1)) == self.dp
            is_grid &= all(isinstance(c, int) or len(set(c)) == 1 for c in plan.partition.values())
            is_grid &= list(own.values()) == [self.tp] * (self.tp > 1) and own.keys() <= _CUTS
            is_grid &= alike.setdefault(_LAYER.sub(r"\1.", name), own) == own
            also = f" and by features, heads or positions of norms in {self.tp}, as other layers"
            self.need(
                is_grid and plan.devices == devices,
                f"operator {name!r} cut by {plan.partition} on {shorten(plan.devices)}",
                f"{self.dp} equal parts by samples{also * (self.tp > 1)}, on the {sizes[0]} "
                f"devices of stage {plan.stage} in one order",
            )
        has_heads = any(HEADS in own for own in cuts.values())
        self.need(self.tp == 1 or has_heads, f"tp={self.tp}", "attentions that are cut by heads")
        return order

    def _read_layers(self) -> None:
        """Count the layers of each stage. Operators behind the numbered ones of a layer, such as a
        sum, are its own."""
        stage_of = {name: plan.stage for name, plan in self.strategy.operators.items()}
        names = sorted(stage_of, key=stage_of.__getitem__)
        places: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            if found := _LAYER.match(name):
                places.setdefault(found[1] + found[2], []).append(place)
        lists = sorted({layer.rstrip("0123456789") for layer in places})
        self.need(len(lists) == 1, f"layers {shorten(lists)}", "one list, like blocks.0.mlp")
        starts = [own[0] for own in places.values()]
        behind = [own[-1] + 1 for own in places.values()]
        norm = behind[-1] + (starts[1] - behind[0] if len(starts) > 1 else 0)
        stages = [stage_of[name] for name in names]
        cuts = [stages.index(stage) for stage in range(1, stages[-1] + 1)]
        known = dict.fromkeys(cuts, starts) | {cuts[-1]: [*starts, norm, norm + 1]}
        near = [min(known[cut], key=lambda place: abs(place - cut)) for cut in cuts]
        how = f": predict --layout {self.degrees},cuts={'-'.join(map(str, near))}"
        for cut in cuts:
            self.need(
                cut in known[cut],
                f"stage {stages[cut]} begin with operator {names[cut]!r}",
                "a layer to begin there" + how * (len(set(near)) == self.pp - 1),
            )
        bounds = pairwise((0, *cuts, len(names)))
        self.layers = [sum(begin <= one < end for one in starts) for begin, end in bounds]
        self.is_head_alone = cuts[-1] == norm + 1
        counts = "-".join(map(str, self.layers))
        self.notes.append(f"layer 0 is {next(iter(places))}, stages have {counts} layers")

    def _count_sharing(self, devices: list[int], per_node: int | None) -> int:
        if not shards_in_nodes(self.state):
            return 1 if self.state == "none" else self.dp
        if per_node is None or per_node < 1:
            raise ConfigError(f"shard_state {self.state} needs --devices-per-node N, above 0")
        n = max(1, min(self.dp, per_node // self.tp))
        runs = [devices[k : k + n * self.tp] for k in range(0, len(devices), n * self.tp)]
        is_equal = all(len({device // per_node for device in run}) == 1 for run in runs)
        has = f"{self.degrees} on nodes of {per_node} devices"
        self.need(is_equal and self.dp % n == 0, has, "equally many replicas in each, in a row")
        return n


def _torchtitan(plan: TrainerPlan, dtype: str, _: str) -> list[str]:
    lines = []
    settings: dict[str, object] = {
        "training.global_batch_size": plan.strategy.batch,
        "training.local_batch_size": plan.n_samples,
        "training.mixed_precision_param": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "parallelism.tensor_parallel_degree": plan.tp,
        "parallelism.pipeline_parallel_degree": plan.pp,
        "parallelism.data_parallel_replicate_degree": plan.dp // plan.n_sharing,
        "parallelism.data_parallel_shard_degree": plan.n_sharing,
    }
    if plan.state != "none":
        is_freed = shards_parameters(plan.state)
        settings["parallelism.fsdp_reshard_after_forward"] = "always" if is_freed else "never"
        if not is_freed:
            plan.notes.append("FSDP shards parameters between microbatches, too")
    if plan.pp > 1:
        settings["training.local_batch_size"] = plan.n_samples * plan.n_microbatches
        settings["parallelism.pipeline_parallel_microbatch_size"] = plan.n_samples
        is_full = plan.schedule != "1f1b" or plan.n_microbatches >= plan.pp
        plan.need(is_full, f"{plan.n_microbatches} microbatches", f"{plan.pp} or more for 1f1b")
        n_rounds = max(1, plan.n_microbatches // plan.pp)
        is_even = plan.schedule != "zero_bubble" or plan.n_microbatches % n_rounds == 0
        plan.need(
            is_even, f"{plan.n_microbatches} microbatches", f"a multiple of {n_rounds} rounds"
        )
        settings["parallelism.pipeline_parallel_schedule"] = _SCHEDULES[plan.schedule]
        stages = [["tok_embeddings"], *([] for _ in plan.layers[1:])]
        for k, n in enumerate(plan.layers):
            first = sum(plan.layers[:k])
            stages[k] += [f"layers.{layer}" for layer in range(first, first + n)]
        stages[-2 if plan.is_head_alone else -1].append("norm")
        stages[-1].append("lm_head")
        lines += ["--parallelism.module_fqns_per_model_part", *map(",".join, stages)]
        lines.append("--training.disable_cuda_graphs")  # refused in pipelines
    if plan.tp > 1 and not plan.cuts_positions:
        lines.append("--parallelism.no-enable-sequence-parallel")
    lines += [f"--{name}={value}" for name, value in settings.items()]
    plan.notes.append("arguments are those of torchtitan 0.3; give them last")
    return [*lines, f"activation-checkpoint:{'full' if plan.recomputes else 'none'}"]


def _megatron(plan: TrainerPlan, dtype: str, reduce_dtype: str) -> list[str]:
    lines = [
        f"--tensor-model-parallel-size={plan.tp}",
        f"--pipeline-model-parallel-size={plan.pp}",
        f"--micro-batch-size={plan.n_samples}",
        f"--global-batch-size={plan.strategy.batch}",
    ]
    if plan.tp > 1 and plan.cuts_positions:
        lines.append("--sequence-parallel")
    if plan.pp > 1:
        stages = "|".join("t" * n for n in plan.layers)
        lines.append(f"--pipeline-model-parallel-layout=E{stages}L")
        if plan.is_head_alone:
            plan.notes.append("the norm behind the layers is in the last stage; by train, before")
    if plan.dp > 1:
        lines.append("--overlap-grad-reduce")
        lines += ["--overlap-param-gather"] * (plan.state != "none")
    kind = plan.state.removesuffix("_in_node")
    if kind == "optimizer":
        lines.append("--use-distributed-optimizer")
    elif kind != "none":
        sharded = "optim_grads_params" if kind == "parameters" else "optim_grads"
        lines += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy={sharded}"]
        lines.append("--ckpt-format=fsdp_dtensor")  # no other is taken with it
    if plan.n_sharing not in (1, plan.dp):
        lines.append(f"--num-distributed-optimizer-instances={plan.dp // plan.n_sharing}")
    if plan.recomputes:
        lines += ["--recompute-granularity=full", "--recompute-method=uniform"]
        lines.append("--recompute-num-layers=1")
    if dtype != "fp32":
        lines.append(f"--{dtype}")
    if reduce_dtype == "bf16":
        plan.need(dtype == "bf16", f"--reduce-dtype bf16 and --dtype {dtype}", "--dtype bf16")
        lines.append("--grad-reduce-in-bf16")
    return lines


def _deepspeed(plan: TrainerPlan, dtype: str, reduce_dtype: str) -> list[str]:
    stage = _ZERO.index(plan.state)
    settings: dict[str, object] = {
        "train_batch_size": plan.strategy.batch,
        "train_micro_batch_size_per_gpu": plan.n_samples,
        "gradient_accumulation_steps": plan.n_microbatches,
        "zero_optimization": {"stage": stage, "overlap_comm": stage > 0 and plan.pp == 1},
        "communication_data_type": reduce_dtype,
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    if plan.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": plan.tp}
        plan.notes.append(
            "AutoTP computes norms on all parts whole; by train, as the strategy says"
        )
    if plan.pp > 1:
        has = f"{plan.degrees}, shard_state {plan.state} and {plan.layers} layers in stages"
        is_possible = plan.tp == 1 and stage < 2 and len(set(plan.layers)) == 1
        plan.need(is_possible, has, "in pipelines tp=1, whole gradients and equal stages")
        plan.notes.append(
            f"the program gives PipelineModule num_stages={plan.pp}, and as partition_method "
            "type:CLASS, the class of its layers"
        )
        settings["pipeline"] = {"activation_checkpoint_interval": int(plan.recomputes)}
    elif plan.recomputes:
        plan.notes.append("the program calls torch.utils.checkpoint for each layer")
    return json.format(json.encode(settings), indent=2).decode().splitlines()


class TrainerFormat(NamedTuple):
    """One row of TRAINERS; `write` takes a plan, a dtype and a reduce dtype."""

    write: Callable[[TrainerPlan, str, str], list[str]]
    states: tuple[str, ...]
    schedules: tuple[str, ...] = ("1f1b",)
    dtypes: tuple[str, ...] = DTYPES
    reduce_dtypes: tuple[str, ...] = ("fp32", "bf16")


_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",  # with one stage per rank, ZB-H1
}
_FSDP = ("none", "gradients", "parameters", "gradients_in_node", "parameters_in_node")
_ZERO = ("none", "optimizer", "gradients", "parameters")  # 0.19 has removed MiCS, its HSDP
TRAINERS = {
    "torchtitan": TrainerFormat(_torchtitan, _FSDP, tuple(_SCHEDULES), ("fp32", "bf16"), ("fp32",)),
    "megatron": TrainerFormat(
        _megatron, (*_FSDP, "optimizer", "optimizer_in_node"), ("1f1b", "interleaved")
    ),
    "deepspeed": TrainerFormat(_deepspeed, _ZERO),
}


def settings_of(
    strategy: Strategy,
    to: str,
    *,
    dtype: str | None = None,
    reduce_dtype: str | None = None,
    devices_per_node: int | None = None,
) -> tuple[bytes, TrainerPlan]:
    """The file by which one of `TRAINERS` trains as the strategy says, and what it rests on.

    Raises:
        ConfigError: the trainer lacks the dtype, or nodes must be known.
        StrategyError: the trainer cannot train so.
    """
    row = TRAINERS[to]
    plan = TrainerPlan(strategy, to, devices_per_node)
    for flag, value, known in (
        ("--dtype", dtype, row.dtypes),
        ("--reduce-dtype", reduce_dtype, row.reduce_dtypes),
    ):
        if value is not None and value not in known:
            raise ConfigError(f"{flag} {value}: --to {to} takes {' or '.join(known)}")
    plan.need(plan.state in row.states, f"shard_state {plan.state}", " or ".join(row.states))
    is_known = plan.pp == 1 or plan.schedule in row.schedules
    plan.need(is_known, f"schedule {plan.schedule}", " or ".join(row.schedules))
    if dtype is None:
        plan.notes.append("fp32, because a strategy does not say its dtype: else give --dtype")
    lines = row.write(plan, dtype or "fp32", reduce_dtype or "fp32")
    return "".join(f"{line}\n" for line in lines).encode(), plan
