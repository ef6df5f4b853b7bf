"""The probe's text, the facts about a host in it, and the findings of its checks.

None: the host did not report the value.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


@dataclass(frozen=True)
class Section:
    """A section of the probe's text, with its command's exit status if reported."""

    lines: tuple[str, ...] = ()
    returncode: int | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def first(self) -> str:
        return self.lines[0] if self.lines else ""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A file system."""

    mount: str
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class InterfaceFacts:
    """A network interface.

    Attributes:
        networks: its addresses with prefix length, such as `10.0.0.2/24`.
        is_up: enabled, with a carrier.
        kind: physical, virtual or wireless.
        speed_mbit_per_s: None if the driver reports none or, for a virtual NIC, a nominal one.
        claimed_mbit_per_s: as the driver reports it, nominal or not; runs compare this one.
    """

    name: str
    networks: tuple[str, ...] = ()
    is_up: bool = True
    kind: str = "virtual"
    speed_mbit_per_s: int | None = None
    claimed_mbit_per_s: int | None = None
    duplex: str = ""
    mtu_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PeerRoute:
    """The route to one peer: interface, and this host's address as the peer sees it (source)."""

    address: str
    interface: str
    source: str = ""
    is_local: bool = False


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    """An environment's interpreter and packages."""

    version: str
    packages: dict[str, str]
    torch_cuda: str | None = None
    harness_hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    pid: int
    name: str
    memory_bytes: int | None
    user: str = ""


@dataclass(frozen=True, kw_only=True)
class SmiGpu:
    """One GPU as nvidia-smi describes it.

    Attributes:
        memory_total_bytes: None if the GPU shares the host's memory (GB10, Jetson) or no answer.
        throttle_reasons: active ones, as in nvidia-smi without prefix: `hw_thermal_slowdown`.
        ecc_uncorrected: errors since the last reset; None if ECC is off or missing.
        remap: `pending` if rows (or pages) of its memory wait to be remapped, `failure` if
            remapping failed.
        recovery: action that the driver requests, such as `Reset`; empty: none.
        fabric: state of the NVSwitch fabric, if it is not ready.
        pcie_lanes: lanes of its link to the host that are in use, and those that card and slot
            have; None if it is on no PCIe bus.
        errors: pairs of an error message and the fields in which nvidia-smi printed it.
        capability: (8, 6) for sm_86.
    """

    index: int
    name: str
    uuid: str = ""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    ecc_uncorrected: int | None = None
    mig_mode: str = ""
    n_mig_devices: int = 0
    remap: str = ""
    recovery: str = ""
    fabric: str = ""
    pcie_lanes: tuple[int, int] | None = None
    errors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class TorchCuda:
    """CUDA support of the installed torch build."""

    cuda: str | None
    arch_list: tuple[str, ...]
    is_available: bool
    capabilities: tuple[tuple[int, int], ...] = ()
    kernel_errors: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The GPUs of a host.

    Attributes:
        n_cards: NVIDIA display or compute cards on the PCI bus, with or without a driver.
        smi_error: nvidia-smi's message if it failed; empty if it works or is not installed.
        smi_returncode: exit status, if nvidia-smi failed or printed more than its XML.
        smi_remarks: lines printed around the XML.
        n_attached: number of GPUs by nvidia-smi's count, which may exceed those it describes.
    """

    n_cards: int = 0
    smi_error: str = ""
    smi_returncode: int | None = None
    smi_remarks: tuple[str, ...] = ()
    n_attached: int | None = None
    driver: str = ""
    cuda: str = ""
    gpus: tuple[SmiGpu, ...] = ()
    torch: TorchCuda | None = None
    torch_error: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts that the probe reports about a host.

    Attributes:
        boot_id: the running kernel's; hosts that share one (containers, virtual nodes) share cores.
        quota_cores: the tightest cgroup CPU limit.
        memory_limit_bytes: the tightest cgroup memory limit.
        own_addresses: addresses of its host name, resolved on the host.
        run_interface, run_address: used by a run over the hosts that answered; empty: unknown.
        environment: path of the requested environment; empty: missing.
        python_home: directory of the Python that a missing environment links to; empty: no link.
        python: interpreter of the environment, else of the system.
    """

    hostname: str = ""
    user: str = ""
    shell: str = ""
    os_name: str = ""
    kernel: str = ""
    boot_id: str = ""
    cpu_model: str = ""
    n_cores: int | None = None
    quota_cores: float | None = None
    load_1min: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    interfaces: tuple[InterfaceFacts, ...] = ()
    routes: tuple[PeerRoute, ...] = ()
    own_addresses: tuple[str, ...] = ()
    run_interface: str = ""
    run_address: str = ""
    environment: str = ""
    python_home: str = ""
    python: PythonFacts | None = None
    python_error: str = ""
    mpi: str = ""
    gpu: GpuFacts = field(default_factory=GpuFacts)

    def has_package(self, name: str) -> bool:
        """Whether the requested environment exists and has the package."""
        return bool(self.environment and self.python and name in self.python.packages)

    @property
    def usable_cores(self) -> float | None:
        """Cores that a job on this host may use: the allowed ones, within the quota."""
        limits = [limit for limit in (self.n_cores, self.quota_cores) if limit is not None]
        return min(limits, default=None)

    @property
    def usable_memory_bytes(self) -> int | None:
        """Memory that a job on this host may use: the machine's, within the limit."""
        limits = [n for n in (self.memory_total_bytes, self.memory_limit_bytes) if n is not None]
        return min(limits, default=None)

    @property
    def peer_routes(self) -> tuple[PeerRoute, ...]:
        """The routes that leave this host."""
        return tuple(route for route in self.routes if not route.is_local)

    @property
    def cluster_interface(self) -> InterfaceFacts | None:
        """The interface of runs, else of most routes; None if no route is known."""
        names = [self.run_interface or route.interface for route in self.peer_routes]
        by_name = {interface.name: interface for interface in self.interfaces}
        known = [name for name in names if name in by_name]
        return by_name[max(known, key=known.count)] if known else None

    @property
    def cluster_address(self) -> str:
        """This host's address as other hosts see it; empty if no route is known."""
        if self.run_address:
            return self.run_address
        interface = self.cluster_interface
        sources = [
            r.source for r in self.peer_routes if interface and r.interface == interface.name
        ]
        return sources[0] if sources else ""


class Status(IntEnum):
    """The value is the exit code, as monitoring systems of the Nagios family expect it."""

    OK = 0
    WARN = 1
    CRITICAL = 2
    UNKNOWN = 3


# UNKNOWN ranks below CRITICAL because a certain failure outweighs a possible one.
_SEVERITY = [Status.OK, Status.WARN, Status.UNKNOWN, Status.CRITICAL]


@dataclass(frozen=True)
class Finding:
    """One statement of one check about one host.

    Attributes:
        detail: the measurement or the problem, in one line.
        remedy: a command or an action; empty if none is needed.
        follows: this finding is a mere consequence of another one on the same host.
    """

    host: str
    check: str
    status: Status
    detail: str
    remedy: str = ""
    follows: bool = False


class Judgement(NamedTuple):
    """A finding without its host and check; a check returns any number of them."""

    status: Status
    detail: str
    remedy: str = ""


def ok(detail: str) -> list[Judgement]:
    return [Judgement(Status.OK, detail)]


def warn(detail: str, remedy: str) -> list[Judgement]:
    return [Judgement(Status.WARN, detail, remedy)]


def critical(detail: str, remedy: str) -> list[Judgement]:
    return [Judgement(Status.CRITICAL, detail, remedy)]


def unknown(detail: str, remedy: str) -> list[Judgement]:
    return [Judgement(Status.UNKNOWN, detail, remedy)]


def worst(statuses: Iterable[Status]) -> Status:
    """The most severe status; OK if there is none."""
    return max(statuses, key=_SEVERITY.index, default=Status.OK)
