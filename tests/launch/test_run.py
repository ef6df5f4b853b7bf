"""What one rank makes of an error in its part of a run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from harness.run import RunSpec, run_case
from harness.runtime.ranks.world import World


def out_of_memory(config: object, context: object) -> dict[str, object]:
    raise MemoryError


def test_an_error_that_says_nothing_is_named_by_its_type(tmp_path: Path) -> None:
    world = World(
        rank=0, size=1, local_rank=0, local_size=1, hostname="a", hostnames=["a"],
        device=torch.device("cpu"), device_kind="cpu", backend="gloo", backend_reason="a test",
        interface="lo", n_cores=1, n_threads=1, memory_bytes=1 << 30,
    )  # fmt: skip
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spec = RunSpec(
        name="run",
        run_dir=str(tmp_path),
        address="127.0.0.1",
        port=store.port,
        collective_timeout_s=60.0,
    )
    outcome = run_case(out_of_memory, None, world, spec)
    dist.destroy_process_group()
    assert (outcome.status, outcome.reason) == ("oom", "MemoryError")
