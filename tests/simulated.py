"""Hand-sized graphs, clusters and strategies for the simulator's tests."""

from made_graphs import links_between, profile_of
from msgspec.structs import replace

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.graph import Graph, Operator
from harness.domain.partition import count_parts
from harness.domain.sharding import full_shape, may_have_copies
from harness.domain.strategy import OperatorPlan, Strategy
from harness.plan.simulate.report import events
from harness.plan.simulate.simulator import Simulator

MB = 10**6


def op(name, inputs, features, parameters=0, kind="linear", **attrs):
    """A linear layer of batch 8 with a byte per element, so that bytes can be counted by eye, but
    none of an input, so that the devices that read samples hold no more than others."""
    return Operator(
        name=name,
        kind=kind,
        inputs=inputs,
        shape={"sample": 8, "feature": features},
        parameter_bytes=parameters,
        activation_bytes=8 * features * (kind != "input"),
        attrs=attrs,
    )


def model(operators, seconds=(1.0, 2.0)):
    """The graph of these behind an input `x`, and its profile: forward and backward of each or, by
    name, of one."""
    graph = Graph(name="g", batch=8, operators=[op("x", [], 4, kind="input"), *operators])
    return graph, profile_of(graph, seconds)


def row(parameters, seconds=(1.0, 2.0)):
    """Linear layers one after the other, by the bytes of their weights."""
    before = zip(("x", *parameters), parameters.items(), strict=False)
    return model([op(name, [last], 4, n_bytes) for last, (name, n_bytes) in before], seconds)


def chain():
    """x -> a (forward 1 s, backward 2 s, 32 B out, 80 B weights) -> b (2 s, 4 s, 16 B, 40 B)."""
    operators = [op("a", ["x"], 4, 80), op("b", ["a"], 2, 40)]
    return model(operators, {"a": (1.0, 2.0), "b": (2.0, 4.0)})


def cluster_of(n=2, bandwidth=16.0, latency=0.0, memory=MB, **changes):
    return Cluster.uniform(
        1, n, inside_bytes_per_s=bandwidth, memory_bytes=memory, latency_s=latency, **changes
    )


def talking(cluster, *costs_s):
    """The cluster, where each byte takes this much computation from each device."""
    devices = zip(cluster.devices, costs_s, strict=True)
    return cluster.with_devices(replace(device, host_s_per_byte=cost) for device, cost in devices)


def simulate(graph, profile, cluster, plans, *, options=None, batch=8, **flow):
    strategy = Strategy(name="s", batch=batch, operators=plans, **flow)
    return Simulator(graph, profile, cluster, options=options).simulate(strategy)


ZERO, ONE = OperatorPlan({}, [0]), OperatorPlan({}, [1])
BY_SAMPLES = OperatorPlan({"sample": 2}, [0, 1])


def simulate_chain(a, b, cluster=None, **how):
    """The chain by plans of a and b, by default on two devices."""
    return simulate(*chain(), cluster or cluster_of(), {"a": a, "b": b}, **how)


def timeline(simulation):
    return [(event.span.label, event.span.start_s, event.end_s) for event in events(simulation)]


def two_linears(n_devices, **attrs):
    """x -> a (4 features) -> b (2 features from those 4), both with weights."""
    a, b = op("a", ["x"], 4, 80, in_features=4), op("b", ["a"], 4, 40, in_features=4)
    graph, profile = model([a, b, op("c", ["b"], 4, 0)], (4.0, 8.0))
    devices = list(range(n_devices))
    plans = {
        "a": OperatorPlan({"feature": n_devices}, devices),
        "b": OperatorPlan({"contraction": n_devices}, devices),
        "c": OperatorPlan({"feature": n_devices}, devices),
    }
    return graph, profile, cluster_of(n_devices), plans


def random_case(rng, n_ops=6, n_devices=3):
    """A graph with branches, a cluster of unlike devices and links, and operators' menus."""
    operators = [op("x", [], 4, kind="input")]
    for i in range(n_ops):
        before = [o.name for o in operators[-3:]]
        inputs = rng.sample(before, k=rng.randint(1, len(before)))
        kind = rng.choice(["linear", "linear", "batch_norm", "elementwise"])
        size = 0 if kind == "elementwise" else rng.choice([0, 40, 400])
        operators.append(op(f"o{i}", inputs, 4, size, kind=kind, in_features=4))
    graph = Graph(name="random", batch=8, operators=operators)
    profile = profile_of(
        graph, {o.name: (rng.uniform(0.1, 2), rng.uniform(0.1, 4)) for o in operators[1:]}
    )
    nodes = [
        Node(
            name=f"n{i}",
            devices=[
                Device(
                    name=f"n{i}:{j}",
                    kind="device",
                    memory_bytes=MB,
                    speed=rng.choice([0.5, 1.0, 2.0]),
                )
                for j in range(1 + i % 2)
            ],
            nic_bytes_per_s=rng.choice([None, 20.0, 60.0]),
        )
        for i in range(n_devices - 1)
    ]
    names = [d.name for node in nodes for d in node.devices]
    links = links_between(names, lambda a, b: (rng.uniform(0, 0.1), rng.uniform(8, 99)))
    return graph, profile, Cluster(nodes=nodes, links=links)


def random_plan(rng, n_devices, operator=None, samples=8):
    cuts = rng.choice(
        [{}, {"sample": 2}, {"feature": 2}, {"sample": [3, 1]}, {"sample": 2, "feature": 2}]
    )
    if operator is not None:
        full = full_shape(operator, batch=samples, graph_batch=8)
        if "contraction" in full and rng.random() < 0.4:
            cuts = rng.choice([{"contraction": 3}, {"contraction": 2}, {"feature": 2}])
            if cuts == {"contraction": 3} and rng.random() < 0.7:
                return OperatorPlan(cuts, rng.sample(range(n_devices), 3))
    devices = [rng.randrange(n_devices) for _ in range(count_parts(cuts))]
    if operator is not None and may_have_copies(operator) and rng.random() < 0.6:
        if rng.random() < 0.5:
            cuts, devices = {}, [0]
        n = rng.randint(2, n_devices)
        others = [rng.sample([d for d in range(n_devices) if d != own], n - 1) for own in devices]
        devices = [d for own, more in zip(devices, others, strict=True) for d in (own, *more)]
        return OperatorPlan({**cuts, "replica": n}, devices)
    return OperatorPlan(dict(cuts), devices)
