"""Runs of five unlike nodes, written through the store as ranks write them.

`comparison` holds runs of every workload, `planned` runs of strategies that were simulated.
"""

import itertools
import random
from typing import Any

import msgspec
import pytest
from made_runs import cluster_of, header_of

from harness.domain.cluster import Cluster, Link
from harness.domain.graph import Graph, Operator
from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.profile import Measurement, Profile
from harness.domain.record import Record, Sample, Span
from harness.domain.run import run_key
from harness.measure.store import RecordWriter, write_header
from harness.plan import builders
from harness.plan.bottleneck import balance
from harness.plan.simulate.report import spans as simulated_spans
from harness.plan.simulate.simulator import Simulator

GPU = "NVIDIA GeForce RTX 3070"
NIC = 1.25e8
SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.8)
PEAK = 1.6e13


def make_cluster(n, nic_bytes_per_s=NIC, kind=GPU):
    hosts = [f"tesla{i}" for i in range(n)]
    return cluster_of(hosts, kind=kind, nic_bytes_per_s=nic_bytes_per_s)


def make_header(workload, config, cluster, **more):
    values = {
        "workload": workload, "key": run_key(workload, config, cluster),
        "argv": ["entry.sh", workload], "config": config, "versions": {"torch": "2.13.0"},
        "commit": "0123456789abcdef", "status": "ok", "backend": "nccl", "duration_s": 12.0,
    }  # fmt: skip
    info = {"n_cores": 8, "interface": "eth0", "peak_flops_per_s": {"fp32": 2.03e13}}
    hosts = [node.name for node in cluster.nodes]
    return header_of(hosts, cluster=cluster, info=info, **(values | more))


def write_run(root, header, records):
    write_header(root / header.run_id, header)
    for rank, of_rank in records.items():
        writer = RecordWriter(root / header.run_id, rank)
        writer.write(of_rank)
        writer.close()
    return root / header.run_id


def train_config(strategy, global_batch, model="resnet50"):
    return {
        "strategy": strategy,
        "model": model,
        "dtype": "fp32",
        "dataset": "synthetic",
        "global_batch": global_batch,
    }


def training_records(n_ranks, global_batch, compute_s, exposed_s, *, seed=0):
    """Forty steps: data, forward, backward, buckets half hidden, optimizer; one outlier."""
    source = random.Random(seed)
    noise = [source.gauss(1, 0.01) for _ in range(40)]
    noise[20] = 1.9
    records: dict[int, list[Record]] = {}
    for rank in range(n_ranks):
        of_rank: list[Record] = []
        at = 0.0
        for step, factor in enumerate(noise):
            lengths = {
                "data": 0.002 * factor,
                "host_to_device": 0.001 * factor,
                "forward": compute_s / 3 * factor,
                "backward": compute_s * 2 / 3 * factor,
                "communication": exposed_s * factor,
                "optimizer": 0.004 * factor,
            }
            begin = at
            for kind, length in lengths.items():
                is_hidden = kind == "communication"
                start = at - length / 2 if is_hidden and length else at
                whole = at + length - start
                if length:
                    of_rank.append(
                        Span(kind=kind, step=step, start_s=start, duration_s=whole)  # type: ignore[arg-type]
                    )
                at += length
            of_rank.append(Span(kind="step", step=step, start_s=begin, duration_s=at - begin))
            of_rank += [
                Sample(metric="n_samples", value=global_batch / n_ranks, step=step),
                Sample(metric="n_synchronisations", value=5, step=step),
                Sample(metric="model_flops", value=2.5e10 * global_batch / n_ranks, step=step),
                Sample(metric="loss", value=7 - 0.01 * step, step=step),
            ]
        for kind, gib in (("allocated", 3.1), ("reserved", 3.6)):
            value = (gib + 0.1 * rank) * 2**30
            of_rank.append(Sample(metric="memory_peak_bytes", value=value, labels={"kind": kind}))
        for i in range(20):
            for metric, value in (
                ("device_utilization_percent", 90 - source.random() * 20),
                ("device_temperature_c", 55 + rank + i / 4),
            ):
                labels: dict[str, Any] = {"device": "cuda:0"}
                of_rank.append(Sample(metric=metric, value=value, labels=labels, time_s=i * 1.0))
        records[rank] = of_rank
    return records


def matmul_records(n_ranks=5):
    records: dict[int, list[Record]] = {}
    for rank in range(n_ranks):
        of_rank: list[Record] = []
        for dtype, factor in (("fp32", 1.0), ("bf16", 2.5)):
            for n in (256, 512, 1024, 2048, 4096):
                rate = PEAK * factor * SPEEDS[rank] * n / (n + 400)
                labels: dict[str, Any] = {"m": n, "n": n, "k": n, "dtype": dtype}
                of_rank += [
                    Sample(metric="matmul_s", value=2 * n**3 / rate * f, labels=labels, step=i)
                    for i, f in enumerate((1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 1.0, 0.98, 1.0))
                ]
        for scaling, size in (("strong", 4096), ("weak", 8192)):
            labels = {"m": size, "n": size, "k": size, "dtype": "fp32", "scaling": scaling}
            whole = 2 * size**3 / (PEAK * sum(SPEEDS[:n_ranks]) * 0.7)
            for i in range(5):
                for metric, share in (
                    ("summa_s", 1.0),
                    ("summa_compute_s", 0.75),
                    ("summa_communication_s", 0.5),
                    ("summa_exposed_communication_s", 0.2),
                ):
                    value = whole * share * (1 - 0.01 * rank)
                    of_rank.append(Sample(metric=metric, value=value, labels=labels, step=i))
        for metric, rate in (("memory_copy_s", 4e11), ("memory_triad_s", 6e11)):
            labels = {"n_bytes": 2**28}
            value = 2**28 / (rate * SPEEDS[rank])
            of_rank += [Sample(metric=metric, value=value, labels=labels, step=i) for i in range(5)]
        records[rank] = of_rank
    return records


def links_records(n_ranks=5, bandwidth=1.17e8):
    records: dict[int, list[Record]] = {rank: [] for rank in range(n_ranks)}
    sizes = [2**k for k in range(10, 25, 2)]
    for operation, factor in (("all_reduce", 1.6), ("all_gather", 0.8), ("broadcast", 1.0)):
        for transport, latency in (("nccl", 3e-4), ("mpi", 2e-4)):
            for n_bytes in sizes:
                labels: dict[str, Any] = {
                    "operation": operation,
                    "transport": transport,
                    "n_bytes": n_bytes,
                }
                for i in range(9):
                    value = (latency + n_bytes * factor / bandwidth) * (1 + 0.01 * i)
                    for rank in records:
                        records[rank].append(
                            Sample(metric="collective_s", value=value, labels=labels, step=i)
                        )
    for source in range(n_ranks):
        for target in range(n_ranks):
            if source != target:
                # The last node hangs on a slower port.
                rate = bandwidth * (0.5 if n_ranks - 1 in (source, target) else 1)
                pair: dict[str, Any] = {"source": source, "target": target, "transport": "nccl"}
                records[source] += [
                    Sample(metric="link_latency_s", value=1.5e-4, labels=pair),
                    Sample(
                        metric="link_transfer_s",
                        value=2**24 / rate,
                        labels=pair | {"n_bytes": 2**24},
                    ),
                ]
    return records


def fill(root):
    """The whole comparison: 11 runs on five nodes and on one of them, one out of memory."""
    five, one = make_cluster(5), make_cluster(1)
    write_run(root, make_header("matmul", {}, five, run_id="matmul"), matmul_records())
    write_run(root, make_header("links", {}, five, run_id="links"), links_records())
    single = make_header("train", train_config("single", 32), one, run_id="single")
    write_run(root, single, training_records(1, 32, 0.1, 0.0))
    for repeat in range(3):
        for strategy, batch, exposed in (("ddp", 32, 0.09), ("ddp", 160, 0.09)):
            header = make_header(
                "train",
                train_config(strategy, batch),
                five,
                run_id=f"{strategy}-{batch}-{repeat}",
                repeat=repeat,
            )
            compute_s = 0.1 * batch / 160
            records = training_records(5, batch, compute_s, exposed, seed=repeat)
            write_run(root, header, records)
    header = make_header("train", train_config("pipeline", 160), five, run_id="pipeline")
    write_run(root, header, training_records(5, 160, 0.12, 0.03))
    header = make_header(
        "train",
        train_config("ddp", 640),
        five,
        run_id="too-large",
        status="oom",
        reason="CUDA out of memory on rank 3: tried to allocate 2.4 GiB",
    )
    write_run(root, header, {})
    return root


# A chain of long names; forward milliseconds of 160 samples, backward takes twice as long.
CHAIN_MS = {f"features.{i}.convolution_with_a_long_name": 4.0 + i % 3 for i in range(12)}
CHAIN_BATCH = 160


def chain_graph():
    def operator(name, inputs, kind="linear"):
        shape = {"sample": CHAIN_BATCH, "feature": 512}
        n_bytes = CHAIN_BATCH * 512 * 4
        weights = 0 if kind == "input" else 2**20
        return Operator(
            name=name,
            kind=kind,
            inputs=inputs,
            shape=shape,
            activation_bytes=n_bytes,
            parameter_bytes=weights,
        )

    names = ["images", *CHAIN_MS]
    rest = [operator(name, [before]) for before, name in itertools.pairwise(names)]
    return Graph(
        name="vgg16", batch=CHAIN_BATCH, operators=[operator("images", [], "input"), *rest]
    )


def chain_profile():
    return Profile(
        model="vgg16",
        measurements=[
            Measurement(
                device_kind=GPU,
                operator=name,
                shape={"sample": samples, "feature": 512},
                forward_s=ms * 1e-3 * samples / CHAIN_BATCH,
                backward_s=2e-3 * ms * samples / CHAIN_BATCH,
            )
            for name, ms in CHAIN_MS.items()
            for samples in (1, CHAIN_BATCH)
        ],
    )


def linked_cluster(n):
    cluster = make_cluster(n)
    names = [device.name for device in cluster.devices]
    links = [
        Link(source=a, target=b, latency_s=1e-4, bandwidth_bytes_per_s=NIC)
        for a, b in itertools.permutations(names, 2)
    ]
    return Cluster(nodes=cluster.nodes, links=links)


def chain_strategies(cluster):
    """Data parallel, five stages, and three stages of 2, 2 and 1 replicas with recomputation."""
    graph, names = chain_graph(), list(CHAIN_MS)
    thirds, fifths = (
        [
            names[a:b]
            for a, b in itertools.pairwise((0, *balance([[*CHAIN_MS.values()]] * n, n).ends))
        ]
        for n in (3, 5)
    )
    return {
        "ddp": builders.ddp(graph, cluster, CHAIN_BATCH),
        "pipeline": builders.pipeline(
            graph, CHAIN_BATCH, fifths, [[d] for d in range(5)], n_microbatches=8
        ),
        "searched": builders.pipeline(
            graph,
            CHAIN_BATCH,
            thirds,
            [[0, 1], [2, 3], [4]],
            n_microbatches=8,
            recompute=True,
            name="searched",
        ),
    }


def predict(strategy, cluster):
    simulation = Simulator(chain_graph(), chain_profile(), cluster).simulate(strategy)
    return Prediction(
        strategy=strategy.name,
        method="builder",
        step_s=simulation.step_s,
        memory_bytes=simulation.memory_bytes,
        spans={str(rank): own for rank, own in simulated_spans(simulation).items()},
        profile_fit_error=0.02,
    )


def executed(strategy, prediction, stretch, n_ranks, *, n_steps=9):
    """What an executor would record, were every task `stretch` times as long as predicted.

    Clock of rank r stands 1000 r seconds apart, known to 0.1 r milliseconds; every rank loads
    data for a millisecond, and steps differ by per mille.
    """
    records: dict[int, list[Record]] = {}
    for rank, spans in ((int(key), spans) for key, spans in prediction.spans.items()):
        own: list[Record] = [
            Sample(metric="clock_offset_s", value=1000.0 * rank),
            Sample(metric="clock_offset_error_s", value=1e-4 * rank),
            Sample(metric="memory_peak_bytes", value=2.0**30 + rank, labels={"kind": "allocated"}),
        ]
        for step in range(n_steps):
            factor = stretch * (1 + 0.001 * ((step * 4) % n_steps))
            origin = 1000.0 * rank + 10.0 + step
            own += [
                msgspec.structs.replace(
                    span,
                    step=step,
                    start_s=origin + (0.0 if span.kind == "step" else 1e-3) + span.start_s * factor,
                    duration_s=span.duration_s * factor + (1e-3 if span.kind == "step" else 0.0),
                )
                for span in executor_spans(strategy, spans)
            ]
            begin_s = next(span.start_s for span in spans if span.kind == "step") * factor
            own.append(Span(kind="data", step=step, start_s=origin + begin_s, duration_s=1e-3))
            own.append(Sample(metric="n_samples", value=CHAIN_BATCH / n_ranks, step=step))
        records[rank] = own
    return records


def executor_spans(strategy, spans):
    """Operators of a pass brought together as one of the stage; gaps in between are waits."""
    passes: dict[tuple[str, int | None, int, str | None], list[Span]] = {}
    others = []
    for span in spans:
        if span.kind in ("forward", "backward"):
            key = (span.kind, span.stage, span.microbatch or 0, span.pass_)
            passes.setdefault(key, []).append(span)
        elif span.kind != "communication":
            others.append(span)
        elif span.name.startswith("all-reduce"):
            others.append(msgspec.structs.replace(span, name=f"bucket{len(others)}"))
    work = [
        Span(
            kind=kind,  # type: ignore[arg-type]
            stage=stage,
            microbatch=microbatch,
            pass_=pass_,  # type: ignore[arg-type]
            start_s=start,
            duration_s=stop - start,
        )
        for (kind, stage, microbatch, pass_), own in passes.items()
        for start, stop in [(own[0].start_s, own[-1].start_s + own[-1].duration_s)]
    ]
    begin_s = next(span.start_s for span in spans if span.kind == "step")
    origin = Span(kind="step", start_s=begin_s, duration_s=0.0)
    work = [origin, *sorted(work, key=lambda span: span.start_s)]
    waits = [
        Span(
            kind="communication",
            operator="features.3.convolution_with_a_long_name",
            microbatch=0,
            pass_="forward",
            peer=1,
            is_wait=True,
            start_s=a.start_s + a.duration_s,
            duration_s=b.start_s - a.start_s - a.duration_s,
        )
        for a, b in itertools.pairwise(work)
        if b.start_s > a.start_s + a.duration_s + 1e-9
    ]
    return [*work[1:], *waits, *others]


def write_planned(root, name, strategy, prediction, *, repeat=0, stretch=1.0, n_ranks=5):
    """A run with its strategy and prediction; it ran out of memory when `stretch` is None."""
    config = train_config(name, CHAIN_BATCH, "vgg16")
    more: dict[str, Any] = {"run_id": f"{name}-{repeat}", "repeat": repeat}
    if stretch is None:
        more |= {"status": "oom", "reason": "rank 4: tried to allocate 9 GiB"}
    header = make_header("train", config, make_cluster(n_ranks), **more)
    records = {} if stretch is None else executed(strategy, prediction, stretch, n_ranks)
    path = write_run(root, header, {k: own for k, own in records.items() if k < n_ranks})
    (path / STRATEGY_FILE).write_bytes(strategy.to_json())
    (path / PREDICTION_FILE).write_bytes(prediction.to_json())
    return path


# How much longer than predicted the tasks of each strategy took.
STRETCH = {"ddp": 1.05, "pipeline": 1.1, "searched": 1.3}


def fill_planned(root):
    """Three strategies on five nodes, ddp twice; one on a device alone, one out of memory, and one
    that nobody predicted."""
    cluster = linked_cluster(5)
    strategies = chain_strategies(cluster)
    for name, strategy in strategies.items():
        prediction = predict(strategy, cluster)
        for repeat in range(2 if name == "ddp" else 1):
            stretch = STRETCH[name] + 0.02 * repeat
            write_planned(root, name, strategy, prediction, repeat=repeat, stretch=stretch)
    single = builders.single(chain_graph(), CHAIN_BATCH)
    alone = predict(single, cluster)
    write_planned(root, "single", single, alone, n_ranks=1)
    write_planned(root, "tensor", strategies["ddp"], alone, stretch=None)
    header = make_header("train", train_config("ddp", 32), make_cluster(5), run_id="unplanned")
    write_run(root, header, training_records(5, 32, 0.1, 0.05))
    return root


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    """The directory of `fill_planned`; tests must not write into it."""
    return fill_planned(tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """The directory of `fill`; tests must not write into it."""
    return fill(tmp_path_factory.mktemp("results"))


@pytest.fixture
def write():
    return write_run


@pytest.fixture
def header():
    return make_header


@pytest.fixture
def cluster():
    return make_cluster


@pytest.fixture
def trained():
    return training_records


@pytest.fixture
def configured():
    return train_config


@pytest.fixture
def linked():
    return links_records


@pytest.fixture
def multiplied():
    return matmul_records
