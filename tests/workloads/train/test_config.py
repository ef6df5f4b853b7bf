"""Flags of training: the sweep they make, and what is refused."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import ConfigError, ModelError, StrategyError
from harness.runtime.models.user_code import code_digest
from harness.workloads.train.cases import engine_of, train_cases
from harness.workloads.train.config import TrainConfig


def test_lists_are_swept_and_each_repeat_holds_every_combination():
    config = TrainConfig(strategy=("single", "ddp"), batch_size=(8, 16), repeats=3)
    cases = train_cases(config, 4)
    assert len(cases) == 12
    for repeat in range(3):
        found = Counter(
            (c.strategy, c.batch, c.n_ranks) for c in cases[4 * repeat : 4 * repeat + 4]
        )
        assert found == {
            ("single", 8, 1): 1,
            ("single", 16, 1): 1,
            ("ddp", 8, 4): 1,
            ("ddp", 16, 4): 1,
        }


@pytest.mark.parametrize(
    ("flags", "name", "wanted"),
    [
        # Gradients are summed in a dtype where there are several ranks.
        ({"strategy": ("single", "ddp"), "reduce_dtype": ("fp32", "bf16")}, "reduce_dtype",
         [("ddp", "bf16"), ("ddp", "fp32"), ("single", "fp32")]),
        # Replicas are averaged where ddp has several.
        ({"strategy": ("single", "ddp", "pipeline"), "sync_every": (1, 8)}, "sync_every",
         [("ddp", 1), ("ddp", 8), ("pipeline", 1), ("single", 1)]),
        # State is sharded where ranks would keep it alike.
        ({"strategy": ("single", "ddp", "zero2"), "shard_state": "parameters"}, "shard_state",
         [("ddp", "parameters"), ("single", "auto"), ("zero2", "auto")]),
        # A batch per device grows with the ranks.
        ({"strategy": ("single", "ddp"), "per_device_batch": (8,), "n_ranks": (2, 4)}, "batch",
         [("ddp", 16), ("ddp", 32), ("single", 8)]),
        # By default one device trains the batch of the others.
        ({"strategy": ("single", "ddp")}, "batch", [("ddp", 128), ("single", 128)]),
    ],
)  # fmt: skip
def test_a_flag_is_for_the_strategies_that_use_it(flags, name, wanted):
    cases = train_cases(TrainConfig(**flags), 4)
    assert sorted((case.strategy, getattr(case, name)) for case in cases) == wanted


def test_one_rank_has_no_replicas_to_average():
    config = TrainConfig(strategy=("ddp", "pipeline"), sync_every=(1, 8))
    assert {case.sync_every for case in train_cases(config, 1)} == {1}


def test_the_order_is_random_but_equal_on_every_rank():
    config = TrainConfig(batch_size=(8, 16, 32, 64), repeats=4, seed=3)
    orders = [case.batch for case in train_cases(config, 4)]
    assert orders == [case.batch for case in train_cases(config, 4)]
    assert orders[:4] != orders[4:8] or orders[4:8] != orders[8:12]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"momentum": float("nan")}, "--momentum nan must be at least 0, and finite"),
        ({"learning_rate": float("inf")}, "--learning-rate inf must be above 0, and finite"),
        ({"dropout": float("nan")}, "--dropout nan is a probability"),
        ({"dlrm_bottom_mlp": (64, 0)}, "--dlrm-bottom-mlp 64 0 must be at least 1 each"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 must be at least 0"),
        ({"recompute": True, "recompute_segments": 65}, "segments 65 must be at most 64"),
        ({"ema": 1.0}, "--ema 1.0 must be above 0 and below 1, such as 0.999"),
        ({"strategy": ("zero2",), "ema": 0.9},
         "--ema needs the executor, zero2 is trained by deepspeed: use --strategy ddp"),
        ({"no_decay": ("1d",)}, "--no-decay 1d leaves parameters out of --weight-decay, which"),
        ({"seed": 2**60}, "--seed 1152921504606846976 must be at least 0, and at most 2"),
        ({"microbatches": (4, -1)}, "--microbatches 4 -1 must be at least 1 each"),
        ({"batch_size": (8,), "per_device_batch": (4,)},
         "--batch-size 8 --per-device-batch 4 both set the batch: give one of them"),
        ({"epochs": 2, "steps": 20}, "--steps 20 --epochs 2 both set the number of steps"),
        ({"batch_size": (3,)}, "a global batch of 3 leaves some of 4 ranks"),
        ({"n_ranks": (5,)}, "needs 5 ranks, 4 were started"),
        ({"strategy": ("zero1",), "engine": "torch"},
         "--engine torch does not train 'zero1': choose --engine deepspeed"),
        ({"strategy": ("magic",)}, "there is no strategy 'magic': choose from single, ddp, pipe"),
        ({"strategy": ("magic",), "trials": 1}, "there is no strategy 'magic': choose from single"),
        ({"strategy": ("plan.json",), "engine": "torch"}, "choose --engine executor"),
        ({"strategy": ("pipeline",), "microbatches": (200,)}, "--microbatches 200 need a sample"),
        ({"strategy": ("tensor", "plan.json"), "stages": 2},
         "--stages 2 is for --strategy pipeline"),
        ({"strategy": ("plan.json",), "recompute": True},
         "--recompute is for --strategy single or ddp or pipeline or tensor or hybrid or tp=T"),
        ({"microbatches": (4, 8)}, "--microbatches 4 8 is for --strategy pipeline"),
        ({"schedule": ("gpipe",)}, "--schedule gpipe is for --strategy pipeline"),
        ({"asynchronous": True}, "--asynchronous is for --strategy pipeline or a strategy's file"),
        ({"strategy": ("pipeline",), "dtype": ("fp16",), "asynchronous": True},
         "--asynchronous has no loss scaling"),
        ({"strategy": ("pipeline",), "asynchronous": True, "schedule": ("gpipe",)},
         "--asynchronous follows 1f1b, not --schedule gpipe"),
        ({"strategy": ("pipeline",), "asynchronous": True, "recompute": True}, "drop --recompute"),
        ({"strategy": ("pipeline",), "balance": "speed"}, "--balance speed shares the samples of"),
        ({"strategy": ("zero1",), "exact_dropout": True},
         "--exact-dropout needs the executor, zero1 is trained by deepspeed"),
        ({"strategy": ("single",), "shard_state": "gradients"},
         "is for --strategy ddp or pipeline"),
        ({"engine": "torch", "shard_state": "optimizer"}, "--shard-state needs the executor"),
        ({"strategy": ("pipeline",), "schedule": ("zero_bubble",), "shard_state": "parameters"},
         "use 1f1b, or --shard-state gradients"),
        ({"strategy": ("pipeline",), "asynchronous": True, "shard_state": "gradients"},
         "--asynchronous has no --shard-state gradients: drop one"),
        ({"strategy": ("pipeline",), "asynchronous": True, "drift": True}, "--drift is for synchr"),
        ({"strategy": ("pipeline",), "asynchronous": True, "compile": True},
         "--asynchronous has no --compile"),
        ({"drift": True, "compile": True}, "--drift has no --compile: drop one of them"),
        ({"survive": True, "compile": True}, "--survive has no --compile: drop one of them"),
        ({"strategy": ("tp=2,dp=2",), "freeze": "schedule", "shrink": "pipetransformer"},
         "--shrink pipetransformer shortens a pipeline, tp=2,dp=2 has none: use --strategy"),
        ({"freeze": "schedule", "freeze_interval": 20},
         "--freeze-interval 20 freezes layers after as many steps, the run has --steps 20"),
        ({"lr_schedule": "step", "lr_step_size": 20}, "20 lowers the learning rate after as many"),
        ({"noise_steps": 16, "noise_every": 20}, "20 measures the gradient noise scale after as"),
        ({"save_every": 21}, "--save-every 21 saves the state after as many steps, the run has"),
        ({"save_model": True, "sync_every": (24,)},
         "of which --sync-every 24 makes a part in each step, and the run has 23 steps with --w"),
        ({"lr_warm_up": 21}, "--lr-warm-up 21 reaches the learning rate after as many steps, the"),
        ({"strategy": ("zero2",), "reduce_dtype": ("int8",)},
         "--reduce-dtype int8 is for torch and the executor, zero2 is trained by deepspeed"),
        ({"strategy": ("zero1",), "channels_last": True},
         "--channels-last is for torch and the executor, zero1 is trained by deepspeed: use --str"),
        ({"strategy": ("zero1",), "compile": True},
         "--compile is for the engines torch and executor, zero1 is trained by deepspeed"),
        ({"save_sharded": True, "engine": "torch"},
         "--save-sharded needs the executor, ddp is trained by torch: add --engine executor"),
        ({"strategy": ("pipeline",), "stages": 5},
         "--stages 5 need a rank each under 1f1b, the run has 4"),
        ({"strategy": ("dp=4,pp=2",)}, "--strategy dp=4,pp=2 needs 8 ranks, the run has 4"),
        ({"search_budget": 9, "strategy": ("single", "ddp")},
         "--search-budget 9 is for --strategy searched, not for single or ddp: drop the flag"),
        ({"strategy": ("searched",), "memory": "12"}, "--memory 12 is 12 B, which is no device's"),
        ({"trials": 1, "strategy": ("pipeline", "single")},
         "--trials 1 is for --strategy searched"),
        ({"memory": "12GB", "strategy": ("plan.json",)},
         "--memory 12GB is for --strategy searched"),
        ({"predict": True, "strategy": ("zero1",)}, "--predict cannot simulate deepspeed"),
        ({"search_seconds": 0.0}, "--search-seconds 0.0"),
        ({"drift": True, "trials": 1}, "--trials 1 is for --strategy searched"),
        ({"evaluate": True}, "samples, --data synthetic has none: give --held-out-dir, or"),
        ({"data": "digits", "evaluate": True, "held_out_dir": Path("val")},
         "--held-out-dir val is for --data imagefolder or .*, --data is digits: drop the flag, or"),
        ({"data": "sst2", "held_out_dir": Path("dev.tsv")}, "dev.tsv is for --evaluate, it is not"),
        ({"optimizer": "adamw", "momentum": 0.5}, "--momentum 0.5 is for --optimizer sgd"),
        ({"drift_threshold": 0.5}, "--drift-threshold 0.5 is for --drift, it is not given: drop"),
        ({"data_dir": "cifar"}, "--data-dir cifar is for --data cifar10 or "),
        ({"data": "digits", "n_samples": 9}, "--n-samples 9 is for --data synthetic, --data is"),
        ({"strategy": ("zero3",), "survive": True},
         "zero3 is trained by deepspeed: use --strategy ddp --shard-state parameters"),
        ({"shard_state": "optimizer", "n_ranks": (4, 1)}, "the run of ddp has 1: drop it, or"),
        ({"memory": "much"}, "size 'much'"),
        ({"engine": "horovod"}, "no engine 'horovod'"),
        ({"dtype": ("fp8",)}, "dtype 'fp8'"),
        ({"optimizer": "lion"}, "no optimizer 'lion'"),
        ({"data": "mnist"}, "no data 'mnist'"),
        ({"model": "dlrm", "data": "cifar10"}, "cannot feed"),
        ({"n_layers": 2}, "--n-layers is for built-in models of text, not for --model resnet18"),
        ({"model": "nets:own", "n_layers": 2}, "text, not for --model nets:own: drop it, or"),
        ({"model": "gpt2", "image_size": 64}, "--image-size is for built-in models of images"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0"),
        ({"sync_every": (0,)}, "--sync-every 0"),
        ({"sync_every": (8,), "strategy": ("pipeline",)},
         "is for --strategy ddp or tp=T,dp=D,pp=P or a strategy's file, not for pipeline"),
        ({"sync_every": (8,), "engine": "deepspeed"}, "8 is for the engines torch and executor"),
        ({"sync_every": (8,), "ema": 0.9}, "--ema is for the training of one replica"),
        ({"sync_every": (8,), "drift": True}, "--drift is for the training of one replica"),
        ({"sync_every": (1, 8), "strategy": ("single", "pp=2")},
         "--sync-every 8 averages replicas, and no run of single pp=2 on 4 ranks has several"),
        ({"profiler_steps": 3, "drift": True}, "--profiler-steps 3 is for one strategy, --drift"),
        ({"noise_steps": 16, "drift": True}, "--noise-steps 16 is for one strategy, --drift"),
        ({"noise_every": 5}, "--noise-every 5 is for --noise-steps, it is not given: drop"),
        ({"noise_steps": 8}, "--noise-steps 8 are too few for an interval: give 16 or 0"),
        ({"noise_steps": 16, "batch_size": (1,), "strategy": ("single",)}, "raise --batch-size 1"),
        ({"noise_steps": 16, "sync_every": (8,)}, "a whole batch, and --sync-every gives none"),
        ({"noise_steps": 16, "strategy": ("zero1",)}, "of a whole batch, and zero1 gives none"),
        ({"outer_momentum": 0.9}, "--outer-momentum 0.9 is for --sync-every above 1"),
        ({"change": ("next.json",)}, "--change next.json is not STEP:FILE"),
        ({"change": ("5:a.json", "5:b.json")}, "--change 5:b.json is for step 5"),
        ({"change": ("20:a.json",)}, "must be above 0 and below --steps 20"),
        ({"freeze": "schedule", "freeze_alpha": 1.0}, "--freeze-alpha 1.0 must be above 0 and"),
        ({"freeze": "schedule", "engine": "torch"}, "--freeze needs the executor"),
        ({"shrink": "search"}, "--freeze is none: drop the flag, or use --freeze schedule"),
        ({"freeze": "schedule", "replicate": True}, "--replicate is for --shrink search or --shr"),
        ({"freeze": "schedule", "shrink": "pipetransformer"}, "shortens a pipeline, ddp has none"),
        ({"cache": "on"}, "--cache on is for --freeze schedule or --freeze gradient, --freeze is"),
        ({"cache": "on", "freeze": "schedule", "dtype": ("bf16",)}, "is for fp32 and tf32"),
        ({"change": ("1:a.json",), "engine": "torch"}, "--change needs the executor"),
        ({"lr_schedule": "step"}, "drops after --lr-step-size, none is given"),
        ({"lr_step_size": 9}, "--lr-step-size 9 is for --lr-schedule step, --lr-schedule is cons"),
        ({"unfreeze": 10}, "--unfreeze 10 is for --freeze schedule or --freeze gradient"),
        ({"unfreeze": 10, "freeze": "schedule"}, "--lr-schedule is constant: use step or cosine"),
        ({"unfreeze": 1, "freeze": "schedule"}, "--unfreeze 1 must be above 1: 10 is to a tenth"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        train_cases(TrainConfig(**flags), 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"microbatches": (6,)}, "interleaved needs microbatches in multiples of its 4 ranks, got"),
        ({"batch_size": (3,)}, "interleaved needs microbatches in multiples of its 4 ranks, got 3"),
        ({"stages": 6}, "6 stages do not spread evenly over 4 ranks: use a multiple of 4"),
    ],
)
def test_pipelines_that_a_schedule_cannot_serve_are_refused(flags, message):
    pipeline = TrainConfig(strategy=("pipeline",), schedule=("interleaved",))
    with pytest.raises(StrategyError, match=message):
        train_cases(replace(pipeline, **flags), 4)
    (case,) = train_cases(replace(pipeline, microbatches=(8,), stages=2), 4)
    assert case.stages == 2


def test_what_one_strategy_follows_may_be_given_beside_others():
    beside = TrainConfig(survive=True, search_seconds=9.0, memory="12GB")
    assert len(train_cases(beside, 4)) == 1
    both = TrainConfig(strategy=("single", "searched"), trials=1, predict=True)
    assert {case.trials for case in train_cases(both, 4)} == {1}
    predicted = TrainConfig(strategy=("ddp", "zero1"), predict=True)
    assert len(train_cases(predicted, 4)) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "nets/own.py:net"}, "'nets/own.py:net' names a file: write nets.own:net"),
        ({"model": ":net"}, "--model ':net' does not name a factory"),
        ({"model": "resnet19"}, "no model 'resnet19': choose one of lenet, alexnet"),
        ({"model": "vit_b_16", "image_size": 60}, "a multiple of 16"),
        ({"model": "alexnet", "image_size": 32}, "at least 63"),
        ({"model": "dlrm", "dlrm_top_mlp": (100, 1)}, "start --dlrm-top-mlp with 576"),
    ],
)
def test_models_refuse_what_they_cannot_take(flags, message):
    with pytest.raises(ModelError, match=message):
        train_cases(TrainConfig(**flags), 4)


def test_a_users_code_is_known_by_the_content_of_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {
        "own.py": "import torch, parts.layers",
        "parts/layers.py": "from .x import *",
        "parts/__init__.py": "",
        "parts/x.py": "",
        "unread.py": "",
    }
    (tmp_path / "parts").mkdir()
    seen = []
    for name, text in (*files.items(), *((name, f"{text}\n") for name, text in files.items())):
        Path(name).write_text(text)
        seen += {case.code_digest for case in train_cases(TrainConfig(model="own:net"), 4)}
    *_, complete, own, layers, package, x, unread = seen
    assert len({complete, own, layers, package, x}) == 5
    assert unread == x
    assert train_cases(TrainConfig(), 4)[0].code_digest == ""


def test_a_users_code_is_known_without_init_files_and_inside_an_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    texts = {
        "own/net.py": "from .parts.x import *\nimport later",
        "own/parts/x.py": "",
        "later.py": "",
    }
    (tmp_path / "own/parts").mkdir(parents=True)
    seen = []
    for name, text in (*texts.items(), *((name, f"{text}\n") for name, text in texts.items())):
        Path(name).write_text(text)
        seen.append(code_digest("own.net:net"))
    assert len(set(seen[2:])) == 4
    assert "" not in seen


def test_installed_libraries_are_no_code_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    (tmp_path / "lib/library-1.0.dist-info").mkdir(parents=True)
    Path("own.py").write_text("import library")
    before = code_digest("own:net")
    Path("lib/library.py").write_text("x = 1")
    assert code_digest("own:net") == before != ""


def test_a_strategys_file_is_known_by_its_content(tmp_path):
    file = tmp_path / "plan.json"
    config = TrainConfig(strategy=(str(file),), asynchronous=True)
    (missing,) = train_cases(config, 4)
    file.write_text("{}")
    (first,) = train_cases(config, 4)
    file.write_text("{ }")
    (second,) = train_cases(config, 4)
    assert len({case.strategy_digest for case in (missing, first, second)}) == 3
    assert first.is_asynchronous
    both = TrainConfig(strategy=("ddp", str(file)), asynchronous=True)
    assert {case.strategy: case.is_asynchronous for case in train_cases(both, 4)} == {
        "ddp": False,
        str(file): True,
    }


@pytest.mark.parametrize(
    ("strategy", "engine", "needs_executor", "chosen"),
    [
        ("single", "auto", False, "torch"),
        ("ddp", "auto", False, "torch"),
        ("ddp", "auto", True, "executor"),
        ("ddp", "executor", False, "executor"),
        ("pipeline", "auto", False, "executor"),
        ("searched", "auto", False, "executor"),
        ("plans/mine.json", "auto", False, "executor"),
        ("zero3", "auto", False, "deepspeed"),
        ("ddp", "deepspeed", False, "deepspeed"),
    ],
)
def test_each_strategy_has_its_engine(strategy, engine, needs_executor, chosen):
    assert engine_of(strategy, engine, needs_executor=needs_executor) == chosen


@pytest.mark.parametrize(
    ("strategy", "schedule"), [("pipeline", "interleaved"), ("dp=1,pp=2", "gpipe")]
)
def test_schedules_and_microbatches_are_swept_for_pipelines_and_degrees(strategy, schedule):
    config = TrainConfig(
        strategy=("ddp", strategy), schedule=("1f1b", schedule), microbatches=(4, 8)
    )
    cases = train_cases(config, 2)
    flows = {(case.strategy, case.schedule, case.microbatches) for case in cases}
    assert flows == {("ddp", "1f1b", None)} | {
        (strategy, name, n) for name in ("1f1b", schedule) for n in (4, 8)
    }
    assert len(cases) == 5


def test_a_batch_smaller_than_the_ranks_can_be_pipelined():
    cases = train_cases(TrainConfig(strategy=("pipeline", "single"), batch_size=(3,)), 4)
    assert {(case.strategy, case.engine, case.n_ranks) for case in cases} == {
        ("pipeline", "executor", 4),
        ("single", "torch", 1),
    }
