"""The degrees of a layout come out again in the settings of other trainers."""

import json
import os
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from harness.domain.cluster import Cluster
from harness.domain.strategy import Stage
from harness.errors import ConfigError, StrategyError
from harness.plan.formats.trainers import settings_of
from harness.plan.importing.times import PlannedLayer, chain_graph
from harness.plan.layouts.degrees import layout_strategy, parse_layout

NAMES = ["embedding", *(f"blocks.{k}" for k in range(6)), "norm", "head"]
GRAPH = chain_graph("gpt", [PlannedLayer(name, 8, 8) for name in NAMES], 16, 8)
EIGHT = Cluster.uniform(1, 8, inside_bytes_per_s=1.0, memory_bytes=1)


def planned(layout, **changes):
    """A strategy by degrees, of 16 samples in 2 microbatches."""
    found = layout_strategy(parse_layout(layout), GRAPH, EIGHT, 16, n_microbatches=2)
    return replace(found, **changes)


def changed(strategy, name, **changes):
    operators = strategy.operators
    return replace(strategy, operators=operators | {name: replace(operators[name], **changes)})


def looped():
    """Four stages on two ranks, of 2, 1, 1 and 2 layers."""
    found = planned("tp=2,pp=4,cuts=3-4-5")
    for name, plan in found.operators.items():
        found = changed(found, name, devices=[device % 4 for device in plan.devices])
    return replace(found, schedule="interleaved")


def args(strategy, to, **flags):
    return settings_of(strategy, to, **flags)[0].decode().split()


def notes(strategy, to, **flags):
    return settings_of(strategy, to, **flags)[1].notes


PIPELINE = "tp=2,dp=2,pp=2,cuts=5"
AGAIN = [Stage(recompute=True)]


def test_megatron_takes_degrees_batches_and_layers():
    found = planned(PIPELINE, shard_state="optimizer", stages=AGAIN * 2)
    assert args(found, "megatron", dtype="bf16", reduce_dtype="bf16") == [
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2",
        "--micro-batch-size=4",
        "--global-batch-size=16",
        "--pipeline-model-parallel-layout=Etttt|ttL",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--use-distributed-optimizer",
        "--recompute-granularity=full",
        "--recompute-method=uniform",
        "--recompute-num-layers=1",
        "--bf16",
        "--grad-reduce-in-bf16",
    ]


def test_torchtitan_takes_degrees_batches_and_layers():
    assert args(planned(PIPELINE, stages=AGAIN * 2), "torchtitan", dtype="bf16") == [
        "--parallelism.module_fqns_per_model_part",
        "tok_embeddings,layers.0,layers.1,layers.2,layers.3",
        "layers.4,layers.5,norm,lm_head",
        "--training.disable_cuda_graphs",
        "--parallelism.no-enable-sequence-parallel",
        "--training.global_batch_size=16",
        "--training.local_batch_size=8",
        "--training.mixed_precision_param=bfloat16",
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=1",
        "--parallelism.pipeline_parallel_microbatch_size=4",
        "--parallelism.pipeline_parallel_schedule=1F1B",
        "activation-checkpoint:full",
    ]


def test_replicas_alone_take_no_settings_of_pipelines():
    assert args(planned("dp=2"), "megatron") == [
        "--tensor-model-parallel-size=1",
        "--pipeline-model-parallel-size=1",
        "--micro-batch-size=4",
        "--global-batch-size=16",
        "--overlap-grad-reduce",
    ]
    assert args(planned("dp=2"), "torchtitan") == [
        "--training.global_batch_size=16",
        "--training.local_batch_size=4",
        "--training.mixed_precision_param=float32",
        "--parallelism.tensor_parallel_degree=1",
        "--parallelism.pipeline_parallel_degree=1",
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=1",
        "activation-checkpoint:none",
    ]


def test_stages_without_layers_and_stages_in_turn_have_names():
    alone = planned("pp=3,cuts=1-8", n_microbatches=4)
    assert "--pipeline-model-parallel-layout=E|tttttt|L" in args(alone, "megatron")
    assert args(alone, "torchtitan")[1:4] == [
        "tok_embeddings",
        "layers.0,layers.1,layers.2,layers.3,layers.4,layers.5,norm",
        "lm_head",
    ]
    assert any("the norm behind the layers" in note for note in notes(alone, "megatron"))
    found = args(looped(), "megatron")
    assert "--pipeline-model-parallel-size=2" in found
    assert "--pipeline-model-parallel-layout=Ett|t|t|ttL" in found
    assert "--parallelism.pipeline_parallel_schedule=Interleaved1F1B" in args(
        looped(), "torchtitan"
    )


@pytest.mark.parametrize(
    ("state", "to", "told"),
    [
        ("none", "torchtitan", "replicate_degree=4 shard_degree=1"),
        ("gradients", "torchtitan", "replicate_degree=1 shard_degree=4 forward=never"),
        ("parameters", "torchtitan", "replicate_degree=1 shard_degree=4 forward=always"),
        ("parameters_in_node", "torchtitan", "replicate_degree=2 shard_degree=2 forward=always"),
        ("none", "megatron", ""),
        ("optimizer", "megatron", "distributed-optimizer"),
        ("optimizer_in_node", "megatron", "distributed-optimizer optimizer-instances=2"),
        ("gradients", "megatron", "megatron-fsdp strategy=optim_grads"),
        ("parameters_in_node", "megatron",
         "megatron-fsdp strategy=optim_grads_params optimizer-instances=2"),
    ],
)  # fmt: skip
def test_sharded_state_has_a_name_in_each_trainer(state, to, told):
    found = args(planned("tp=2,dp=4", shard_state=state), to, devices_per_node=4)
    words = ("replicate_degree", "shard_degree", "forward", "distributed-optimizer",
             "megatron-fsdp", "strategy", "optimizer-instances")  # fmt: skip
    own = [line for line in found if line.partition("=")[0].endswith(words)]
    assert len(own) == len(told.split())
    assert all(line.endswith(end) for line, end in zip(own, told.split(), strict=True))


@pytest.mark.parametrize(
    ("layout", "state", "stage"),
    [("dp=4", "none", 0), ("tp=2,dp=4", "gradients", 2), ("dp=2,pp=2,cuts=4", "optimizer", 1)],
)
def test_deepspeed_accepts_the_settings(layout, state, stage, monkeypatch):
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config, "dist", SimpleNamespace(get_rank=lambda: 0))
    strategy = planned(layout, shard_state=state, stages=AGAIN * parse_layout(layout).pp)
    data, plan = settings_of(strategy, "deepspeed", dtype="bf16")
    group = SimpleNamespace(get_data_parallel_world_size=lambda: plan.dp)
    found = config.DeepSpeedConfig(json.loads(data), mpu=group)
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (16, 2)
    assert found.train_micro_batch_size_per_gpu == 8 // plan.dp
    assert found.zero_config.stage == stage
    assert max(1, found.tensor_parallel_config.autotp_size) == plan.tp
    assert found.pipeline["activation_checkpoint_interval"] == (plan.pp > 1)
    assert str(found.communication_data_type) == "torch.float32"


def test_notes_say_what_was_assumed():
    found = notes(planned("dp=2,pp=2,cuts=4,devices=0-2-1-3"), "deepspeed")
    assert found == [
        "ranks 0, 1, ... are devices 0, 2, 1, 3: start them in this order",
        "layer 0 is blocks.0, stages have 3-3 layers",
        "fp32, because a strategy does not say its dtype: else give --dtype",
        "the program gives PipelineModule num_stages=2, and as partition_method type:CLASS, the "
        "class of its layers",
    ]
    assert notes(planned("dp=2", stages=AGAIN), "deepspeed", dtype="fp16") == [
        "rank k is device k of the strategy",
        "layers run again one by one; by train, whole stages or segments",
        "the program calls torch.utils.checkpoint for each layer",
    ]


def shared_devices():
    found = planned("pp=2,cuts=4")
    return replace(found, stages=[Stage()] * 2, schedule="gpipe", operators={
        name: replace(plan, devices=[0]) for name, plan in found.operators.items()
    })  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "to", "message"),
    [
        (planned("dp=2,shares=3-1"), "megatron", "'embedding' cut by {'sample': [3, 1]} on [0, 1]"),
        (changed(planned("dp=2"), "head", partition={}, devices=[0]), "deepspeed",
         "'head' cut by {} on [0], --to deepspeed needs 2 equal parts by samples, on the 2"),
        (changed(planned("tp=2,dp=2"), "blocks.3", partition={"sample": 2, "seq": 2}), "megatron",
         "'blocks.3' cut by {'sample': 2, 'seq': 2} on [0, 1, 2, 3], --to megatron needs 2 equal"),
        (changed(planned("tp=2"), "blocks.3", partition={"heads": [2, 1]}), "torchtitan",
         "'blocks.3' cut by {'heads': [2, 1]}"),
        (changed(planned("dp=2"), "head", devices=[1, 0]), "megatron", "'head' cut by {'sample'"),
        (changed(planned("dp=2"), "norm", devices=[0, 3]), "megatron",
         "needs 3 equal parts by samples, on the 3 devices of stage 0 in one order"),
        (changed(planned("pp=2,cuts=4"), "head", partition={"sample": 2}, devices=[1, 2]),
         "megatron", "stages on 1-2 devices, --to megatron needs equally many"),
        (changed(planned("dp=2"), "head", stage=3), "megatron", "1 stages, --to megatron needs al"),
        (shared_devices(), "torchtitan", "2 stages on 1 ranks, --to torchtitan needs schedule int"),
        (planned("dp=2", batch=18, n_microbatches=4), "megatron",
         "a batch of 18 for 4 microbatches x 2 replicas, --to megatron needs a multiple"),
        (planned("pp=2,cuts=4", stages=[Stage(), *AGAIN]), "megatron", "recomputation in some"),
        (planned("pp=3,cuts=7-8"), "megatron",
         "stage 1 begin with operator 'norm', --to megatron needs a layer to begin there: predict "
         "--layout tp=1,dp=1,pp=3,cuts=6-8"),
        (planned("dp=2", shard_state="optimizer"), "torchtitan",
         "shard_state optimizer, --to torchtitan needs none or gradients"),
        (planned("pp=2,cuts=4", schedule="zero_bubble"), "megatron", "needs 1f1b or interleaved"),
        (planned("pp=2,cuts=4", n_microbatches=5, batch=20, schedule="zero_bubble"), "torchtitan",
         "5 microbatches, --to torchtitan needs a multiple of 2 rounds"),
        (planned("pp=3,cuts=3-5"), "torchtitan",
         "2 microbatches, --to torchtitan needs 3 or more for 1f1b"),
        (planned("tp=2,pp=2,cuts=4"), "deepspeed", "needs in pipelines tp=1, whole gradients"),
        (planned("pp=2,cuts=3"), "deepspeed", "[2, 4] layers in stages"),
        (planned("tp=2,dp=3,devices=0-1-2-3-4-5", batch=12, shard_state="parameters_in_node"),
         "megatron", "tp=2,dp=3,pp=1 on nodes of 4 devices, --to megatron needs equally many"),
    ],
)  # fmt: skip
def test_what_a_trainer_lacks_is_refused(strategy, to, message):
    with pytest.raises(StrategyError) as refusal:
        settings_of(strategy, to, devices_per_node=4)
    assert message in str(refusal.value)


def test_flags_that_a_trainer_lacks_or_misses_are_refused():
    with pytest.raises(ConfigError, match="--dtype fp16: --to torchtitan takes fp32 or bf16"):
        settings_of(planned("dp=2"), "torchtitan", dtype="fp16")
    with pytest.raises(ConfigError, match="--reduce-dtype int8: --to megatron takes"):
        settings_of(planned("dp=2"), "megatron", reduce_dtype="int8")
    with pytest.raises(StrategyError, match="--reduce-dtype bf16 and --dtype fp32, --to megatron"):
        settings_of(planned("dp=2"), "megatron", reduce_dtype="bf16")
    with pytest.raises(ConfigError, match="needs --devices-per-node N"):
        settings_of(planned("dp=2", shard_state="gradients_in_node"), "megatron")


def test_positions_are_cut_as_sequence_parallelism_cuts_them():
    found = changed(planned("tp=2,dp=2"), "norm", partition={"sample": 2, "seq": 2})
    assert "--sequence-parallel" in args(found, "megatron")
    assert "--parallelism.no-enable-sequence-parallel" not in args(found, "torchtitan")
    for name in NAMES:
        found = changed(found, name, partition={"sample": 2, "seq": 2})
    with pytest.raises(StrategyError, match="tp=2, --to megatron needs attentions that are cut by"):
        settings_of(found, "megatron")
