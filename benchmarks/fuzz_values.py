"""Small valid values of the files of planning, for `fuzz_cases.py`."""

from __future__ import annotations

from msgspec.structs import replace

from harness.domain.cluster import Cluster, CollectivePoint
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph, Operator
from harness.domain.prediction import Prediction
from harness.domain.profile import Measurement, Profile, WholeStep
from harness.domain.record import Span
from harness.domain.strategy import OperatorPlan, Stage, Strategy


def small_graph() -> Graph:
    shape = {"sample": 20, "feature": 8}
    return Graph(
        name="mini",
        batch=20,
        operators=[
            Operator(name="input", kind="input", shape=shape, activation_bytes=640),
            Operator(
                name="fc1", kind="linear", inputs=["input"], shape=shape, forward_flops=1e4,
                backward_flops=2e4, parameter_bytes=256, activation_bytes=640,
                attrs={"in_features": 8, "out_features": 8},
            ),
            Operator(
                name="pool", kind="pool", inputs=["fc1"], shape={**shape, "height": 4, "width": 4},
                activation_bytes=640, attrs={"kernel": [2, 2], "stride": 2, "padding": 0},
            ),
            Operator(name="loss", kind="loss", inputs=["pool"], shape={"sample": 20}),
        ],
    )  # fmt: skip


def small_cluster() -> Cluster:
    cluster = Cluster.uniform(3, 1, inside_bytes_per_s=1e9, memory_bytes=2**30, latency_s=1e-5)
    device = {"flops_per_s": {"float32": 1e12}}
    nodes = [
        replace(node, devices=[replace(one, **device) for one in node.devices])
        for node in cluster.nodes
    ]
    point = CollectivePoint(
        operation="all_reduce", transport="gloo", n_ranks=3, n_bytes=1024, duration_s=1e-3
    )
    return replace(cluster, nodes=nodes, collectives=[point])


def small_profile() -> Profile:
    points = [
        Measurement(
            device_kind="device", operator=name, forward_s=n / 1000, backward_s=n / 500,
            shape={"sample": n, "feature": 8}, saved_bytes=10, spread=0.1, n_samples=9,
        )
        for name in ("fc1", "pool", "loss")
        for n in (5, 10, 20)
    ]  # fmt: skip
    step = WholeStep(
        device_kind="device", batch=20, dtype="float32", step_s=0.2, operators_s=0.19,
        graph_hash=small_graph().content_hash(),
    )  # fmt: skip
    return Profile(model="mini", measurements=points, whole_steps=[step])


def small_strategy() -> Strategy:
    return Strategy(
        name="p", batch=20, n_microbatches=4, schedule="1f1b",
        stages=[Stage(), Stage(recompute=True)],
        operators={
            "fc1": OperatorPlan({"sample": [2, 1]}, [0, 1]),
            "pool": OperatorPlan({}, [2], 1),
            "loss": OperatorPlan({}, [2], 1),
        },
        made_for=fingerprint(small_graph(), small_cluster()),
    )  # fmt: skip


def small_prediction() -> Prediction:
    span = Span(kind="forward", start_s=0.0, duration_s=0.1, stage=0, microbatch=0)
    return Prediction(
        strategy="p", method="search", step_s=0.2, memory_bytes={"node0:0": 1},
        spans={"0": [span], "1": []}, contention_s={"0": 0.1}, calibrations={"device": 1.0},
    )  # fmt: skip
