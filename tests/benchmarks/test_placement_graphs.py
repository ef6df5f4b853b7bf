"""The reader of published placement graphs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.plan.published.maxload.problem import Value

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from placement_graphs import read_problem


def test_a_color_class_is_one_operator_ordered_by_its_forward_nodes(tmp_path: Path) -> None:
    def node(i: int, ms: float, color: int, *, backward: bool = False) -> dict[str, object]:
        return {
            "id": i, "fpgaLatency": ms, "colorClass": color, "isBackwardNode": backward, "size": 8,
        }  # fmt: skip

    nodes = [
        node(0, 1, 7),
        node(1, 2, 8),
        node(2, 4, 8, backward=True),
        node(3, 5, 9, backward=True),  # a class of a backward node only, before node 1's
        node(4, 3, 7, backward=True),
    ]
    edges = [(0, 1, 10), (1, 2, 0), (2, 3, 20), (3, 4, 30)]
    file = {
        "maxFPGAs": 2, "maxSizePerFPGA": 100, "maxCPUs": 1, "nodes": nodes,
        "edges": [{"sourceId": a, "destId": b, "cost": c} for a, b, c in edges],
    }  # fmt: skip
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(file))
    problem = read_problem(path)
    assert problem.n_devices == 2
    assert problem.memory_bytes == 100
    assert problem.seconds == [4e-3, 5e-3, 6e-3]  # 0 and 4; 3; 1 and 2
    assert problem.n_bytes == [16, 8, 16]
    assert problem.producers == [[], [0], [0, 1]]
    assert sorted(problem.values) == [
        Value(0.0, (2,)),
        Value(0.01, (0, 2)),
        Value(0.02, (1, 2)),
        Value(0.03, (0, 1)),
    ]
