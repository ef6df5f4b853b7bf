"""The simulator gathers the units of sharded weights that the executor gathers."""

from dataclasses import replace

import msgspec
import pytest
import torch
from equivalence_cases import random_case
from equivalence_ranks import local_world
from equivalence_training import options_of, plan_of
from torch import nn

from harness.domain.cluster import Cluster
from harness.domain.strategy import Strategy
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator, Trial
from harness.runtime.capture.capture import capture
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.lowered import lower_strategy
from harness.runtime.executor.sharded.replicas import Replicas
from harness.runtime.executor.sharded.units import find_units
from harness.runtime.executor.state.weights import Holders, Use


def simulated(graph, strategy, n_ranks, bucket_bytes):
    """The units by the simulator, on nodes of two devices."""
    cluster = Cluster.uniform(3, 2, inside_bytes_per_s=1e9, memory_bytes=1, kind="cpu")
    rates = {"cpu": DeviceRates(flops_per_s=1e9, memory_bytes_per_s=1e9)}
    profile = roofline_profile(graph, rates, n_parts=[1])
    options = SimulatorOptions(bucket_bytes=bucket_bytes)
    simulator = Simulator(graph, profile, cluster.part(range(n_ranks)), options=options)
    units = Trial(simulator, strategy).lowered().gathered
    return {(unit.devices, unit.operators, unit.n_bytes) for unit in units}


# Of models in which the executor gathers no operator.
@pytest.mark.parametrize("index", [1, 2, 3, 8])
def test_units_are_equal_in_simulator_and_executor(index):
    case = random_case(77, index)
    schedule = "1f1b" if case.strategy.schedule == "zero_bubble" else case.strategy.schedule
    state = "parameters" if index % 2 else "parameters_in_node"
    strategy = msgspec.structs.replace(case.strategy, shard_state=state, schedule=schedule)
    case = msgspec.structs.replace(case, strategy=strategy, is_asynchronous=False)
    task = case.make_task()
    captured = capture(task, strategy.batch, "model")
    meta = MetaModel(captured, task.inputs, torch.device("cpu"))
    for bucket_bytes in (1 << 6, 1 << 12, 1 << 20):
        options = replace(options_of(case), bucket_bytes=bucket_bytes)
        world = local_world(0, case.n_ranks)
        units = lower_strategy(captured, meta, plan_of(case), world, options).units
        executed = {
            (unit.devices, unit.operators, unit.n_bytes) for unit, _, _ in units if unit.is_alike
        }
        assert simulated(captured.graph, strategy, case.n_ranks, bucket_bytes) == executed


HALVES = (torch.float16, torch.bfloat16)


def test_a_unit_has_weights_of_one_dtype():
    """Small slices travel as one tensor."""
    model = nn.ParameterDict(
        {str(k): torch.zeros(4, dtype=dtype) for k, dtype in enumerate(HALVES)}
    )
    holders = Holders(model)
    for position, (name, tensor) in enumerate(model.items()):
        for device in (0, 1):
            holders.add([WeightSlice.whole(name, tensor)], Use(device, 0, position))
    strategy = Strategy(name="s", batch=2, operators={}, shard_state="optimizer")
    replicas = Replicas(strategy, local_world(0, 2))
    found = find_units(holders, strategy, replicas, 1 << 20, {}, lambda piece: False)
    assert [[piece.name for piece in plan.pieces] for plan in found] == [["0"], ["1"]]
