"""A rank's program for the tests: trains a pipeline whose last rank fails in the third step.

usage: faulty_training.py RESULTS FAULT      (started by mpirun; FAULT is killed, error,
hang or stopped; with STRATEGY=ddp torch's engine trains, without microbatches)
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import fx, nn

from harness.cases import Case, describe_cluster
from harness.domain.cluster import CLUSTER_FILE, Cluster, Link
from harness.domain.profile import OptimizerTime
from harness.domain.run import RunHeader
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.launch import Launcher, RunOptions
from harness.measure.store import write_header
from harness.plan.roofline import DeviceRates, roofline_profile
from harness.runtime.ranks.environment import read_launch
from harness.runtime.ranks.isolate import start_fork_server
from harness.runtime.ranks.rendezvous import meet
from harness.workloads.common.contract import config_json
from harness.workloads.planning.inputs import capture_graph
from harness.workloads.train.config import TrainCase
from harness.workloads.train.plan import search_config_of
from harness.workloads.train.workload import WORKLOAD

# Long enough for ranks that share a busy machine to start.
TIMEOUT_S = 20.0


def _is_third_step():
    """Whether this rank has recorded two; checks of the graph call the model as well."""
    records = Path(sys.argv[1]).glob("*-train-*/rank2.jsonl")
    return any(path.read_bytes().count(b'"kind":"step"') >= 2 for path in records)


@fx.wrap
def troubled(x):
    """Does nothing, until the last rank is in its third step."""
    if x.device.type == "meta" or os.environ["OMPI_COMM_WORLD_RANK"] != "2":
        return x * 1.0
    if _is_third_step():
        fault = os.environ["FAULT"]
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(600)
        if fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("rank 2 has a bug")
    return x * 1.0


class Model(nn.Module):
    def __init__(self, n_features, n_classes):
        super().__init__()
        self.flatten, self.first = nn.Flatten(), nn.Linear(n_features, 16)
        self.second = nn.Linear(16, n_classes)

    def forward(self, x):
        return self.second(troubled(torch.relu(self.first(self.flatten(x)))))


def model(n_classes, n_channels, image_size):
    return Model(n_channels * image_size**2, n_classes)


CASE = TrainCase(
    model="faulty_training:model", strategy=f"{sys.argv[1] if sys.argv[1:] else '.'}/plan.json",
    engine="executor", batch=8, image_size=4, n_classes=3, steps=6, warm_up=0, n_ranks=3,
)  # fmt: skip


if os.environ.get("STRATEGY") == "ddp":
    CASE = replace(CASE, strategy="ddp", engine="torch")


def header(cluster, workload, config):
    return RunHeader(
        run_id=f"1-{workload}-0", workload=workload, key="", repeat=0, argv=[], config=config,
        cluster=cluster, ranks=[], versions={}, commit="", start_utc="2026", status="ok",
    )  # fmt: skip


def three_stages() -> Strategy:
    """The operator that fails is the first on rank 2."""
    stages = {0: ("flatten", "first"), 1: ("relu",), 2: ("troubled", "second", "loss")}
    operators = {
        name: OperatorPlan({}, [stage], stage) for stage, names in stages.items() for name in names
    }
    return Strategy(
        name="three stages", batch=8, operators=operators, n_microbatches=2, schedule="1f1b",
        stages=[Stage()] * 3,
    )  # fmt: skip


def prepare(results, cluster: Cluster):
    """Write what links and profile would have: three ranks of one host."""
    names = [device.name for device in cluster.devices]
    links = [
        Link(source=a, target=b, latency_s=1e-4, bandwidth_bytes_per_s=1e9)
        for a in names
        for b in names
        if a != b
    ]
    write_header(results / "1-links-0", header(cluster, "links", {}))
    measured = msgspec.structs.replace(cluster, links=links)
    (results / "1-links-0" / CLUSTER_FILE).write_bytes(measured.to_json())
    (results / "plan.json").write_bytes(three_stages().to_json())
    search_config = search_config_of(CASE)
    rates = {
        d.kind: DeviceRates(flops_per_s=1e10, memory_bytes_per_s=1e10) for d in cluster.devices
    }
    profile = roofline_profile(
        capture_graph(search_config), rates, n_parts=[2], n_microbatches=[1, 2]
    )
    config, variant = search_config.profile_config(2), search_config.optimizer_options().variant
    timed = [OptimizerTime(device_kind=kind, optimizer=variant, s_per_byte=1e-9) for kind in rates]
    config.path(results).write_bytes(msgspec.structs.replace(profile, optimizers=timed).to_json())
    told = {**config_json(config), "shards": [1, 2, 3, 4, 8]}
    write_header(results / "1-profile-0", header(cluster, "profile", told))


def main():
    results = Path(sys.argv[1])
    start_fork_server(["torch", "harness.run", "harness.workloads.train.workload"])
    meeting = meet(read_launch(os.environ), os.environ)
    options = RunOptions(results=results, run_timeout_s=240.0, collective_timeout_s=TIMEOUT_S)
    launcher = Launcher(meeting, options, sys.argv)
    if meeting.world.is_first:
        prepare(results, describe_cluster(launcher.ranks))
    headers = launcher.run_cases([Case(name="train", workload=WORKLOAD, config=CASE)])
    if meeting.world.is_first:
        print(" ".join(header.status for header in headers))
    meeting.leave()


if __name__ == "__main__":
    main()
