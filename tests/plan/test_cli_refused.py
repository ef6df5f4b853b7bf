"""What `python -m harness.plan` refuses, each by one line and exit code 2, before it writes.

Searches for hardware that nobody has, and for each dtype of a profile.
"""

import errno
import json
import os
from dataclasses import fields
from pathlib import Path

import pytest

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile, WholeStep
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.flags import MODEL_SIZES
from harness.runtime.models.task import ModelOptions, TextOptions

SEARCH = "search --cost flexflow2018 --topology 1x2"


def test_a_missing_directory_is_refused_before_the_search(tmp_path, refused, monkeypatch):
    monkeypatch.delattr("harness.plan.search.command.search")
    output = tmp_path / "absent" / "plan.json"
    assert f"there is no directory {output.parent}" in refused(SEARCH, "--output", output)
    assert f"{tmp_path} is a directory" in refused(SEARCH, "--output", tmp_path)


def test_a_read_only_place_is_refused_before_the_search(tmp_path, refused, monkeypatch):
    def fail(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.delattr("harness.plan.search.command.search")
    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    output = tmp_path / "plan.json"
    message = f"--output {output} cannot be written (Read-only file system): give a file that you"
    assert message in refused(SEARCH, "--output", output)


@pytest.mark.parametrize(
    "words", ["validate .", "import --topology 1x2 --bandwidth 1e9 --memory 1GB"]
)
def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path, refused, words):
    output = tmp_path / "file"
    output.touch()
    message = f"--output {output} cannot be written (Not a directory): give a directory that you"
    assert message in refused(words, "--output", output)


def test_a_full_disk_is_one_line(tmp_path, refused, monkeypatch):
    def fail(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    output = tmp_path / "plan.json"
    said = refused(SEARCH, "--search-budget", 1, "--output", output)
    assert f"{output} on {os.uname().nodename} cannot be written: No space left" in said


@pytest.mark.parametrize(
    "flag",
    [
        "--model lenet",
        "--profile p.json",
        "--graph g.json",
        "--rates 1e12,1e11",
        "--dlrm-tables 8x10x4",
        "--dtype bf16",
        "--bandwidth 1e9",
        "--device-kind V100",
        "--start s.json",
        "--optimizer adamw",
        "--momentum 0",
    ],
)
def test_a_cost_refuses_what_it_has_no_use_for(flag, refused):
    message = f"--cost flexflow2018 has no use for {flag.split()[0]}: leave it out"
    assert message in refused(SEARCH, flag)
    said = refused("search --cost pipedream --search-budget 9 --topology 2 --bandwidth 1e9")
    assert "--cost pipedream has no use for --search-budget" in said


def test_a_kind_of_device_is_refused_beside_a_cluster_that_names_its_own(tmp_path, refused):
    cluster = tmp_path / "cluster.json"
    cluster.write_bytes(Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=2**30).to_json())
    model = "--dlrm-tables 8x1000x64 --batch-size 64 --rates 9e12,5e11"
    said = refused("search", model, "--device-kind T4 --cluster", cluster)
    assert f"the devices of {cluster} have their kinds, so drop it" in said
    said = refused("import --device-kind T4 --output x --cluster", cluster)
    assert "--device-kind is of --topology or --operators or --layer-times" in said


def test_a_graph_to_draw_over_is_refused_where_nothing_is_drawn(tmp_path, refused):
    said = refused("show", strategy_file(tmp_path), "--graph", "g.json")
    assert "--graph g.json is for drawing a strategy: give --dot too" in said


def test_a_start_that_does_not_fit_is_refused(tmp_path, refused):
    profile = tmp_path / "b.txt"
    profile.write_text(
        "b -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=8, "
        "parameter_size=8\n"
    )
    files = ("--profile", profile, "--start", strategy_file(tmp_path))
    words = ("search --topology 1 --bandwidth 1e9 --memory 1GB", *files, "--batch-size")
    assert "'s' to start from has a batch of 8, the search one of 4" in refused(*words, 4)
    assert "--start: strategy 's' places operator 'a', which graph 'b'" in refused(*words, 8)


def graph_file(tmp_path, *names):
    operators = [Operator(name=n, kind="linear", shape={"sample": 8, "feature": 4}) for n in names]
    path = tmp_path / f"{'-'.join(names)}.json"
    path.write_bytes(Graph(name="g", operators=operators, batch=8).to_json())
    return path


def strategy_file(tmp_path, *, n_stages=1, device=0):
    plans, stages = {"a": OperatorPlan({}, [device])}, [Stage()] * n_stages
    strategy = Strategy(name="s", batch=8, operators=plans, stages=stages)
    path = tmp_path / "s.json"
    path.write_bytes(strategy.to_json())
    return path


def test_what_a_foreign_file_holds_is_refused_by_the_files_name(tmp_path, refused):
    cyclic, table = tmp_path / "cyclic.txt", tmp_path / "table.csv"
    node = "node{} -- Linear -- forward_compute_time=1, backward_compute_time=2, "
    node += "activation_size=8, parameter_size=8\n"
    cyclic.write_text(node.format(1) + node.format(2) + "\tnode1 -- node2\n\tnode2 -- node1\n")
    assert f"{cyclic}: graph 'cyclic' is cyclic" in refused("show", cyclic)
    table.write_text("Name,fw_latency,bw_latency\na,1,2\na,1,2\n")
    flags = ("--batch-size", 8, "--output", tmp_path / "out")
    assert f"{table}: graph 'table' has two" in refused("import", "--operators", table, *flags)


def test_convert_refuses_a_strategy_that_does_not_fit(tmp_path, refused):
    output, own = tmp_path / "out", graph_file(tmp_path, "a")

    def refusal(strategy, graph, *flags):
        return refused("convert", strategy, "--output", output, "--graph", graph, *flags)

    strategy, other = strategy_file(tmp_path), graph_file(tmp_path, "b", "c")
    said = refusal(strategy, other, "--to flexflow-v1")
    assert f"{strategy}: strategy 's' places operator 'a', which graph 'g' does not" in said
    two = graph_file(tmp_path, "a", "b")
    assert "does not place operator 'b'" in refusal(strategy, two)
    said = refusal(strategy, own, "--batch-size 4")
    assert "--batch-size 4: strategy 's' has a batch of 8" in said
    negative = strategy_file(tmp_path, device=-1)
    said = refusal(negative, own, "--to flexflow-v1")
    assert "'a' has devices [-1]: each must be >= 0" in said
    assert "--batch-size -5 must be above 0" in refusal(
        strategy_file(tmp_path), own, "--batch-size -5"
    )
    said = refusal(strategy_file(tmp_path), own, "--dims samples_first")
    assert "--dims is of FlexFlow's files" in said
    foreign = tmp_path / "console.txt"
    foreign.write_text("[a] num_dims(2) dims[1,4] device_ids[0,1,2,3]\n")
    said = refusal(foreign, own, "--batch-size 2")
    assert f"{foreign}: operator 'a' at microbatch 2: a dim of 2 elements cut into 4" in said
    stages = strategy_file(tmp_path, n_stages=2)
    assert "2 stages and operators in [0]" in refusal(stages, own, "--to pipedream")
    said = refusal(stages, own, "--to megatron --dtype bf16")
    assert f"{stages}: strategy 's' has 2 stages, --to megatron needs all used, not [0]" in said
    assert "--dtype is for torchtitan, megatron, deepspeed" in refusal(stages, own, "--dtype bf16")
    assert not output.exists()


def test_a_pipedream_plan_needs_a_graph_with_stages(tmp_path, refused):
    plan = tmp_path / "hybrid_conf.json"
    plan.write_text('{"module_to_stage_map": [0], "stage_to_rank_map": {"0": [0]}}')
    said = refused(
        "convert", plan, "--graph", graph_file(tmp_path, "a"), "--output", tmp_path / "o"
    )
    assert "no operator of graph 'g' has a stage_id: give --graph the graph.txt that" in said


@pytest.mark.parametrize(
    ("flag", "now"),
    [("--batch", "--batch-size"), ("--budget=9", "--search-budget"), ("--seconds", "--search-s")],
)
def test_an_old_spelling_names_the_new_one(flag, now, refused):
    assert f"is {now}" in refused("search --topology 2", flag)


def test_unprofiled_hardware_is_estimated_from_its_matmul_rate(tmp_path, printed, refused):
    operators = [
        Operator(name="x", kind="input"),
        Operator(name="a", kind="linear", inputs=["x"], forward_flops=1e9, backward_flops=2e9),
    ]
    (tmp_path / "g.json").write_bytes(Graph(name="g", operators=operators).to_json())
    cluster = json.loads(Cluster.uniform(1, 1, inside_bytes_per_s=1, memory_bytes=9**9).to_json())
    (tmp_path / "c.json").write_text(json.dumps(cluster))
    files = ("--graph", tmp_path / "g.json", "--cluster", tmp_path / "c.json")
    words = ("search --cost pipedream --json", *files)
    refused(*words)  # neither profile nor model nor rate
    cluster["nodes"][0]["devices"][0]["flops_per_s"] = {"bf16": 4e12, "fp32": 1e12}
    (tmp_path / "c.json").write_text(json.dumps(cluster))
    told = printed(*words)
    assert json.loads(told.out)["predicted_step_s"] == pytest.approx(3e-3)
    assert "estimated from FLOPs and fp32 matmul rates" in told.err
    bf16 = printed(*words, "--dtype bf16")
    assert json.loads(bf16.out)["predicted_step_s"] == pytest.approx(0.75e-3)
    said = refused(*words, "--dtype fp16")
    assert (
        "'g' in fp16: flops_per_s of device node0:0 in the cluster file has bf16 and fp32" in said
    )


HARDWARE = (
    "--topology 1x2 --bandwidth 1e9 --memory 1GB --rates 9e12,5e11 --search-budget 50 --batch-size"
)
DLRM = f"search --dlrm-tables 8x1000x64 {HARDWARE} 64"
TEXT = f"search --model gpt2 --n-layers 1 --width 32 --n-heads 2 {HARDWARE} 4"


def test_a_dlrm_is_planned_from_its_sizes_for_devices_that_nobody_has(printed):
    told = printed(DLRM, "--json")
    assert (
        "operator times are estimated from --rates: `./entry.sh profile --model dlrm "
        "--dlrm-table-rows 1000 1000 1000 1000 1000 1000 1000 1000 --dlrm-bottom-mlp 64 512 512 64 "
        "--dlrm-top-mlp 576 1024 1024 1024 1 --batch-size 64` measures them" in told.err
    )
    found = json.loads(told.out)
    assert found["predicted_step_s"] > 0
    assert found["speedup_over_ddp"] >= 1


@pytest.mark.parametrize(("dtype", "sent"), [("fp32", "32 KiB"), ("bf16", "16 KiB")])
def test_estimates_send_values_in_the_dtype_of_training(dtype, sent, printed):
    sizes = "--dlrm-tables 2x1000x64 --dlrm-bottom-mlp 64-64 --dlrm-top-mlp 192-64-1"
    where = "--topology 1x2 --bandwidth 1e9 --memory 1GB --rates 9e12,5e11 --batch-size 4096"
    flow = f"predict --layout pp=2 --microbatches 1 --dtype {dtype}"
    assert f"per step {sent} of activations" in printed(flow, sizes, where).out


def test_a_built_in_model_is_planned_at_the_sizes_of_its_flags(printed):
    told = printed(TEXT, "--vocabulary-size 64 --sequence-length 8 --dtype bf16 --json")
    assert "profile --model gpt2 --sequence-length 8 --vocabulary-size 64 --n-layers 1" in told.err
    assert "--batch-size 4 --dtype bf16` measures them" in told.err
    assert json.loads(told.out)["predicted_step_s"] < 1e-3


def test_a_strategy_file_says_the_batch_to_capture_a_model_with(tmp_path, printed):
    plan = tmp_path / "plan.json"
    flags = "--vocabulary-size 64 --sequence-length 8 --search-budget 1 --output"
    printed(TEXT, flags, plan)
    words = TEXT.replace("search ", "predict ").partition(" --search-budget")[0]
    sizes = "--vocabulary-size 64 --sequence-length 8"
    assert "of 4 samples" in printed(words, sizes, "--strategy", plan).out


def test_the_sizes_are_those_of_the_models():
    own = {field.name for field in fields(TextOptions)} - {"capacity_factor", "head"}
    assert MODEL_SIZES["text"].keys() == own
    assert MODEL_SIZES["images"].keys() < {field.name for field in fields(ModelOptions)}


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        (TEXT, "--n-heads 0", "--n-heads 0 must be above 0"),
        (TEXT, "--n-heads 3", "gpt2 has width 32 and 3 heads"),
        (TEXT, "--image-size 8", "--image-size is for built-in models of images, not for --model"),
        (TEXT, "--model resnet18", "--n-layers is for built-in models of text, not for --model"),
        (DLRM, "--width 8", "--width is a size of --model, which is not given"),
        (DLRM, "--graph g.json", "--graph and --dlrm-tables give a graph each: give one of them"),
        (DLRM, "--dlrm-tables 8x1000", "NUMBERxROWSxCOLUMNS"),
        (DLRM, "--dlrm-top-mlp 575-1", "make 576"),
        (DLRM, "--dlrm-bottom-mlp 64,64", "64-512-512-64"),
        (DLRM, "--rates 9e12", "FLOPS,BYTES"),
        (DLRM, "--rates nan,1e9", "--rates 'nan,1e9' is not FLOPS,BYTES"),
        ("predict --layout dp=2", "--microbatches 0", "--microbatches 0 must be above 0"),
        (TEXT, "--dlrm-top-mlp 576-1", "are of --dlrm-tables: give that too"),
        ("predict --layout pp=2", "--schedule interleaved", "invalid choice: 'interleaved'"),
        (TEXT, "--optimizer adamw --momentum 0.9", "--momentum is of sgd, not of adamw: drop one"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(refused, words, flags, message):
    assert message in refused(words, flags)


PREDICT = "predict --model gpt2 --batch-size 4 --topology 1x2 --bandwidth 1e9 --memory 1GB --layout"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("foo", "layout 'foo': write it like tp=2,dp=4,pp=2"),
        ("dp=4", "layout tp1 dp4 pp1 needs 4 devices, the cluster has 2"),
        ("dp=2,devices=0-2", "has device 2, the cluster has 2"),
    ],
)
def test_an_impossible_layout_is_refused_before_a_model_is_captured(
    refused, monkeypatch, layout, message
):
    monkeypatch.delattr("harness.plan.cli._capture_model")
    assert message in refused(PREDICT, layout)


ON_TWO = "--dlrm-tables 2x1000x64 --batch-size 64 --topology 1x2 --bandwidth 1e9 --rates 9e12,5e11"
PARAMETER_BYTES = 4 * (2 * 1000 * 64 + 65 * 512 + 513 * 512 + 513 * 64 + 193 * 8 + 9)
WITH_TWO_TABLES = "--dlrm-top-mlp 192-8-1"


@pytest.mark.parametrize(
    ("flags", "n_states", "words"),
    [
        ("", 1, "SGD with momentum"),
        ("--momentum 0", 0, "SGD without momentum"),
        ("--optimizer sgd", 1, "SGD with momentum"),
        ("--optimizer adamw", 2, "AdamW"),
    ],
)
def test_memory_and_time_are_those_of_the_optimizer(printed, flags, n_states, words):
    command = ("predict --layout dp=2", ON_TWO, WITH_TWO_TABLES, "--memory 1GB", flags)
    assert f"peak memory ({words})" in printed(*command).out
    found = json.loads(printed(*command, "--json").out)
    least = json.loads(printed(*command[:-1], "--momentum 0 --json").out)
    more = found["memory_bytes"]["node0:0"] - least["memory_bytes"]["node0:0"]
    assert more == n_states * PARAMETER_BYTES
    # A fused step reads and writes each further state once.
    assert found["step_s"] - least["step_s"] == pytest.approx(
        2 * n_states * PARAMETER_BYTES / 5e11, abs=1e-12
    )


def test_a_search_names_the_optimizer_whose_state_it_counts(printed):
    flags = "--memory 1GB --search-budget 1"
    told = printed("search", ON_TWO, WITH_TWO_TABLES, flags, "--optimizer adamw").out
    assert "peak memory (AdamW)" in told


def test_a_prediction_that_does_not_fit_says_so_first(printed):
    command = ("predict --layout dp=2", ON_TWO, WITH_TWO_TABLES, "--memory 2MB")
    first = printed(*command).out.splitlines()[0]
    assert first.startswith("does not fit: out of memory: ")
    assert first.endswith(" on node0:0, which has 1.91 MiB")
    assert json.loads(printed(*command, "--json").out)["fits"] is False


def test_dtype_chooses_among_the_profiles_times(tmp_path, printed, refused):
    operators = [
        Operator(name="x", kind="input", shape={"sample": 4}),
        Operator(name="a", kind="linear", inputs=["x"], shape={"sample": 4, "feature": 2}),
    ]
    graph = Graph(name="tiny", batch=4, operators=operators)
    points = [
        Measurement(
            device_kind="d", operator="a", shape=operators[1].shape, dtype=dtype,
            forward_s=seconds, backward_s=seconds,
        )
        for dtype, seconds in (("float32", 2.0), ("bfloat16", 1.0))
    ]  # fmt: skip
    steps = [
        WholeStep(
            device_kind="d", batch=4, dtype=dtype, step_s=step_s, operators_s=1.0,
            graph_hash=graph.content_hash(),
        )
        for dtype, step_s in (("float32", 3.0), ("bfloat16", 1.5))
    ]  # fmt: skip
    (tmp_path / "g.json").write_bytes(graph.to_json())
    profile = Profile(model="tiny", measurements=points, whole_steps=steps)
    (tmp_path / "p.json").write_bytes(profile.to_json())
    files = ("--graph", tmp_path / "g.json", "--profile", tmp_path / "p.json")
    hardware = "--topology 1x1 --bandwidth 1e9 --memory 1GB --device-kind d"
    words = ("search", hardware, *files, "--json")
    own = printed(*words)  # the operators' own dtype, and its calibration
    for told, expected in (
        (own, 12.0),
        (printed(*words, "--dtype fp32"), 12.0),
        (printed(*words, "--dtype bf16"), 3.0),
    ):
        assert json.loads(told.out)["predicted_step_s"] == expected
    assert "has times of bfloat16, float32 only" in refused(*words, "--dtype tf32")
