import re
from pathlib import Path

import pytest

from harness.errors import GraphError
from harness.plan.formats.pipedream import parse_graph_txt

DATA = Path(__file__).parents[4] / "shared/data/pipedream_profiles"

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
        (
            NODE.format(-1, 1) + ", parameter_size=0",
            "1: forward_compute_time of 'n' is '-1'",
        ),
        (NODE.format(1, "big") + ", parameter_size=0", "activation_size of 'n' is 'big'.*in bytes"),
        (
            NODE.format(1, "nan") + ", parameter_size=0",
            "activation_size of 'n' is 'nan'.*from 0",
        ),
        ("n -- Add", "3 or 4 fields"),
        ("\ta -- b", "source:1: an edge names unknown operator 'a'"),
        ("\ta b", "is not an edge"),
        (f"{NODE.format(1, 1)}, parameter_size=0 -- stage=1", "stage_id=<number>"),
        (f"{NODE.format(1, 1)}, parameter_size=0\n" * 2, "source:2: 'n' is described twice"),
        (f"{NODE.format(1, 1)}, parameter_size=0\n\tn -- n", "cyclic: n -> n"),
    ],
)
def test_malformed_profile_names_the_line(text, message):
    with pytest.raises(GraphError, match=message):
        parse_graph_txt(text, name="t", source="source")


@pytest.mark.skipif(not DATA.exists(), reason="the published profiles are not here")
@pytest.mark.parametrize("path", sorted(DATA.glob("*.txt")), ids=lambda path: path.stem)
def test_every_line_of_a_published_profile_is_read(path):
    text = path.read_text()
    graph, profile = parse_graph_txt(text, name=path.stem, batch=64)
    n_lines = len([line for line in text.splitlines() if line.strip()])
    assert len(graph.operators) + sum(len(op.inputs) for op in graph.operators) == n_lines
    assert {point.operator for point in profile.measurements} == {op.name for op in graph.operators}
    forward_ms = sum(map(float, re.findall(r"forward_compute_time=([\d.]+)", text)))
    assert sum(p.forward_s for p in profile.measurements) == pytest.approx(forward_ms / 1e3)
