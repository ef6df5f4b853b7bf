"""Runs of strategies that were simulated, with the tasks of a step stretched."""

import itertools

import msgspec
from made_graphs import links_between
from measured_runs import (
    GPU,
    NIC,
    make_cluster,
    make_header,
    train_config,
    write_run,
    write_training,
)

from harness.domain.checkpoints import with_recomputation
from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.profile import Measurement, Profile
from harness.domain.record import Sample, Span
from harness.plan import builders
from harness.plan.bottleneck import balance
from harness.plan.simulate.report import spans as simulated_spans
from harness.plan.simulate.simulator import Simulator

# A chain of long names; forward milliseconds of 160 samples, backward takes twice as long.
CHAIN_MS = {f"features.{i}.convolution_with_a_long_name": 4.0 + i % 3 for i in range(12)}
CHAIN_BATCH = 160


def chain_graph():
    def operator(name, inputs, kind="linear"):
        return Operator(
            name=name, kind=kind, inputs=inputs, shape={"sample": CHAIN_BATCH, "feature": 512},
            activation_bytes=CHAIN_BATCH * 512 * 4, parameter_bytes=2**20 * (kind != "input"),
        )  # fmt: skip

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
    links = links_between(names, lambda a, b: (1e-4, NIC))
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
    searched = builders.pipeline(
        graph, CHAIN_BATCH, thirds, [[0, 1], [2, 3], [4]], n_microbatches=8, name="searched"
    )
    return {
        "ddp": builders.ddp(graph, cluster, CHAIN_BATCH),
        "pipeline": builders.pipeline(
            graph, CHAIN_BATCH, fifths, [[d] for d in range(5)], n_microbatches=8
        ),
        "searched": with_recomputation(searched, graph, 1),
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
    records = {}
    for rank, spans in ((int(key), spans) for key, spans in prediction.spans.items()):
        own = [
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
    passes = {}
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
            kind=kind,
            stage=stage,
            microbatch=microbatch,
            pass_=pass_,
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
    more = {"run_id": f"{name}-{repeat}", "repeat": repeat}
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
    write_training(root, "unplanned", train_config("ddp", 32), make_cluster(5), 0.1, 0.05)
    return root
