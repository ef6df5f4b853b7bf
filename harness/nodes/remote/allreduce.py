"""One rank of a torch.distributed all-reduce whose sum is known. Runs on the host.

Started before the ranks are known, because importing torch takes seconds; then lines, JSON each:
    out  {"is_ready": true, "has_gpu": G}          torch is imported
    in   {"rank": R, "size": N, "backend": B, "interface": I, "address": A, "port": P,
          "timeout_s": T}
    out  {"port": P}                               rank 0 only: the port of its store
    out  {"is_right": W, "duration_s": D}  or  {"error": E}
Rank 0 gets port 0 and reports the port that it chose; the others get that one.
"""

import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta

signal.alarm(int(sys.argv[1]))
# One thread, because threads that spin would occupy cores which other nodes share.
os.environ["OMP_NUM_THREADS"] = "1"
# Garbage collection takes a quarter of the time to import torch, whose objects all stay.
gc.disable()

import torch  # noqa: E402  (may hang on a stale file system)
import torch.distributed as dist  # noqa: E402

N_VALUES = 2**18  # 1 MiB of float32
N_REPEATS = 3


def send(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def connect(order: dict[str, object]) -> None:
    """Initialize the process group; rank 0 reports its store's port."""
    interface = str(order["interface"])
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=": exact match, not prefix
    timeout = timedelta(seconds=float(str(order["timeout_s"])))
    rank, size = int(str(order["rank"])), int(str(order["size"]))
    store = dist.TCPStore(
        host_name=str(order["address"]),
        port=int(str(order["port"])),
        world_size=size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    if rank == 0:
        send({"port": store.port})
    dist.init_process_group(
        str(order["backend"]), store=store, rank=rank, world_size=size, timeout=timeout
    )


def reduce(order: dict[str, object]) -> dict[str, object]:
    """Sum rank + 1 over the ranks: n (n + 1) / 2, exact in float32 below 5792 ranks."""
    size = int(str(order["size"]))
    device = "cuda:0" if order["backend"] == "nccl" else "cpu"
    durations_s = []
    is_right = True
    for _ in range(N_REPEATS):
        values = torch.full((N_VALUES,), float(int(str(order["rank"])) + 1), device=device)
        start_s = time.perf_counter()
        dist.all_reduce(values)
        is_right &= bool((values == size * (size + 1) / 2).all())
        durations_s.append(time.perf_counter() - start_s)
    return {"is_right": is_right, "duration_s": min(durations_s)}


def main() -> None:
    send({"is_ready": True, "has_gpu": torch.cuda.is_available()})
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    try:
        connect(order)
        result = reduce(order)
        dist.barrier()  # no rank leaves before all have their sum
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        result = {"error": str(error).splitlines()[0]}
    send(result)
    os._exit(0)  # skips torch's shutdown, which takes as long as the test


if __name__ == "__main__":
    main()
