"""Searches of the command line for hardware that nobody has, and for each dtype of a profile."""

import json

import pytest

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile, WholeStep
from harness.plan.__main__ import main


def words(*flags):
    return [str(flag) for flag in flags]


def test_unprofiled_hardware_is_estimated_from_its_matmul_rate(tmp_path, capsys):
    operators = [
        Operator(name="x", kind="input"),
        Operator(name="a", kind="linear", inputs=["x"], forward_flops=1e9, backward_flops=2e9),
    ]
    (tmp_path / "g.json").write_bytes(Graph(name="g", operators=operators).to_json())
    cluster = json.loads(Cluster.uniform(1, 1, inside_bytes_per_s=1, memory_bytes=9**9).to_json())
    (tmp_path / "c.json").write_text(json.dumps(cluster))
    flags = words(
        "search", "--graph", tmp_path / "g.json", "--cluster", tmp_path / "c.json", "--json"
    )
    flags += ["--cost", "pipedream"]
    assert main(flags) == 2  # neither profile nor model nor rate
    cluster["nodes"][0]["devices"][0]["flops_per_s"] = {"float32": 1e12}
    (tmp_path / "c.json").write_text(json.dumps(cluster))
    capsys.readouterr()
    assert main(flags) == 0
    assert json.loads(capsys.readouterr().out)["predicted_step_s"] == pytest.approx(3e-3)


DLRM = ["search", "--dlrm-tables", "8x1000x64", "--batch-size", "64", "--topology", "1x2"]
HARDWARE = [
    "--bandwidth",
    "1e9",
    "--memory",
    "1GB",
    "--rates",
    "9e12,5e11",
    "--search-budget",
    "50",
]


def test_a_dlrm_is_planned_from_its_sizes_for_devices_that_nobody_has(capsys):
    assert main([*DLRM, *HARDWARE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_step_s"] > 0
    assert found["speedup_over_ddp"] >= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dlrm-tables", "8x1000"], "NUMBERxROWSxCOLUMNS"),
        (["--dlrm-top-mlp", "575-1"], "make 576"),
        (["--dlrm-bottom-mlp", "64,64"], "64-512-512-64"),
        (["--rates", "9e12"], "FLOPS,BYTES"),
    ],
)
def test_sizes_or_rates_that_make_no_sense_are_refused(capsys, flags, message):
    assert main([*DLRM, *HARDWARE, *flags]) == 2
    assert message in capsys.readouterr().err


def test_dtype_chooses_among_the_profiles_times(tmp_path, capsys):
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
    flags = words(
        "search",
        "--graph", tmp_path / "g.json", "--profile", tmp_path / "p.json", "--topology", "1x1",
        "--bandwidth", "1e9", "--memory", "1GB", "--device-kind", "d", "--json",
    )  # fmt: skip
    found = {}
    for dtype in ("fp32", "bf16"):
        assert main([*flags, "--dtype", dtype]) == 0
        found[dtype] = json.loads(capsys.readouterr().out)["predicted_step_s"]
    assert found == {"fp32": 12.0, "bf16": 3.0}
    assert main(flags) == 0  # the operators' own dtype, and its calibration
    assert json.loads(capsys.readouterr().out)["predicted_step_s"] == 12.0
    assert main([*flags, "--dtype", "tf32"]) == 2
    assert "has times of bfloat16, float32 only" in capsys.readouterr().err
