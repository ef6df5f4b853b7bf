"""Random planning problems, small enough to enumerate all strategies."""

from __future__ import annotations

import math
import random
from itertools import product

from harness.domain.cluster import Cluster, Device, Link, Node
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.strategy import Strategy
from harness.plan.costs import PlanRequest
from harness.plan.search.mcmc import apply_plans
from harness.plan.search.objective import Objective
from harness.plan.search.space import Space
from harness.plan.simulate.simulator import Simulator, Trial

BATCH = 8


def random_graph(rng: random.Random, n_ops: int) -> Graph:
    """Layers that each read one or two of the three previous ones, with branches and joins."""
    operators = [
        Operator(
            name="x", kind="input", shape={"sample": BATCH, "feature": 4}, activation_bytes=128
        )
    ]
    for i in range(n_ops):
        before = [op.name for op in operators[-3:]]
        inputs = rng.sample(before, k=rng.randint(1, min(2, len(before))))
        kind = "add" if len(inputs) == 2 else rng.choice(["linear", "elementwise"])
        operators.append(
            Operator(
                name=f"o{i}",
                kind=kind,
                inputs=inputs,
                shape={"sample": BATCH, "feature": 4},
                parameter_bytes=rng.choice([0, 200, 1000, 4000]) if kind == "linear" else 0,
                activation_bytes=rng.choice([64, 128, 512]),
                attrs={"in_features": 4} if kind == "linear" else {},
            )
        )
    return Graph(name="random", operators=operators, batch=BATCH)


def random_cluster(rng: random.Random, n_devices: int) -> Cluster:
    """Nodes with one or two different devices, asymmetric links, and slow NICs."""
    nodes: list[Node] = []
    left = n_devices
    while left:
        n_own = min(left, rng.randint(1, 2))
        left -= n_own
        k = len(nodes)
        devices = [
            Device(
                name=f"n{k}:{j}",
                kind="device",
                memory_bytes=rng.choice([10**6, 10**6, 16_000, 9_000]),
                speed=rng.choice([0.4, 0.7, 1.0, 1.0, 2.0]),
            )
            for j in range(n_own)
        ]
        nic = rng.choice([None, 300.0, 2000.0])
        nodes.append(Node(name=f"n{k}", devices=devices, nic_bytes_per_s=nic))
    names = [device.name for node in nodes for device in node.devices]
    links = [
        Link(
            source=a,
            target=b,
            latency_s=rng.choice([0.0, 0.01, 0.1]),
            bandwidth_bytes_per_s=rng.choice([100.0, 1000.0, 10_000.0]),
        )
        for a in names
        for b in names
        if a != b
    ]
    return Cluster(nodes=nodes, links=links)


def random_request(seed: int, *, n_ops: int, n_devices: int) -> PlanRequest:
    """A random problem; equal seeds give equal problems."""
    rng = random.Random(seed)
    graph = random_graph(rng, n_ops)
    points = [
        Measurement(
            device_kind="device",
            operator=op.name,
            shape=op.shape,
            forward_s=rng.uniform(0.1, 2.0),
            backward_s=rng.uniform(0.1, 4.0),
        )
        for op in graph.operators[1:]
    ]
    return PlanRequest(
        graph=graph,
        profile=Profile(model=graph.name, measurements=points),
        cluster=random_cluster(rng, n_devices),
        batch=BATCH,
        seed=seed,
    )


def random_chain(seed: int, *, n_layers: int, n_nodes: int) -> PlanRequest:
    """Layers in a row, on nodes of one device each, of unlike speeds and NICs."""
    rng = random.Random(seed)
    kinds = [f"device of node {k}" for k in range(n_nodes)]
    speeds = [rng.uniform(0.25, 1) for _ in kinds]
    operators = [Operator(name="x", kind="input", shape={"sample": 32, "feature": 64})]
    points = []
    for k in range(n_layers):
        layer = Operator(
            name=f"fc{k}",
            kind="linear",
            inputs=[operators[-1].name],
            shape={"sample": 32, "feature": rng.choice([64, 256, 1024, 4096])},
            parameter_bytes=rng.choice([40_000, 400_000, 4_000_000]),
            attrs={"in_features": 64},
        )
        operators.append(layer)
        forward_s = rng.uniform(0.5e-3, 2e-3)
        points += [
            Measurement(
                device_kind=kind,
                operator=layer.name,
                shape=layer.shape,
                forward_s=forward_s / speed,
                backward_s=2 * forward_s / speed,
            )
            for kind, speed in zip(kinds, speeds, strict=True)
        ]
    nodes = [
        Node(
            name=f"n{k}",
            devices=[Device(name=f"n{k}:0", kind=kind, memory_bytes=2**30)],
            nic_bytes_per_s=rng.choice([1.25e7, 1.25e8, 1.25e8, 1.25e9]),
        )
        for k, kind in enumerate(kinds)
    ]
    return PlanRequest(
        graph=Graph(name="chain", operators=operators, batch=32),
        profile=Profile(model="chain", measurements=points),
        cluster=Cluster(nodes=nodes, links=[]),
        batch=32,
    )


def enumerated_step_s(request: PlanRequest) -> tuple[float, float]:
    """The minimum step of all strategies without microbatches, and the number of strategies.

    The step is infinite if no strategy fits into memory.
    """
    assert request.graph is not None
    assert request.profile is not None
    assert request.batch is not None
    simulator = Simulator(request.graph, request.profile, request.cluster)
    space = Space(simulator.costs(request.batch), request.cluster, simulator.placed)
    plans = {op: menu[0] for op, menu in space.menus.items()}
    objective = Objective(simulator)
    objective.start("enumeration")
    start = Strategy(name="s", batch=request.batch, operators=simulator.by_name(plans))
    trial = Trial(simulator, start)
    for choice in product(*space.menus.values()):  # the last operator's plans change first
        apply_plans(trial, dict(zip(space.menus, choice, strict=True)))
        objective.judge(trial)
    n_strategies = math.prod(map(len, space.menus.values()))
    return (objective.best.step_s if objective.best else math.inf), n_strategies
