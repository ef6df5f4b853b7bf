"""What ranks make of each other's hosts, and what a run's process group is told."""

import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist

from harness.domain.interface import Interface
from harness.errors import LaunchError
from harness.runtime.ranks import introduction, rendezvous
from harness.runtime.ranks.environment import Launch
from harness.runtime.ranks.host import Gpu, HostFacts, _list_gpus, library_versions

LOOPBACK = Interface(name="lo", address="127.0.0.1", prefix_length=8)


def gpu(uuid, memory_bytes=80, board=""):
    return Gpu(name="a card", uuid=uuid, board=board or uuid, memory_bytes=memory_bytes)


def facts(*gpus, has_nccl=True, cores=range(8), quota_cores=None, code="aaa"):
    return HostFacts(
        hostname="host", cpu="a CPU", cores=list(cores), quota_cores=quota_cores, memory_bytes=64,
        gpus=list(gpus), has_nccl=has_nccl, interfaces=[LOOPBACK], versions={}, code=code,
    )  # fmt: skip


def worlds(everyone):
    """Each rank's world, all on one host."""
    return [
        rendezvous._build_world(
            Launch(launcher="slurm", rank=rank, size=len(everyone), has_mpi=False), everyone, None
        )
        for rank in range(len(everyone))
    ]


A, B = gpu("a", 80), gpu("b", 40)
APART = "every rank has a GPU of its own"
SHARED = "2 ranks share a GPU (a card) on host, and NCCL takes one rank a GPU"


@pytest.mark.parametrize(
    ("everyone", "reason", "devices", "memory_bytes", "n_sharing"),
    [
        # Each sees its own GPU alone, or all.
        ([facts(A), facts(B)], APART, ["cuda:0", "cuda:0"], [80, 40], [1, 1]),
        ([facts(A, B), facts(A, B)], APART, ["cuda:0", "cuda:1"], [80, 40], [1, 1]),
        ([facts(A), facts(A), facts(B)], SHARED, ["cuda:0"] * 3, [40, 40, 40], [2, 2, 1]),
        # NCCL refuses ranks on one board ("Duplicate GPU"), also if each has a slice.
        ([facts(gpu("MIG-a", 20, "x")), facts(gpu("MIG-b", 40, "x"))],
         SHARED, ["cuda:0", "cuda:0"], [20, 40], [1, 1]),
        ([facts(gpu("MIG-a", 20, "x")), facts(gpu("MIG-b", 40, "y"))],
         APART, ["cuda:0", "cuda:0"], [20, 40], [1, 1]),
        ([facts(A), facts()], "rank 1 on host has no GPU", ["cuda:0", "cpu"], [80, 32], [1, 1]),
        ([facts(A), facts(B, has_nccl=False)], "the torch of rank 1 on host has no NCCL",
         ["cuda:0", "cuda:0"], [80, 40], [1, 1]),
    ],
)  # fmt: skip
def test_ranks_divide_gpus_and_choose_the_backend_by_the_same_facts(
    everyone, reason, devices, memory_bytes, n_sharing
):
    found = worlds(everyone)
    backend = "nccl" if reason == APART else "gloo"
    assert {(world.backend, world.backend_reason) for world in found} == {(backend, reason)}
    assert [str(world.device) for world in found] == devices
    assert [world.memory_bytes for world in found] == memory_bytes
    assert [world.n_sharing for world in found] == n_sharing


@pytest.mark.parametrize(
    ("cores", "quota_cores", "shares"),
    [
        ([range(6), range(6), range(6)], None, [2.0, 2.0, 2.0]),
        ([range(2), range(2, 8)], None, [2.0, 6.0]),  # bound, as by srun
        ([range(4), range(2, 6)], None, [3.0, 3.0]),
        ([range(8), range(8)], 3.0, [1.5, 1.5]),
    ],
)
def test_ranks_divide_the_cores_that_several_of_them_may_run_on(cores, quota_cores, shares):
    everyone = worlds([facts(cores=each, quota_cores=quota_cores) for each in cores])
    assert [world.n_cores for world in everyone] == shares


@pytest.mark.parametrize(
    ("nodes", "address"),
    [
        ("gpu-a", "gpu-a"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("rack[1-2]n[7,9]-ib,x", "rack1n7-ib"),
    ],
)
def test_srun_ranks_meet_on_the_first_node_of_the_step(nodes, address):
    step = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}
    login = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99"}  # where srun was started
    found = rendezvous.slurm_master({**step, **login})
    assert found == {"MASTER_ADDR": address, "MASTER_PORT": "20113"}
    chosen = {"MASTER_ADDR": "gpu-x", "MASTER_PORT": "29500"}
    assert rendezvous.slurm_master({**step, **chosen}) == chosen


def test_an_srun_without_a_list_of_nodes_asks_for_the_address():
    with pytest.raises(LaunchError, match="export MASTER_ADDR"):
        rendezvous.slurm_master({"SLURM_STEP_ID": "0"})


def test_kinds_of_cpus_tell_their_cores_apart():
    (many,), (more,) = worlds([facts(cores=range(125))]), worlds([facts(cores=range(128))])
    assert (many.device_kind, more.device_kind) == ("a CPU x 125", "a CPU x 128")


def test_gloo_moves_the_hosts_memory_and_nccl_the_gpus():
    (world,) = worlds([facts()])
    driven = replace(world, device=torch.device("cuda", 1))
    assert driven.wire == torch.device("cpu")
    assert replace(driven, backend="nccl").wire == torch.device("cuda", 1)


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs, or slices, of compute capability 9.0, as NVML and torch have them."""
    fake = SimpleNamespace(
        NVMLError=ConnectionError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetName=lambda handle: f"card {handle}",
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: f"board of {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 << 30, free=1),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    return fake


def test_a_gpu_without_code_in_this_torch_is_refused_with_the_remedy(nvml):
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (7, 0)
    with pytest.raises(LaunchError, match=r"code for sm_80 sm_90, and card GPU-0 on .* sm_70"):
        _list_gpus()


def test_gpus_are_those_that_are_visible_in_their_order(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,MIG-x")
    assert _list_gpus() == [
        Gpu(name="card GPU-3", uuid="GPU-3", board="GPU-3", memory_bytes=80 << 30),
        Gpu(name="card MIG-x", uuid="MIG-x", board="board of MIG-x", memory_bytes=80 << 30),
    ]


def test_what_nvml_does_not_tell_cuda_does(nvml, monkeypatch):
    def refuse(uuid):
        raise nvml.NVMLError("Not Found")

    nvml.nvmlDeviceGetHandleByUUID = refuse
    found = SimpleNamespace(name="card", uuid="abc", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab")
    assert _list_gpus() == [Gpu(name="card", uuid="abc", board="abc", memory_bytes=80 << 30)]


def test_a_card_that_torch_cannot_start_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # as NVML has it
    assert _list_gpus() == []


@pytest.mark.parametrize(("known", "told"), [(None, ["eth7", "=eth7"]), ("ib0", ["ib0", "ib0"])])
def test_the_process_of_a_run_is_told_the_interface(known, told, monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, known or "")
        if known is None:
            monkeypatch.delenv(name)
    seen = []

    def init_process_group(*_, **__):
        seen.extend(os.environ.get(name) for name in names)

    barriers = []
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    for name in ("_store", "PrefixStore"):
        monkeypatch.setattr(rendezvous, name, lambda *_: None)
    (world,) = worlds([facts()])
    rendezvous.join_process_group(replace(world, interface="eth7"), "", 0, "run", 1.0)
    assert seen == told  # NCCL alone would take eth70 too
    assert barriers == []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "barrier", lambda device_ids: barriers.append(device_ids))
    on_gpu = replace(world, backend="nccl", device=torch.device("cuda", 2))
    rendezvous.join_process_group(on_gpu, "", 0, "run", 1.0)
    assert barriers == [[2]]  # NCCL would guess by the rank


def test_a_launch_tells_of_a_torch_that_captures_no_model(caplog):
    old = {"torch": "2.6.0+cu124"}
    rendezvous._check_versions([msgspec.structs.replace(facts(), versions=old)])
    assert "torch 2.6.0+cu124 is none of 2.9 to 3.0" in caplog.text


@pytest.mark.parametrize(("code", "found"), [("bbb", "bbb"), ("", "older")])
def test_a_launch_tells_of_hosts_with_other_code(code, found, caplog):
    rendezvous._check_versions([facts(), facts(code=code)])
    assert f"the harness' code is aaa on host and {found} on host: numbers may" in caplog.text


def test_an_interface_by_which_mpi_reaches_nobody_is_named(monkeypatch):
    comm = Mock(**{"allgather.side_effect": RuntimeError("MPI_ERR_INTERN")})
    monkeypatch.setattr(introduction, "_mpi_world", lambda launch: comm)
    launch = Launch(launcher="openmpi", rank=1, size=2, has_mpi=True)
    wrong = {"OMPI_MCA_btl_tcp_if_include": "eth7"}
    with pytest.raises(
        LaunchError, match=r"rank 1 .*, and correct OMPI_MCA_btl_tcp_if_include=eth7"
    ):
        introduction.introduce(launch, wrong, Mock(), 1.0)


def test_each_host_may_name_an_interface_of_its_own(monkeypatch):
    """As hosts/HOSTNAME.env does; rank 1 must not look for its own name on rank 0's host."""
    names = {"a": "eth0", "b": "eno1"}
    everyone = [
        msgspec.structs.replace(
            facts(), hostname=host, requested_interface=name,
            interfaces=[LOOPBACK, Interface(name=name, address=f"10.0.0.{k}", prefix_length=24)],
        )
        for k, (host, name) in enumerate(names.items())
    ]  # fmt: skip
    comm = Mock(rank=1, **{"bcast.return_value": "10.0.0.0 5"})
    comm.allgather = lambda mine: [
        msgspec.json.encode((f.hostname, f.interfaces, f.requested_interface)) for f in everyone
    ]
    introduced = Mock()
    monkeypatch.setattr(introduction, "_mpi_world", lambda launch: comm)
    monkeypatch.setattr(introduction, "connect_agents", introduced)
    launch = Launch(launcher="openmpi", rank=1, size=2, has_mpi=True)
    introduction.introduce(launch, {"GLOO_SOCKET_IFNAME": "eno1"}, Mock(), 1.0)
    assert introduced.call_args.args[1:5] == (
        1,
        ["a", "b"],
        [f.interfaces for f in everyone],
        "eth0",
    )

    comm.allgather = lambda mine: [msgspec.json.encode(f) for f in everyone]
    monkeypatch.setattr(rendezvous, "_store", Mock())
    assert rendezvous._connect_over_mpi(comm, everyone[1])[1:] == ("10.0.0.0", 5)
    assert [world.interface for world in worlds(everyone)] == ["eth0", "eno1"]


@pytest.mark.parametrize(("rank", "is_said"), [(0, True), (1, False)])
def test_rank_0_says_what_to_do_where_mpi_waits(rank, is_said, monkeypatch, caplog):
    monkeypatch.setattr(introduction, "_PATIENCE_S", 0.05)
    with introduction._told_where_mpi_waits(rank):
        time.sleep(0.5)
    said = "MPI has not connected all ranks within 0 s; if it does not soon, stop and run: bash "
    assert (said in caplog.text) == is_said


def test_a_package_that_is_half_installed_has_a_version_that_others_can_compare(
    tmp_path, monkeypatch
):
    (tmp_path / "numpy-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert library_versions()["numpy"] == "unknown"
