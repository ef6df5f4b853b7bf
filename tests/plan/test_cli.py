"""The command line as a user runs it: files in, JSON or text out, one line per mistake."""

import json
import os
import signal
import sys
import threading
from argparse import Namespace
from pathlib import Path

import pytest
from launching import completed

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.strategy import OperatorPlan, Strategy, check_fresh, validate
from harness.errors import StrategyError
from harness.plan.cli import cluster_from
from harness.plan.formats.pipedream import parse_graph_txt
from harness.plan.report import ProgressLine

DATA = Path(__file__).parents[3] / "shared/data"


def node(name, ms, parameters=0):
    return (
        f"{name} -- Linear(in_features=8, out_features=8) -- forward_compute_time={ms:.3f}, "
        f"backward_compute_time={2 * ms:.3f}, activation_size=1000.000, "
        f"parameter_size={parameters}.000"
    )


CHAIN = "\n".join(
    [
        node("a", 1, parameters=10**6),
        node("b", 1, parameters=10**6),
        node("c", 1, parameters=10**9),
        node("d", 1, parameters=10**9),
        "\ta -- b",
        "\tb -- c",
        "\tc -- d",
    ]
)


@pytest.fixture
def chain(tmp_path):
    path = tmp_path / "chain.txt"
    path.write_text(CHAIN)
    return path


SEARCH = "search --cost pipedream"
ON_TWO = "search --cost pipedream --topology 2 --bandwidth 1e9"


def test_json_is_one_object_with_every_field(chain, printed):
    out = printed(SEARCH, "--topology 1x2 --bandwidth 1e9 --json --profile", chain).out
    assert out.count("\n") == 1
    result = json.loads(out)
    assert result["predicted_step_s"] == pytest.approx(6e-3)  # two stages of two operators
    assert result["speedup_over_single"] == pytest.approx(2.0)
    # Data parallel: (12 ms + 4 x 2.002e9 / (1e9 x 2)) / 2
    assert result["speedup_over_ddp"] == pytest.approx((12e-3 + 4.004) / 2 / 6e-3)
    assert result["n_proposals"] == 5
    assert set(result["memory_bytes"]) == {"node0:0", "node0:1"}
    assert min(result["memory_bytes"].values()) > 0
    for field in ("search_cpu_s", "proposals_per_s", "peak_rss_bytes"):
        assert result[field] > 0
    assert result["strategy"]["operators"]["c"] == {
        "partition": {"sample": 1},
        "devices": [1],
        "stage": 1,
    }


@pytest.mark.parametrize(
    ("flags", "batch", "note"),
    [
        ("", 4, "whose size is not known"),
        ("--batch-size 64", 64, None),
        ("--batch-size 2", 4, "a batch of 2 leaves replicas without a sample"),
    ],
)
def test_strategy_has_a_batch_that_every_replica_can_share(tmp_path, flags, batch, note, printed):
    path = tmp_path / "one.txt"
    path.write_text(node("a", 1))
    words = (SEARCH, "--topology 4 --bandwidth 1e9 --json --profile", path, flags)
    result = json.loads(printed(*words).out)
    assert result["strategy"]["batch"] == batch
    assert result["strategy"]["operators"]["a"]["partition"] == {"sample": 4}
    assert any(note in line for line in result["explanation"]) if note else batch == 64


def test_text_explains_the_choice(chain, printed):
    out = printed(SEARCH, "--topology 2 --bandwidth 8gbit --batch-size 64 --profile", chain).out
    assert "best plan by pipedream: 6 ms per step" in out
    assert "predicted 2.00 times as fast as one device" in out
    assert "stage 0: 2 operators on 1 device: compute 6 ms" in out
    assert "sets the pace, by compute" in out
    assert "with 1 minibatch in flight" in out
    assert "links between devices: 1 GB/s" in out
    assert "data parallel" in out
    assert "node0:1" in out


def test_written_strategy_is_valid_for_the_graph(chain, tmp_path, printed):
    plan = tmp_path / "plan.json"
    hardware = "--topology 2x2 --bandwidth 1e9,1e8"
    said = printed(SEARCH, hardware, "--batch-size 64 --profile", chain, "--output", plan).out
    assert ": work inside nodes " in said  # with the gradients that a node's devices send
    strategy = Strategy.load(plan)
    assert strategy.batch == 64
    cluster = Cluster.uniform(2, 2, inside_bytes_per_s=1e9, memory_bytes=2**40)
    graph = parse_graph_txt(CHAIN, name="chain", batch=64)[0]
    validate(strategy, graph, cluster)
    other = Cluster.uniform(4, 1, inside_bytes_per_s=1e9, memory_bytes=2**30, kind="other")
    check_fresh(strategy, graph, other)  # the topology's own devices do not exist
    (tmp_path / "cluster.json").write_bytes(cluster.to_json())
    words = (SEARCH, "--cluster", tmp_path / "cluster.json", "--batch-size 64 --profile", chain)
    printed(*words, "--output", plan)
    check_fresh(Strategy.load(plan), graph, cluster)
    with pytest.raises(StrategyError, match="device 'node0:1' is gone"):
        check_fresh(Strategy.load(plan), graph, other)


def test_published_costs_refuse_unlike_devices(chain, tmp_path, refused):
    cluster = json.loads(
        Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=2**40).to_json()
    )
    cluster["nodes"][0]["devices"][1]["speed"] = 3.0
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster))
    for cost in ("pipedream", "maxload"):
        said = refused("search --cost", cost, "--profile", chain, "--cluster", path)
        assert f"--cost {cost} plans for equal devices" in said


@pytest.mark.parametrize("cost", ["pipedream", "maxload"])
def test_published_costs_know_how_fast_devices_are(chain, tmp_path, printed, cost):
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e12, memory_bytes=2**40)
    for speed in (1.0, 0.5):
        path = tmp_path / "cluster.json"
        path.write_bytes(cluster.scaled([speed] * 2).to_json())
        words = ("search --json --cost", cost, "--profile", chain, "--cluster", path)
        found = json.loads(printed(*words).out)
        assert found["predicted_step_s"] == pytest.approx(6e-3 / speed, rel=0.01)


def test_published_costs_refuse_another_batch_than_the_profiled(tmp_path, refused):
    graph = Graph(name="g", operators=[Operator(name="a", kind="linear")], batch=4)
    point = Measurement(device_kind="device", operator="a", forward_s=1.0, backward_s=1.0)
    (tmp_path / "g.json").write_bytes(graph.to_json())
    (tmp_path / "p.json").write_bytes(Profile(model="g", measurements=[point]).to_json())
    files = ("--graph", tmp_path / "g.json", "--profile", tmp_path / "p.json")
    words = ("--topology 2 --bandwidth 1e9", *files)
    for cost in ("pipedream", "maxload"):
        said = refused("search --cost", cost, *words, "--batch-size 8")
        assert "for a batch of 4, and --batch-size is 8: leave it out" in said


def test_a_strategy_for_a_graph_txt_is_predicted_at_its_own_batch(chain, tmp_path, printed):
    where = "--topology 2 --bandwidth 1e9 --memory 1GB"
    words = (where, "--json --profile", chain)
    plan = tmp_path / "plan.json"
    layout = ("predict --layout pp=2 --microbatches 2 --batch-size 8 --output", plan)
    made = json.loads(printed(*layout, *words).out)
    assert json.loads(printed("predict --strategy", plan, *words).out) == made


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bandwidth 1e9", "give either --cluster FILE or --topology"),
        ("--topology 2 --cluster x.json", "give either --cluster FILE or --topology"),
        ("--topology 2y2 --bandwidth 1e9", "--topology '2y2' is not NODESxDEVICES"),
        ("--topology 0x2 --bandwidth 1e9", "--topology '0x2' is not NODESxDEVICES"),
        ("--topology 2", "--topology needs --bandwidth"),
        ("--topology 2 --bandwidth 1e9,2e9,3e9", "is not INSIDE[,BETWEEN]"),
        ("--cost simulator --topology 2 --bandwidth 1e9", "--topology needs --memory BYTES"),
        ("--topology 2 --bandwidth fast", "'fast' is not a number"),
        (
            "--topology 2 --bandwidth 1e9,1e8",
            "and --bandwidth 1e9,1e8 has a BETWEEN",
        ),
        ("--topology 2 --bandwidth 1e9 --batch-size 0", "--batch-size 0 must be above 0"),
        ("--topology 2 --bandwidth 1e9 --search-seconds -1", "--search-seconds -1.0 must be"),
        ("--topology 2 --bandwidth 1e9 --memory 1MB", "no plan fits"),
        ("--cluster", "argument --cluster: expected one argument; see python -m harness.plan"),
        (
            "--topology 2 --bandwidth 1e9 --memory 0",
            "--memory 0 is 0 B, which is no device's: write",
        ),
        ("--topology 2 --bandwidth 1e9 --memory 12", "with a unit, such as 12GB"),
        ("--cluster absent.json", "absent.json: No such file"),
        ("--topology 2 --bandwidth 1e9 --graph absent", "absent: No such file"),
    ],
)
def test_bad_flags_end_with_one_line_and_code_2(chain, flags, message, refused):
    assert message in refused(SEARCH, "--profile", chain, flags)


def test_profile_without_its_graph_asks_for_it(tmp_path, refused):
    _, profile = parse_graph_txt(CHAIN, name="chain")
    path = tmp_path / "chain.json"
    path.write_bytes(profile.to_json())
    assert "give --model or --graph FILE too" in refused(ON_TWO, "--profile", path)


def test_show_tells_files_by_their_content(chain, tmp_path, printed):
    graph, profile = parse_graph_txt(CHAIN, name="chain")
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=2**30)
    plan = tmp_path / "strategy"
    printed(ON_TWO, "--profile", chain, "--output", plan)
    expected = {
        "graph": (graph.to_json(), "graph chain: 4 operators"),
        "profile": (profile.to_json(), "profile of chain: 4 measurements on device"),
        "cluster": (cluster.to_json(), "link node0:0 -> node0:1: 1 GB/s"),
        "strategy": (plan.read_bytes(), "batch 2, 2 microbatches, 1f1b, 2 stages"),
    }
    for name, (data, line) in expected.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert line in printed("show", path).out


def test_show_draws_a_strategy_over_its_graph(chain, tmp_path, printed, refused):
    plan = tmp_path / "plan.json"
    printed(ON_TWO, "--profile", chain, "--output", plan)
    out = printed("show", plan, "--dot --graph", chain).out
    assert '"c" [label="c\\nlinear\\nsample 1 on 1", style=filled, fillcolor=palegreen];' in out
    other = tmp_path / "other.txt"
    other.write_text(node("z", 1))
    said = refused("show", plan, "--dot --graph", other)
    assert "places 'a', which graph 'other' does not have" in said


def test_show_says_what_a_strategy_shards_and_recomputes(chain, tmp_path, printed):
    plan = tmp_path / "plan.json"
    hardware = "--topology 2 --bandwidth 1e9 --memory 100GB --batch-size 8"
    flags = "--shard-state optimizer --recompute stages --microbatches 2 --output"
    printed("predict --layout pp=2 --profile", chain, hardware, flags, plan)
    out = printed("show", plan).out
    assert "2 microbatches, 1f1b, 2 stages\nshards optimizer\nrecomputes stage 0, 1\n" in out


def test_show_refuses_what_it_cannot_draw(tmp_path, refused):
    path = tmp_path / "cluster.json"
    path.write_bytes(Cluster.uniform(1, 2, inside_bytes_per_s=1, memory_bytes=1).to_json())
    assert "is not a graph" in refused("show", path, "--dot")
    assert "No such file" in refused("show", tmp_path / "absent")


def test_help_loads_no_numpy_and_showing_no_compilers_or_torch(chain):
    code = (
        "import sys; from harness.plan.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print({'numpy'} & set(sys.modules), file=sys.stderr)\n"
        "main(['show', sys.argv[1]])\n"
        "print({'torch', 'numba', 'scipy'} & set(sys.modules), file=sys.stderr)"
    )
    done = completed(sys.executable, "-c", code, chain)
    assert done.stderr.splitlines() == ["set()"] * 2


CONSOLE = "[Dense_100] num_dims(2) dims[1,2] device_ids[0,1]\n"


def test_convert_carries_a_strategy_there_and_back(tmp_path, printed):
    operators = [Operator(name="Dense_100", kind="linear", shape={"sample": 8, "feature": 4})]
    (tmp_path / "g.json").write_bytes(Graph(name="g", operators=operators, batch=8).to_json())
    (tmp_path / "a.txt").write_text(CONSOLE)
    graph = ("--graph", tmp_path / "g.json")
    out = printed("convert", tmp_path / "a.txt", "--output", tmp_path / "s", *graph).out
    strategy = Strategy.load(tmp_path / "s")
    assert strategy.operators["Dense_100"].partition == {"sample": 2}
    assert strategy.batch == 8
    assert "as flexflow console, dims innermost first: data-parallel MLPs; wrote" in out
    printed("convert", tmp_path / "s", "--to flexflow-console --output", tmp_path / "b.txt", *graph)
    assert (tmp_path / "b.txt").read_text() == CONSOLE


def test_a_search_starts_from_a_file_of_another_project(chain, tmp_path, printed):
    lines = [f"[{name}] num_dims(2) dims[1,1] device_ids[1]\n" for name in "abcd"]
    (tmp_path / "start.txt").write_text("".join(lines))
    sizes = "--topology 2 --bandwidth 1e9 --memory 100GB --batch-size 8 --search-budget 1 --json"
    words = ("search", sizes, "--profile", chain, "--start", tmp_path / "start.txt")
    found = json.loads(printed(*words).out)
    assert "start: single device" in [found["method"], *(r["name"] for r in found["runners_up"])]


def test_convert_prints_degrees_and_what_it_assumes(tmp_path, printed):
    (tmp_path / "a.txt").write_text(CONSOLE)
    operators = [Operator(name="Dense_100", kind="linear", shape={"sample": 8, "feature": 4})]
    (tmp_path / "g.json").write_bytes(Graph(name="g", operators=operators, batch=8).to_json())
    words = ("--to megatron --dtype bf16 --output", tmp_path / "args", "--graph")
    told = printed("convert", tmp_path / "a.txt", *words, tmp_path / "g.json")
    assert told.out.endswith(f"wrote {tmp_path / 'args'} (megatron, tp=1,dp=2,pp=1)\n")
    assert told.err == "assumed: rank k is device k of the strategy\n"
    assert "--micro-batch-size=4\n" in (tmp_path / "args").read_text()


@pytest.mark.parametrize(("dim", "is_warned"), [("feature", True), ("sample", False)])
def test_predict_warns_of_a_tied_weight_that_is_cut_unlike(tmp_path, printed, dim, is_warned):
    shape, attrs = {"sample": 8, "feature": 8}, {"in_features": 8}
    layers = [
        Operator(name="x", kind="input", shape=shape),
        Operator(name="a", kind="linear", inputs=["x"], shape=shape, parameter_bytes=256,
                 attrs=attrs),
        Operator(name="b", kind="linear", inputs=["a"], shape=shape,
                 attrs={**attrs, "tied_to": "a", "tied_bytes": 256}),
    ]  # fmt: skip
    plans = {"a": OperatorPlan({dim: 2}, [0, 1]), "b": OperatorPlan({"sample": 2}, [0, 1])}
    strategy = Strategy(name="s", batch=8, operators=plans)
    (tmp_path / "g.json").write_bytes(Graph(name="g", operators=layers, batch=8).to_json())
    (tmp_path / "s.json").write_bytes(strategy.to_json())
    hardware = "--topology 2 --bandwidth 1e9 --memory 1GB --rates 1e12,1e11"
    files = ("--graph", tmp_path / "g.json", "--strategy", tmp_path / "s.json")
    said = printed("predict", hardware, *files).err
    assert ("warning: a and b share a weight and do not cut it alike" in said) == is_warned


@pytest.mark.parametrize(("rates", "kind"), [(None, "RTX"), ("1e12,1e11", "device")])
def test_rates_are_not_of_the_kind_that_was_profiled(tmp_path, rates, kind):
    point = Measurement(device_kind="RTX", operator="a", forward_s=1.0, backward_s=1.0)
    profile = Profile(model="m", measurements=[point])
    (tmp_path / "profile-m.json").write_bytes(profile.to_json())
    given = {"topology": "2x1", "bandwidth": "1e9", "memory": "1GB", "model": "m", "rates": rates}
    absent = dict.fromkeys(("cluster", "device_kind", "profile", "dtype"))
    args = Namespace(**given, **absent, cost="simulator", results=tmp_path)
    assert [device.kind for device in cluster_from(args).devices] == [kind] * 2


@pytest.mark.skipif(not DATA.exists(), reason="the published profiles are not here")
def test_interrupt_returns_the_best_plan_so_far(monkeypatch, printed):
    """SIGINT arrives when refinement begins, as from a terminal."""

    def interrupt(self, progress):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(1)

    monkeypatch.setattr(ProgressLine, "__call__", interrupt)
    profile = DATA / "pipedream_profiles/inception_v3.txt"
    # What a shell starts in the background ignores SIGINT, and so would these tests there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        told = printed(SEARCH, "--topology 4 --bandwidth 1e10 --json --profile", profile)
    finally:
        signal.signal(signal.SIGINT, before)
    result = json.loads(told.out)
    assert result["interrupted"] is True
    assert result["speedup_over_single"] > 3.9


# Speed-up over one device that PipeDream's own optimizer finds, transfers counted.
PIPEDREAM = {
    "alexnet": (2.49, 3.84, 14.28, 5.65),
    "vgg16": (3.27, 3.95, 15.17, 10.01),
    "resnet18": (2.59, 3.94, 14.69, 11.05),
    "resnet50": (2.72, 3.97, 14.52, 10.26),
    "densenet121": (3.62, 3.97, 15.74, 13.25),
    "gnmt": (3.45, 3.45, 8.06, 8.06),
    "inception_v3": (3.03, 3.95, 14.90, None),
}
SETTINGS = (("4", "1e9"), ("4", "1e10"), ("16", "5e9"), ("4x4", "1e10,1.25e9"))


@pytest.mark.skipif(not DATA.exists(), reason="the published profiles are not here")
@pytest.mark.parametrize("name", PIPEDREAM)
def test_plans_are_as_fast_as_those_of_pipedream(name, printed):
    for (topology, bandwidth), expected in zip(SETTINGS, PIPEDREAM[name], strict=True):
        if expected is None:
            continue
        hardware = f"--topology {topology} --bandwidth {bandwidth}"
        profile = DATA / f"pipedream_profiles/{name}.txt"
        found = json.loads(printed(SEARCH, hardware, "--json --profile", profile).out)
        assert found["speedup_over_single"] >= expected
