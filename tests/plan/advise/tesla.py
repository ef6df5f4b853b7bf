"""The five machines of hosts/tesla.txt as one GPU of each kind and the links show them.

Steps of ViT-B/16 on one RTX 3070 are scaled by the slowness of each kind.
"""

from harness.domain.cluster import Cluster, Device, Link, Node
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, OptimizerTime, Profile

RTX_3070, P4, GTX_1070 = "NVIDIA GeForce RTX 3070", "Tesla P4", "NVIDIA GeForce GTX 1070"
KINDS = (RTX_3070, RTX_3070, RTX_3070, P4, GTX_1070)
SLOWNESS = {RTX_3070: 1.0, P4: 3.3, GTX_1070: 2.0}
N_PARAMETERS = 86_567_656
TEN_GBE, ONE_GBE = 0.97e9, 117e6
N_BLOCKS = 12
GIB = 2**30


def tesla(*, rate: float = TEN_GBE, slow_rate: float = ONE_GBE) -> Cluster:
    """Node 4 is the one on 1 Gbit/s."""
    rates = [rate, rate, rate, rate, slow_rate]
    names = [f"ecetesla{k}" for k in range(5)]
    nodes = [
        Node(
            name=name,
            devices=[Device(name=f"{name}:0", kind=kind, memory_bytes=8 * GIB)],
            nic_bytes_per_s=own,
        )
        for name, kind, own in zip(names, KINDS, rates, strict=True)
    ]
    links = [
        Link(
            source=f"{a}:0",
            target=f"{b}:0",
            latency_s=50e-6,
            bandwidth_bytes_per_s=min(rates[i], rates[j]),
        )
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if a != b
    ]
    return Cluster(nodes=nodes, links=links)


def vit(batch: int, *, bytes_per_value: int = 4) -> Graph:
    """Twelve equal blocks of 197 tokens of 768, with all parameters."""
    block = N_PARAMETERS // N_BLOCKS * bytes_per_value
    output = batch * 197 * 768 * bytes_per_value
    operators = [Operator(name="x", kind="input", inputs=[], shape={"sample": batch},
                          activation_bytes=batch * 3 * 224 * 224 * 4)]  # fmt: skip
    for k in range(N_BLOCKS):
        operators.append(
            Operator(
                name=f"block{k}",
                kind="other",
                inputs=[operators[-1].name],
                shape={"sample": batch, "feature": 197 * 768},
                parameter_bytes=block,
                activation_bytes=output,
                forward_flops=1,
                backward_flops=2,
                attrs={"block": k},
            )
        )
    return Graph(name="vit_b_16", batch=batch, operators=operators)


def vit_profile(graph: Graph, forward_s: float, backward_s: float, optimizer_s: float) -> Profile:
    """A profile scaled from one step of `graph.batch` samples on an RTX 3070."""
    points = []
    for kind, slowness in SLOWNESS.items():
        for operator in graph.operators[1:]:
            points.append(
                Measurement(
                    device_kind=kind,
                    operator=operator.profile_key,
                    shape=operator.shape,
                    forward_s=slowness * forward_s / N_BLOCKS,
                    backward_s=slowness * backward_s / N_BLOCKS,
                )
            )
    unique = {point.key: point for point in points}
    n_bytes = sum(operator.parameter_bytes for operator in graph.operators)
    optimizers = [
        OptimizerTime(
            device_kind=kind, optimizer="adamw", s_per_byte=slowness * optimizer_s / n_bytes
        )
        for kind, slowness in SLOWNESS.items()
    ]
    return Profile(
        model=graph.name,
        measurements=list(unique.values()),
        optimizers=optimizers,
        provenance={"source": "measured"},
    )
