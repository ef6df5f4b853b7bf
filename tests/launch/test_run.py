"""What one rank makes of an error in its part of a run."""

import torch.distributed as dist
from made_runs import world_of

from harness.run import RunSpec, run_case


def out_of_memory(config, context):
    raise MemoryError


def test_an_error_that_says_nothing_is_named_by_its_type(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spec = RunSpec(
        name="run",
        run_dir=str(tmp_path),
        address="127.0.0.1",
        port=store.port,
        collective_timeout_s=60.0,
    )
    outcome = run_case(out_of_memory, None, world_of(), spec)
    dist.destroy_process_group()
    assert (outcome.status, outcome.reason) == ("oom", "MemoryError")
