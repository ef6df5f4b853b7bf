"""A rank's program for the tests: trainings whose last rank fails in the third step or in a change.

usage: faulty_training.py RESULTS [--resume] CASE:FAULT...      (started by mpirun)

CASE is a key of CASES, on as many ranks as there are; FAULT is killed, hang or stopped in
the third step, or where a rank is killed: transfer, vote or commit of a change, or verify.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from made_graphs import links_between
from made_runs import header_of
from torch import fx, nn

from harness.__main__ import _exit
from harness.cases import Case, describe_cluster
from harness.domain.cluster import CLUSTER_FILE, Cluster
from harness.domain.profile import OptimizerTime
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.launch import Launcher
from harness.measure.store import write_header
from harness.plan import builders
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.runtime.executor.change import elastic
from harness.runtime.executor.change.transfer import StateTransfer
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.ranks.environment import read_launch
from harness.runtime.ranks.isolate import start_fork_server
from harness.runtime.ranks.rendezvous import meet
from harness.workloads.common.contract import config_json
from harness.workloads.common.flags import RunOptions
from harness.workloads.planning.inputs import capture_graph
from harness.workloads.train import policies
from harness.workloads.train.config import TrainCase
from harness.workloads.train.plan import search_config_of
from harness.workloads.train.workload import WORKLOAD

# Long enough for ranks that share a busy machine to start.
TIMEOUT_S = 15.0
_fault = ""  # of the model that this process has made


def _is_third_step():
    """Whether this rank has recorded two; checks of the graph call the model as well."""
    runs = Path(sys.argv[1]).glob("*-train-*")
    last = max(runs, key=lambda path: path.stat().st_mtime_ns)  # names tell seconds only
    records = last / "rank2.jsonl"
    return records.exists() and records.read_bytes().count(b'"kind":"step"') >= 2


def be_killed(*_):
    time.sleep(1.0)  # until the state of the step before is saved on all ranks
    os.kill(os.getpid(), signal.SIGKILL)


@fx.wrap
def troubled(x):
    """Does nothing, until the last rank is in its third step."""
    if x.device.type == "meta" or os.environ["OMPI_COMM_WORLD_RANK"] != "2":
        return x * 1.0
    if _fault not in CHANGE_FAULTS and _is_third_step():
        if _fault == "killed":
            be_killed()
        if _fault == "hang":
            time.sleep(600)
        if _fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    return x * 1.0


class Model(nn.Module):
    def __init__(self, n_features, n_classes):
        super().__init__()
        self.flatten, self.first = nn.Flatten(), nn.Linear(n_features, 16)
        self.second = nn.Linear(16, n_classes)

    def forward(self, x):
        return self.second(troubled(torch.relu(self.first(self.flatten(x)))))


# Each is killed when it is called first: in the transfer of a change, after it, after the vote, and
# after the last step.
CHANGE_FAULTS = {
    "transfer": (StateTransfer, "exchange"),
    "vote": (StateTransfer, "message_bits"),
    "commit": (elastic, "check_votes"),
    "verify": (ExecutorEngine, "verify"),
}


def make_model(fault, n_classes, n_channels, image_size):
    global _fault
    _fault = fault
    if fault in CHANGE_FAULTS and os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        where, name = CHANGE_FAULTS[fault]
        setattr(where, name, be_killed)
    return Model(n_channels * image_size**2, n_classes)


killed, hang, stopped = (partial(make_model, fault) for fault in ("killed", "hang", "stopped"))
transfer, vote, commit, verify = (partial(make_model, fault) for fault in CHANGE_FAULTS)
PIPELINE = TrainCase(
    strategy=f"{sys.argv[1] if sys.argv[1:] else '.'}/plan.json", engine="executor", batch=8,
    image_size=4, n_classes=3, steps=6, warm_up=0, n_ranks=3,
)  # fmt: skip


LASTING = replace(PIPELINE, strategy="ddp", save_every=1, save_model=True)
CASES = {
    "pipeline": PIPELINE,
    "ddp": replace(PIPELINE, strategy="ddp", engine="torch"),  # without microbatches
    "lasting": LASTING,
    "features": replace(LASTING, strategy="tp=2"),
    "replicas": replace(LASTING, save_every=None, survive=True, rejoin=2),
    "stages": replace(PIPELINE, save_every=2, save_model=True, survive=True),
    "to_stages": replace(
        LASTING, save_every=None, survive=True, change=(f"3:{PIPELINE.strategy}",)
    ),
    "to_replicas": replace(
        PIPELINE,
        save_every=2,
        save_model=True,
        survive=True,
        change=(f"3:{Path(PIPELINE.strategy).with_name('ddp.json')}",),
    ),
    "single": replace(LASTING, strategy="single", save_every=None),
}


def case_of(word):
    name, _, fault = word.partition(":")
    n_ranks = 1 if name == "single" else int(os.environ["OMPI_COMM_WORLD_SIZE"])
    return replace(CASES[name], model=f"faulty_training:{fault}", n_ranks=n_ranks)


def header(cluster, run_id, config):
    workload = run_id.split("-")[1]
    return header_of(
        [], cluster=cluster, run_id=run_id, workload=workload, key="", config=config,
        start_utc="2026", status="ok",
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


def prepare(results, cluster: Cluster, cases):
    """Write what links and profile would have: three ranks of one host."""
    names = [device.name for device in cluster.devices]
    links = links_between(names, lambda a, b: (1e-4, 1e9))
    write_header(results / "1-links-0", header(cluster, "1-links-0", {}))
    measured = msgspec.structs.replace(cluster, links=links)
    (results / "1-links-0" / CLUSTER_FILE).write_bytes(measured.to_json())
    (results / "plan.json").write_bytes(three_stages().to_json())
    graph = capture_graph(search_config_of(cases[0]))
    (results / "ddp.json").write_bytes(builders.ddp(graph, cluster, PIPELINE.batch).to_json())
    for number, case in enumerate(cases):
        write_profile(results, cluster, case, f"1-profile-{number}")


def write_profile(results, cluster, case, run_id):
    search_config = search_config_of(case)
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
    write_header(results / run_id, header(cluster, run_id, told))


def main():
    results, words = Path(sys.argv[1]), [word for word in sys.argv[2:] if word != "--resume"]
    cases = [case_of(word) for word in words]
    policies._SHORT_S = 0.1  # of each search for a plan without a rank, of which any will do
    start_fork_server(
        [
            "torch",
            "torch._dynamo",
            "harness.plan.simulate.lowering",
            "harness.run",
            "harness.workloads.train.workload",
        ]
    )
    meeting = meet(read_launch(os.environ), os.environ)
    options = RunOptions(
        results=results, run_timeout_s=240.0, collective_timeout_s=TIMEOUT_S,
        resume="--resume" in sys.argv,
    )  # fmt: skip
    launcher = Launcher(meeting, options, sys.argv)
    if meeting.world.is_first:
        planned = [case for case in cases if case.engine == "executor"]
        prepare(results, describe_cluster(launcher.ranks), planned)
    headers = launcher.run_cases(
        [Case(name="train", workload=WORKLOAD, config=case) for case in cases]
    )
    if meeting.world.is_first:
        print(" ".join(header.status for header in headers))
    meeting.leave()


if __name__ == "__main__":
    main()
    _exit(0)
