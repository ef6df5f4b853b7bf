"""A rank's program for the tests: engines of many strategies, each of which fails on one rank.

usage: failing_engines.py RESULTS STRATEGY:PHASE:RANK...      (started by mpirun)

PHASE is building, forward or backward: of the engine, of the first step.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from made_graphs import replicated_pipeline, small_cluster
from made_runs import workload_of
from torch import fx, nn

from harness.__main__ import _exit
from harness.cases import Case
from harness.launch import Launcher
from harness.plan.builders import ddp, hybrid, tensor_parallel
from harness.runtime.capture.capture import capture
from harness.runtime.data.batch import Batch
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.ranks.environment import read_launch
from harness.runtime.ranks.isolate import start_fork_server
from harness.runtime.ranks.rendezvous import meet
from harness.workloads.common.flags import RunOptions

BATCH = 8
_phase = []


@dataclass(frozen=True, kw_only=True)
class Config:
    fault: str = ""


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("cannot go back")


@fx.wrap
def troubled(x):
    if "forward" in _phase:
        raise KeyError("cannot go on")
    return Failing.apply(x) if "backward" in _phase else x * 1.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = troubled(torch.relu(layer(x)))
        return x


def strategy_of(name, graph, n_ranks):
    whole = {"ddp": ddp, "tensor": tensor_parallel, "hybrid": hybrid}
    if name in whole:
        return whole[name](graph, small_cluster(n_ranks), BATCH)
    schedule = "1f1b" if name == "asynchronous" else name
    devices = [[rank] for rank in range(n_ranks)] * (2 if name == "interleaved" else 1)
    return replicated_pipeline(graph, BATCH, devices, schedule=schedule)


def body(config, context):
    name, phase, rank = config.fault.split(":")
    is_failing = context.world.rank == int(rank)
    inputs = (InputSpec(name="x", shape=(8,)),)
    task = Task(model=Model(), inputs=inputs, n_classes=8)
    graph = capture(task, BATCH, "model").graph
    strategy = strategy_of(name, graph, context.world.size)
    plan = ExecutorPlan(strategy=strategy, is_asynchronous=name == "asynchronous")
    optimizer = None if is_failing and phase == "building" else OptimizerOptions()
    options = EngineOptions(dtype="fp32", optimizer=optimizer)
    engine = ExecutorEngine(task, context.world, context.recorder, options, plan)
    if is_failing:
        _phase.append(phase)
    n_fed = len(engine.samples)
    batch = Batch((torch.randn(n_fed, 8),), torch.zeros(n_fed, dtype=torch.int64))
    engine.step(lambda: batch, Share(n_local=n_fed, n_global=BATCH))
    return {}


def main():
    results, *faults = sys.argv[1:]
    start_fork_server(["torch", "torch._dynamo", "harness.run", "harness.runtime.executor.engine"])
    meeting = meet(read_launch(os.environ), os.environ)
    options = RunOptions(results=Path(results), run_timeout_s=100.0)
    workload = workload_of(Config, body)
    cases = [Case(name="faulty", workload=workload, config=Config(fault=fault)) for fault in faults]
    Launcher(meeting, options, sys.argv).run_cases(cases)
    meeting.leave()


if __name__ == "__main__":
    main()
    _exit(0)
