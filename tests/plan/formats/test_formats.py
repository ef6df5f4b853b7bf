import re
from pathlib import Path

import msgspec
import pytest

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import OperatorPlan, Stage, Strategy, validate
from harness.errors import GraphError, StrategyError
from harness.plan.formats.detect import convert, detect, read_strategy_file
from harness.plan.formats.flexflow import (
    Entry,
    describe_entries,
    entries_from_strategy,
    parse_console,
    parse_text,
    print_console,
    print_text,
    strategy_from_entries,
)
from harness.plan.formats.flexflow_protobuf import parse_protobuf, print_protobuf
from harness.plan.formats.pipedream import (
    PipeDreamPlan,
    from_strategy,
    parse_graph_txt,
    to_strategy,
)
from harness.plan.report import describe_plans

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="published files are not here")

LINES = """\
[Dense_100] num_dims(2) dims[1,4] device_ids[0,1,2,3]
[Embedding_103] num_dims(2) dims[1,1] device_ids[3]
[Dense_112] num_dims(2) dims[1,4] device_ids[0,1,2,3]
"""
ENTRIES = [
    Entry("conv1", (1, 1, 1, 2), (0, 1), 0),
    Entry("fc", (2, 1), (1, 300), 0),
    Entry("table", (1, 1), (0,), 1, (1, 0)),
]


def test_console_lines_print_back_identically():
    assert print_console(parse_console(LINES)) == LINES


def test_other_output_between_console_lines_is_skipped():
    assert len(parse_console("iteration 3 best 1.5\n" + LINES)) == 3


def test_the_order_of_dims_decides_what_a_strategy_is():
    entries = parse_console("[Dense_1] num_dims(2) dims[1,4] device_ids[0,1,2,3]")
    assert entries[0].cuts("innermost_first") == {"sample": 4, "feature": 1}
    assert entries[0].cuts("samples_first") == {"sample": 1, "feature": 4}
    assert describe_entries(entries) == "data-parallel MLPs"
    assert describe_entries(entries, "samples_first") == "feature-parallel MLPs"


def test_samples_that_stand_first_are_written_last():
    line = b"[Dense_1] num_dims(2) dims[4,1] device_ids[0,1,2,3]\n"
    read = detect(line, source="x")
    assert convert(read, "flexflow-console") == line
    turned = convert(read, "flexflow-console", order="samples_first")
    assert detect(turned, source="x").describe() == read.describe("samples_first")
    assert b"dims[1,4]" in turned


@pytest.mark.parametrize("to", ["pipedream", "flexflow-text"])
def test_what_a_format_cannot_hold_is_not_dropped(to):
    plans = {"a": OperatorPlan({"sample": 2}, [0, 1])}
    graph = Graph(name="g", operators=[Operator(name="a", kind="linear", shape={"sample": 8})])
    strategy = Strategy(name="s", batch=8, operators=plans)
    assert convert(detect(strategy.to_json(), source="x"), to, graph=graph)
    for change, lost in (
        ({"shard_state": "parameters"}, "sharded state (parameters)"),
        ({"stages": [Stage(recompute=True)]}, "recomputation"),
    ):
        changed = msgspec.structs.replace(strategy, **change)
        with pytest.raises(StrategyError, match=re.escape(f"'s' has {lost}, which --to {to}")):
            convert(detect(changed.to_json(), source="x"), to, graph=graph)


def test_dlrm_lines_are_named_for_what_they_are():
    assert describe_entries(parse_console(LINES)) == "data-parallel MLPs, tables on one device each"


def test_operators_of_unknown_kind_are_called_operators():
    assert describe_plans([("other", {"sample": 2}, [0, 1])]) == "data-parallel operators"


def test_text_file_round_trips():
    text = "2\nconv1\n0\n4\n1\t1\t1\t2\n2\n0\t1\nfc\n0\n2\n2\t1\n2\n1\t300\n"
    assert parse_text(text) == ENTRIES[:2]
    assert print_text(ENTRIES[:2]) == text


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_text, "1\nfc\n0\n2\n1\t2\n2\n0\n", "devices of 'fc'.*expected 2"),
        (parse_text, "2\nfc\n0\n1\n1\n1\n0\n", "ends before operator 2"),
        (parse_text, "1\nfc\n0\n1\n1\n1\n0\nmore\n", "goes on with 'more'"),
        (parse_text, "one\n", "number of operators is 'one'"),
        (parse_text, "1\nfc\n0\n2\n1\t2\n1\n0\n", r"2 parts \(dims \[1, 2\]\) and 1 devices"),
        (parse_console, "[a] num_dims(3) dims[1,2] device_ids[0,1]", "num_dims is 3 and 2 dims"),
        (parse_console, "[a] num_dims(2) dims[1,2] device_ids[0]", "2 parts .* and 1 devices"),
        (parse_console, "[a] num_dims(2) dims[1,0] device_ids[]", "each must be >= 1"),
        (parse_console, "nothing here", "has no line like"),
    ],
)
def test_broken_text_or_console_line_is_refused(parse, text, message):
    with pytest.raises(StrategyError, match=message):
        parse(text)


def test_both_protobuf_generations_round_trip():
    v1 = [Entry(e.name, e.dims, e.devices) for e in ENTRIES]
    assert parse_protobuf(print_protobuf(v1, "v1")) == ("v1", v1)
    assert parse_protobuf(print_protobuf(ENTRIES, "r21")) == ("r21", ENTRIES)


def test_packed_numbers_are_read_too():
    packed = b"\x0a\x0c\x0a\x01a\x12\x02\x01\x02\x1a\x03\x00\xac\x02"
    packed = b"\x0a" + bytes([len(packed) - 2]) + packed[2:]
    assert parse_protobuf(packed) == ("v1", [Entry("a", (1, 2), (0, 300))])


def test_v1_protobuf_refuses_what_it_cannot_hold():
    with pytest.raises(StrategyError, match="v1 holds neither"):
        print_protobuf(ENTRIES, "v1")


@pytest.mark.parametrize("cut", [1, 5, 9, 20])
def test_truncated_protobuf_is_refused(cut):
    with pytest.raises(StrategyError):
        parse_protobuf(print_protobuf(ENTRIES, "r21")[:-cut])


def make_dlrm():
    def op(name, kind, inputs, features=4):
        return Operator(
            name=name, kind=kind, inputs=inputs, shape={"sample": 8, "feature": features}
        )

    return Graph(
        name="dlrm",
        batch=8,
        operators=[
            op("dense", "input", []),
            op("sparse", "input", []),
            op("bottom", "linear", ["dense"]),
            op("relu", "elementwise", ["bottom"]),
            op("table", "embedding", ["sparse"]),
            op("cat", "cat", ["relu", "table"], 8),
            op("top", "linear", ["cat"], 1),
        ],
    )


def test_renamed_operators_are_matched_by_kind_and_order():
    entries = parse_console(LINES + "[Concat-111] num_dims(2) dims[1,4] device_ids[0,1,2,3]\n")
    strategy = strategy_from_entries(entries, make_dlrm(), batch=8)
    assert strategy.operators["table"] == OperatorPlan({}, [3])
    assert strategy.operators["relu"] == OperatorPlan({"sample": 4}, [0, 1, 2, 3])
    kept = {e.name: e for e in entries_from_strategy(strategy, make_dlrm())}
    assert kept["bottom"].dims == (1, 4)
    assert kept["table"].devices == (3,)


@pytest.mark.parametrize(
    "dims",
    [("seq", "feature"), ("sample", "heads", "seq", "feature"), ("sample", "seq", "feature")],
)
def test_dims_keep_the_operators_own_names(dims):
    shape = dict.fromkeys(dims, 8)
    graph = Graph(name="g", batch=8, operators=[Operator(name="a", kind="add", shape=shape)])
    for dim in dims:
        plans = {"a": OperatorPlan({dim: 2}, [0, 1])}
        entries = entries_from_strategy(Strategy(name="s", batch=8, operators=plans), graph)
        assert strategy_from_entries(entries, graph, batch=8).operators == plans


@pytest.mark.parametrize(
    ("kind", "shape", "want"),
    [
        ("softmax", {"sample": 8, "feature": 4}, OperatorPlan({"sample": 2}, [0, 1])),
        ("softmax", {"feature": 4, "sample": 8}, OperatorPlan({}, [0])),
        ("softmax", {"sample": 1, "feature": 4}, OperatorPlan({}, [0])),
        ("elementwise", {"sample": 8, "feature": 1}, OperatorPlan({"sample": 2}, [0, 1])),
        ("elementwise", {"sample": 8, "feature": 4}, OperatorPlan({"feature": 2}, [0, 1])),
    ],
)
def test_an_operator_that_no_entry_names_gets_a_plan_that_it_can_have(kind, shape, want):
    linear = Operator(
        name="fc", kind="linear", inputs=["x"], shape={"sample": 8, "feature": 4},
        parameter_bytes=64,
    )  # fmt: skip
    rest = Operator(name="rest", kind=kind, inputs=["fc"], shape=shape)
    inputs = Operator(name="x", kind="input", shape={"sample": 8, "feature": 4})
    graph = Graph(name="g", batch=8, operators=[inputs, linear, rest])
    strategy = strategy_from_entries([Entry("fc", (2, 1), (0, 1))], graph, batch=8)
    assert strategy.operators["rest"] == want
    validate(strategy, graph, Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=10**9))


def test_entries_of_another_model_are_refused():
    with pytest.raises(StrategyError, match=r"2 operators of kind linear.*has 1"):
        strategy_from_entries(
            parse_console(LINES),
            Graph(name="g", operators=[Operator(name="l", kind="linear", shape={"sample": 4})]),
            batch=8,
        )


def test_flexflow_cannot_hold_pipelines_shares_or_keys():
    graph = make_dlrm()
    strategy = strategy_from_entries(
        parse_console(LINES + "[Concat-1] num_dims(2) dims[1,1] device_ids[0]"), graph, batch=8
    )
    shares = {**strategy.operators, "top": OperatorPlan({"sample": [2, 1]}, [0, 1])}
    rings = {**strategy.operators, "top": OperatorPlan({"sample": 2}, [0, 1], keys="ring")}
    for broken in (
        Strategy(name="s", batch=8, operators=strategy.operators, n_microbatches=2),
        Strategy(name="s", batch=8, operators=shares),
        Strategy(name="s", batch=8, operators=rings),
    ):
        with pytest.raises(StrategyError, match=r"FlexFlow's files (hold|cannot say)"):
            entries_from_strategy(broken, graph)


def test_pipedream_plan_round_trips_through_a_strategy():
    data = b"""{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]},
                "stage_to_depth_map": {"0": 1, "1": 0}}"""
    plan = PipeDreamPlan.from_json(data)
    assert PipeDreamPlan.from_json(plan.to_json()) == plan
    graph = make_dlrm()
    stage_of = {op.name: int(op.name in ("cat", "top")) for op in graph.operators}
    strategy = to_strategy(plan, graph, stage_of, batch=8)
    assert strategy.stage_devices() == [(0, 1, 2), (3,)]
    assert strategy.stages == [Stage(), Stage()]
    assert from_strategy(strategy) == plan


def test_unequal_shares_do_not_become_equal_replicas():
    plans = {"a": OperatorPlan({"sample": [3, 1]}, [0, 1])}
    with pytest.raises(StrategyError, match=r"shares \[3, 1\]: a PipeDream plan holds equal"):
        from_strategy(Strategy(name="s", batch=8, operators=plans))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b'{"module_to_stage_map": [0], "stage_to_rank_map": {"00": [0]}}',
            r"\['00'\]: they must be the same",
        ),
        (b'{"module_to_stage_map": [0, 2], "stage_to_rank_map": {"0": [0]}}', "without gaps"),
        (b'{"module_to_stage_map": [0, 1], "stage_to_rank_map": {"0": [0]}}', "must be the same"),
        (
            b'{"module_to_stage_map": [0, 1], "stage_to_rank_map": {"0": [0], "1": [0]}}',
            "rank 0 is in stages 0 and 1 of stage_to_rank_map.* ranks of its own",
        ),
        (b'{"module_to_stage_map": "x"}', "Expected `array`"),
        (b'{"module_to', "is not JSON"),
    ],
)
def test_broken_pipedream_plan_is_refused(data, message):
    with pytest.raises(StrategyError, match=message):
        PipeDreamPlan.from_json(data)


def test_a_format_is_told_by_content():
    assert detect(LINES.encode(), source="x").format == "flexflow console"
    assert detect(print_text(ENTRIES[:2]).encode(), source="x").format == "flexflow text"
    assert detect(print_protobuf(ENTRIES, "r21"), source="x").format == "flexflow protobuf r21"
    with pytest.raises(StrategyError, match="neither harness-strategy nor a PipeDream plan"):
        detect(b'{"a": 1}', source="x")


@needs_data
@pytest.mark.parametrize(
    ("name", "format_name", "what"),
    [
        (
            "flexflow_strategies/dlrm_4gpus.console.txt",
            "flexflow console",
            "data-parallel MLPs, tables on one device each",
        ),
        (
            "flexflow_strategies/alexnet_optimized.v1.strategy",
            "flexflow protobuf v1",
            "data-parallel convolutions, feature-parallel MLPs",
        ),
        (
            "flexflow_strategies/dlrm_8embs_8gpus.r21.pb",
            "flexflow protobuf r21",
            "tables on one device each, data-parallel MLPs",
        ),
        (
            "pipedream_plans/vgg16_4gpus.json",
            "pipedream plan",
            "pipeline of 2 stages with 3-1 replicas",
        ),
        (
            "pipedream_plans/resnet50_4gpus.json",
            "pipedream plan",
            "pipeline of 3 stages with 2-1-1 replicas",
        ),
    ],
)
def test_published_files_are_read_and_named(name, format_name, what):
    imported = read_strategy_file(DATA / name)
    assert (imported.format, imported.describe()) == (format_name, what)


@needs_data
def test_published_flexflow_files_print_back_byte_for_byte():
    folder = DATA / "flexflow_strategies"
    text = (folder / "dlrm_4gpus.console.txt").read_text()
    assert len(parse_console(text)) == 16
    assert print_console(parse_console(text)) == text
    for name in ("alexnet_optimized.v1.strategy", "dlrm_8embs_8gpus.r21.pb"):
        data = (folder / name).read_bytes()
        generation, entries = parse_protobuf(data)
        assert print_protobuf(entries, generation) == data


PROFILES = DATA / "pipedream_profiles"

TEXT = """\
node2 -- Linear(in_features=8, out_features=4, bias=True) -- forward_compute_time=1.737, \
backward_compute_time=3.072, activation_size=64.000, parameter_size=144.000 -- stage_id=1
node1 -- Input -- forward_compute_time=18.962, backward_compute_time=0.000, \
activation_size=77.000, parameter_size=0.000
node3 -- LSTM(2, 1) -- forward_compute_time=1.000, backward_compute_time=2.000, \
activation_size=[6.0; 1.0; 1.0], parameter_size=10.000
\tnode1 -- node2
\tnode2 -- node3
"""


def test_times_are_seconds_and_lists_are_summed():
    graph, profile = parse_graph_txt(TEXT, name="tiny")
    assert [o.name for o in graph.operators] == ["node1", "node2", "node3"]
    assert [o.kind for o in graph.operators] == ["input", "linear", "lstm"]
    assert [o.activation_bytes for o in graph.operators] == [77, 64, 8]
    assert graph.operators[1].attrs["in_features"] == 8
    assert graph.operators[1].attrs["stage_id"] == 1
    times = {p.operator: (p.forward_s, p.backward_s) for p in profile.measurements}
    assert times["node2"] == (0.001737, 0.003072)


@pytest.mark.parametrize("indent", ["\t", "  ", " \t", "\t\t"])
def test_every_indent_marks_an_edge(indent):
    graph, _ = parse_graph_txt(TEXT.replace("\t", indent), name="tiny")
    assert graph.operators[2].inputs == ["node2"]


def test_integers_and_trailing_blanks_are_read():
    text = (
        "node1 -- Add -- forward_compute_time=1, backward_compute_time=2, "
        "activation_size=4, parameter_size=0   \r\n"
        "node2 -- ReLU -- forward_compute_time=0.5,backward_compute_time=2e-1,  "
        "activation_size=[ 4 ;5 ], parameter_size=0 -- stage_id=3 \n"
        "    node1 -- node2  \n\n"
    )
    graph, profile = parse_graph_txt(text, name="t", batch=16)
    assert graph.operators[1].inputs == ["node1"]
    assert graph.operators[1].activation_bytes == 9
    assert graph.operators[1].shape == {"sample": 16}
    assert profile.measurements[1].backward_s == 0.0002


NODE = "n -- Add -- forward_compute_time={}, backward_compute_time=0, activation_size={}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph 't' is empty"),
        (NODE.format(1, 1), "source:1: 'n' lacks parameter_size"),
        (NODE.format(-1, 1) + ", parameter_size=0", "1: forward_compute_time of 'n' is '-1'"),
        (NODE.format(1, "big") + ", parameter_size=0", "activation_size of 'n' is 'big'.*in bytes"),
        (NODE.format(1, "nan") + ", parameter_size=0", "activation_size of 'n' is 'nan'.*from 0"),
        ("n -- Add", "3 or 4 fields"),
        ("\ta -- b", "source:1: an edge names unknown operator 'a'"),
        ("\ta b", "is not an edge"),
        (f"{NODE.format(1, 1)}, parameter_size=0 -- stage=1", "stage_id=<number>"),
        (f"{NODE.format(1, 1)}, parameter_size=0\n" * 2, "source:2: 'n' is described twice"),
        (
            f"{NODE.format(1, 1)}, parameter_size=0\n\tn -- n",
            "cyclic: n -> n: remove one of these edges",
        ),
    ],
)
def test_malformed_profile_names_the_line(text, message):
    with pytest.raises(GraphError, match=message):
        parse_graph_txt(text, name="t", source="source")


@pytest.mark.skipif(not PROFILES.exists(), reason="the published profiles are not here")
@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.txt")), ids=lambda path: path.stem)
def test_every_line_of_a_published_profile_is_read(path):
    text = path.read_text()
    graph, profile = parse_graph_txt(text, name=path.stem, batch=64)
    n_lines = len([line for line in text.splitlines() if line.strip()])
    assert len(graph.operators) + sum(len(op.inputs) for op in graph.operators) == n_lines
    assert {point.operator for point in profile.measurements} == {op.name for op in graph.operators}
    forward_ms = sum(map(float, re.findall(r"forward_compute_time=([\d.]+)", text)))
    assert sum(p.forward_s for p in profile.measurements) == pytest.approx(forward_ms / 1e3)
