"""Runs a workload's body on n ranks of this machine, joined by gloo: no MPI, no launcher."""

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from made_runs import local_header, world_of
from waiting import start_and_join

from harness.errors import HarnessError
from harness.measure.recorder import Recorder
from harness.measure.store import RecordWriter, Run, read_header, read_run, write_header
from harness.runtime.devices.sampling import clock_for
from harness.runtime.ranks.world import Context, Progress
from harness.workloads import WORKLOADS, workload_module


def _rank(
    rank: int, size: int, directory: str, function: Callable[..., Any], argument: Any
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # collecting among all that was imported takes long
    gc.set_threshold(20_000)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    run_dir = Path(directory) / "run"
    world = world_of(rank, size)
    recorder = Recorder(clock_for(world.device))
    writer = RecordWriter(run_dir, rank)
    context = Context(
        world=world, recorder=recorder, writer=writer, progress=Progress(is_shown=False),
        run_dir=run_dir,
    )  # fmt: skip
    recorder.sample("clock_offset_s", 0.0)  # as in every run, so that no rank has an empty file
    result = function(argument, context)
    writer.write(recorder.collect())
    writer.close()
    torch.save(result, f"{directory}/result{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run_on_ranks(
    function: Callable[[Any, Context], Any],
    argument: Any,
    size: int,
    beside: Callable[[Path], None] = lambda results: None,
) -> tuple[list[Any], Run]:
    """What each rank returned, and the run as read back; `function` must be importable.

    Args:
        beside: fills the directory of results before the run.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_header(Path(directory) / "run", local_header([f"node{i}" for i in range(size)]))
        beside(Path(directory))
        # Forks of a server that has imported torch: seconds less than a fresh interpreter each.
        context = multiprocessing.get_context("forkserver")
        workloads = [workload_module(name) for name in WORKLOADS]
        modules = ["torch", "torch._dynamo", "torch.distributed", "harness.plan.simulate.lowering"]
        context.set_forkserver_preload([*modules, *workloads])
        start_and_join(context, _rank, size, directory, function, argument)
        results = [torch.load(f"{directory}/result{rank}") for rank in range(size)]
        run_dir = Path(directory) / "run"
        run, skipped = read_run(run_dir, read_header(run_dir))
        assert not skipped, skipped
        return results, run


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Of tensors of the same names."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def refusal_of(act: Callable[..., object], *arguments: Any) -> str:
    """The text of the error that an act ends with."""
    try:
        act(*arguments)
    except HarnessError as error:
        return str(error)
    return "not refused"


def matmul_beside_a_slow_rank(configs: list[Any], context: Context) -> list[dict[str, Any]]:
    """Run matmul where rank 1 takes longer than a collective may."""
    from harness.workloads.matmul import workload as matmul

    measure = matmul._measure_device

    def slowly(config: Any, context: Context) -> Any:
        time.sleep(1.5 * context.world.rank)
        return measure(config, context)

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    with mock.patch.object(matmul, "_measure_device", slowly):
        found = [matmul.run_matmul(config, context) for config in configs]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60))
    return found


def matmul_with_a_wrong_block(config: Any, context: Context) -> str:
    """Distribute one product whose block on rank 1 is spoiled; returns the error's text."""
    from harness.workloads.matmul.scaling import DistributedProduct, _RankPart, measure_point

    multiply = _RankPart.multiply

    def spoil(self: _RankPart, repeat: int) -> float:
        duration_s = multiply(self, repeat)
        if context.world.rank == 1:
            self._summa.c[-1, -1] += 0.1
        return duration_s

    product = DistributedProduct(scaling="strong", n_ranks=2, size=64)
    with mock.patch.object(_RankPart, "multiply", spoil):
        return refusal_of(measure_point, product, "fp32", [1.0, 1.0], context, 1)


def matmul_with_little_memory(config: Any, context: Context) -> str:
    """Multiply where rank 1's device has 256 MiB; the refusal."""
    from harness.workloads.matmul.workload import run_matmul

    n_bytes = 1 << 28 if context.world.rank == 1 else context.world.memory_bytes
    world = replace(context.world, memory_bytes=n_bytes)
    return refusal_of(run_matmul, config, replace(context, world=world))


def refused_products(config: Any, context: Context) -> dict[str, str]:
    """The refusals of both, of one launch."""
    return {
        "memory": matmul_with_little_memory(config, context),
        "block": matmul_with_a_wrong_block(config, context),
    }


def links_with_cluster(config: Any, context: Context) -> str:
    """Run links with short samples of the overhead; rank 0's text of the results' cluster file."""
    from harness.workloads.links import overhead
    from harness.workloads.links.workload import run_links

    with mock.patch.multiple(overhead, _SAMPLE_S=0.05, _N_SAMPLES=3):
        run_links(config, context)
    path = context.run_dir.parent / "cluster.json"
    return path.read_text() if context.world.is_first else ""


def links_beside_a_cluster(configs: list[Any], context: Context) -> list[str]:
    """Run links; after each the cluster file of all runs on rank 0, which begins as `known`."""
    from harness.workloads.links.workload import run_links

    shared, found = context.run_dir.parent / "cluster.json", []
    for config in configs:
        if context.world.is_first:
            shared.write_text("known")
        run_links(config, context)
        found.append(shared.read_text() if context.world.is_first else "")
    return found


def _disturbed_pairs(
    disturb: Callable[[torch.Tensor], object], sizes: list[int], context: Context, longest_s: float
) -> Any:
    """Measure pairs where each message that has arrived at rank 1 is disturbed."""
    from harness.runtime.devices.sampling import Budget
    from harness.workloads.links.operations import TorchTransport
    from harness.workloads.links.pairs import Limits, measure_pairs

    class Disturbed(TorchTransport):
        def receive(self, data: torch.Tensor, source: int) -> None:
            super().receive(data, source)
            if self.rank == 1 and len(data) > 1:
                disturb(data)

    transport = Disturbed.of(context.world, context.recorder.clock)
    limits = Limits(budget=Budget(time_s=0.001, n_min=3, n_warm_up=1), longest_s=longest_s)
    return measure_pairs(sizes, transport, context, limits)


def corrupted_pairs(config: Any, context: Context) -> str:
    """Measure pairs where rank 1 receives a wrong element; the error's text."""
    return refusal_of(_disturbed_pairs, lambda data: data[-1].add_(1), [1 << 10], context, 1.0)


def slow_pairs(config: Any, context: Context) -> Any:
    """Measure pairs where messages to rank 1 take too long; times, and what was left out."""
    sizes = [1021, 1 << 10, 1 << 12, 1 << 14]
    found, left_out = _disturbed_pairs(lambda data: time.sleep(0.3), sizes, context, 0.2)
    return {pair: times.transfers for pair, times in found.items()}, left_out


def copy_shards(hostnames: list[str], context: Context) -> list[str]:
    """Copy each rank's shard of 1500 bytes and more to a second host, where every rank but the last
    has a disk of its own; the last rank shares rank 0's. Returns the shards on this rank's disk."""
    from harness.workloads.train import saves

    saves._BLOCK_BYTES = 1000
    rank = context.world.rank
    disk = context.run_dir / f"disk{rank % (context.world.size - 1)}"
    disk.mkdir(exist_ok=True)
    data = {f"shard{k}": bytes([k]) * (1500 + 700 * k) for k in range(context.world.size)}
    (disk / f"shard{rank}").write_bytes(data[f"shard{rank}"])
    dist.barrier()
    saves.copy_to_second_host([disk / name for name in data], hostnames, dist.group.WORLD)
    dist.barrier()
    return sorted(path.name for path in disk.iterdir() if path.read_bytes() == data[path.name])
