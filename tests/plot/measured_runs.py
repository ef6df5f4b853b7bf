"""Runs of every workload on five unlike nodes, written through the store as ranks write them."""

import random
import shutil
from pathlib import Path

from made_runs import cluster_of, header_of

from harness.domain.record import Sample, Span
from harness.domain.run import run_key
from harness.measure.store import RecordWriter, find_runs, write_header
from harness.plot.catalog import read_catalog
from harness.plot.figures import load_figure

GPU = "NVIDIA GeForce RTX 3070"
NIC = 1.25e8
SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.8)
PEAK = 1.6e13


def make_cluster(n, nic_bytes_per_s=NIC, kind=GPU):
    hosts = [f"tesla{i}" for i in range(n)]
    return cluster_of(hosts, kind=kind, nic_bytes_per_s=nic_bytes_per_s)


def make_header(workload, config, cluster, settings=None, **more):
    values = {
        "workload": workload, "key": run_key(workload, config, cluster),
        "argv": ["entry.sh", workload], "config": config, "versions": {"torch": "2.13.0"},
        "commit": "0123456789abcdef", "status": "ok", "backend": "nccl", "duration_s": 12.0,
    }  # fmt: skip
    info = {"n_cores": 8, "interface": "eth0", "peak_flops_per_s": {"fp32": 2.03e13},
            "settings": settings or {}}  # fmt: skip
    hosts = [node.name for node in cluster.nodes]
    return header_of(hosts, cluster=cluster, info=info, **(values | more))


def add_records(run_dir, records, rank=0):
    writer = RecordWriter(run_dir, rank)
    writer.write(records)
    writer.close()


def write_run(root, header, records):
    write_header(root / header.run_id, header)
    for rank, of_rank in records.items():
        add_records(root / header.run_id, of_rank, rank)
    return root / header.run_id


def train_config(strategy, global_batch, model="resnet50", **more):
    return {
        "strategy": strategy,
        "model": model,
        "dtype": "fp32",
        "dataset": "synthetic",
        "global_batch": global_batch,
        **more,
    }


def write_training(root, run_id, config, cluster, compute_s=0.1, exposed_s=0.1, *, seed=0, **more):
    """A training on every device of a cluster; `more` are fields of its header."""
    header = make_header("train", config, cluster, run_id=run_id, **more)
    n, batch = cluster.n_devices, config["global_batch"]
    return write_run(root, header, training_records(n, batch, compute_s, exposed_s, seed=seed))


def copies(source, root, *names):
    """Copies of runs of a directory, in another one."""
    for name in names:
        shutil.copytree(source / name, root / name)
    return root


def catalog_of(root):
    return read_catalog(*find_runs(root))


def table_of(name, catalog):
    """A figure's table, of a catalog or of a directory of runs."""
    return load_figure(name).table(catalog_of(catalog) if isinstance(catalog, Path) else catalog)


def training_records(n_ranks, global_batch, compute_s, exposed_s, *, seed=0):
    """Forty steps: data, forward, backward, buckets half hidden, optimizer; one outlier."""
    source = random.Random(seed)
    noise = [source.gauss(1, 0.01) for _ in range(40)]
    noise[20] = 1.9
    records = {}
    for rank in range(n_ranks):
        of_rank = []
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
                    of_rank.append(Span(kind=kind, step=step, start_s=start, duration_s=whole))
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
        labels = {"device": "cuda:0"}
        for i in range(20):
            for metric, value in (
                ("device_utilization_percent", 90 - source.random() * 20),
                ("device_temperature_c", 55 + rank + i / 4),
            ):
                of_rank.append(Sample(metric=metric, value=value, labels=labels, time_s=i * 1.0))
        records[rank] = of_rank
    return records


def matmul_records(n_ranks=5):
    records = {}
    for rank in range(n_ranks):
        of_rank = []
        for dtype, factor in (("fp32", 1.0), ("bf16", 2.5)):
            for n in (256, 512, 1024, 2048, 4096):
                rate = PEAK * factor * SPEEDS[rank] * n / (n + 400)
                labels = {"m": n, "n": n, "k": n, "dtype": dtype}
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
    records = {rank: [] for rank in range(n_ranks)}
    sizes = [2**k for k in range(10, 25, 2)]
    for operation, factor in (("all_reduce", 1.6), ("all_gather", 0.8), ("broadcast", 1.0)):
        for transport, latency in (("nccl", 3e-4), ("mpi", 2e-4)):
            for n_bytes in sizes:
                labels = {"operation": operation, "transport": transport, "n_bytes": n_bytes}
                for i in range(9):
                    value = (latency + n_bytes * factor / bandwidth) * (1 + 0.01 * i)
                    sample = Sample(metric="collective_s", value=value, labels=labels, step=i)
                    for of_rank in records.values():
                        of_rank.append(sample)
    for source in range(n_ranks):
        for target in range(n_ranks):
            if source != target:
                # The last node hangs on a slower port.
                rate = bandwidth * (0.5 if n_ranks - 1 in (source, target) else 1)
                pair = {"source": source, "target": target, "transport": "nccl"}
                sized = pair | {"n_bytes": 2**24}
                records[source] += [
                    Sample(metric="link_latency_s", value=1.5e-4, labels=pair),
                    *[Sample(metric="link_transfer_s", value=2**24 / rate, labels=sized)] * 3,
                ]
    return records


def fill(root):
    """The whole comparison: 11 runs on five nodes and on one of them, one out of memory."""
    five, one = make_cluster(5), make_cluster(1)
    write_run(root, make_header("matmul", {}, five, run_id="matmul"), matmul_records())
    write_run(root, make_header("links", {}, five, run_id="links"), links_records())
    write_training(root, "single", train_config("single", 32), one, 0.1, 0.0)
    for repeat in range(3):
        for batch in (32, 160):
            config, name = train_config("ddp", batch), f"ddp-{batch}-{repeat}"
            compute_s = 0.1 * batch / 160
            write_training(root, name, config, five, compute_s, 0.09, seed=repeat, repeat=repeat)
    write_training(root, "pipeline", train_config("pipeline", 160), five, 0.12, 0.03)
    reason = "CUDA out of memory on rank 3: tried to allocate 2.4 GiB"
    failed = {"run_id": "too-large", "status": "oom", "reason": reason}
    write_run(root, make_header("train", train_config("ddp", 640), five, **failed), {})
    return root
