"""nvidia-smi's words to facts, and facts to verdicts."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.domain.torch_builds import kernel_support, where_built
from harness.nodes.facts import GpuFacts, PythonFacts, Status, TorchCuda
from harness.nodes.parse import split_sections
from harness.nodes.parse_gpu import parse_gpus
from harness.nodes.ssh import remote_text

CUDA_128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
RTX_UUID = "GPU-3a1f0c52-6a4e-9d1b-1c7f-7a7a2f6a0b11"


def facts_of(smi, *, returncode=0, more=""):
    text = f"@harness:nvidia_cards\n0000:01:00.0\n@harness:nvidia_smi\n{smi}\n@rc={returncode}\n"
    return parse_gpus(split_sections(text + more))


def test_an_rtx_3070_under_an_old_driver_is_read(smi_xml):
    more = f"@harness:compute_capability\n{RTX_UUID}, 8.6\n@rc=0\n@harness:gpu_users\n1182 root\n"
    facts = facts_of(smi_xml("rtx3070"), more=more)
    (gpu,) = facts.gpus
    assert (facts.driver, facts.cuda, gpu.name) == ("470.161.03", "11.4", "NVIDIA GeForce RTX 3070")
    assert gpu.memory_total_bytes == 7982 * 2**20
    assert (gpu.clock_mhz, gpu.clock_max_mhz) == (210, 2100)
    assert gpu.throttle_reasons == ("gpu_idle",)
    assert (gpu.ecc_uncorrected, gpu.mig_mode) == (None, "")
    assert gpu.capability == (8, 6)
    assert [(p.pid, p.user, p.name) for p in gpu.processes] == [
        (1182, "root", "/usr/lib/xorg/Xorg")
    ]


def test_an_h200_under_a_new_driver_is_read(smi_xml):
    (gpu,) = facts_of(smi_xml("h200")).gpus
    assert gpu.throttle_reasons == ("sw_power_cap",)
    assert (gpu.ecc_uncorrected, gpu.mig_mode) == (0, "Disabled")
    assert gpu.capability is None


def test_a_hanging_nvidia_smi_and_broken_xml_are_errors(smi_xml):
    assert facts_of("<?xml", returncode=124).smi_error == "nvidia-smi did not answer in time"
    (gpu,) = facts_of(smi_xml("h200")[:900]).gpus
    assert gpu.errors == (("broken XML", ("all",)),)


def test_volta_counts_errors_by_double_bits(smi_xml):
    text = smi_xml("rtx3070").replace(
        "<double_bit>\n\t\t\t\t\t<total>N/A</total>", "<double_bit>\n\t\t\t\t\t<total>3</total>"
    )
    assert facts_of(text).gpus[0].ecc_uncorrected == 3


@pytest.mark.parametrize(("used", "is_warned"), [("1x", True), ("8x", False), ("N/A", False)])
def test_a_card_with_few_pcie_lanes_is_a_warning(hosts, smi_xml, used, is_warned):
    widths = f"<max_link_width>16x</max_link_width><current_link_width>{used}</current_link_width>"
    lanes = f"<pci><pci_gpu_link_info><link_widths>{widths}</link_widths></pci_gpu_link_info></pci>"
    gpu = facts_of(smi_xml("h200").replace("</gpu>", f"{lanes}</gpu>"))
    (finding,) = hosts(1).facts(0, gpu=gpu).judge("gpu", 0)
    assert (finding.status is Status.WARN) == ("1 of 16 PCIe lanes" in finding.detail) == is_warned


def test_who_holds_the_memory_is_named_with_the_owner(hosts, smi_xml):
    text = smi_xml("rtx3070").replace("<used>18 MiB", "<used>6000 MiB")
    text = text.replace("/usr/lib/xorg/Xorg", "/home/eve/.venv/bin/python").replace(
        "<used_memory>9 MiB", "<used_memory>5900 MiB"
    )
    gpu = facts_of(text, more="@harness:gpu_users\n1182 eve\n")
    (finding,) = hosts(1).facts(0, gpu=gpu).judge("gpu", 0)
    assert "python (pid 1182 of eve, 5.76 GiB)" in finding.detail
    assert finding.remedy == "wait, or ask eve: ssh n0 nvidia-smi"


def test_a_cluster_without_gpus_is_fine_and_says_so(hosts):
    (finding,) = hosts(3).judge("gpu", 1)
    assert (finding.status, finding.detail) == (Status.OK, "no GPU")


def test_a_host_without_gpu_beside_others_with_one_is_a_warning(hosts, smi_xml):
    cluster = hosts(2).facts(0, gpu=facts_of(smi_xml("h200")))
    (finding,) = cluster.judge("gpu", 1)
    assert finding.status is Status.WARN
    assert "no GPU, unlike n0: all ranks" in finding.detail
    assert cluster.judge("gpu", 0)[0].status is Status.OK


def test_a_card_without_driver_is_critical(hosts):
    (finding,) = hosts(1).facts(0, gpu=GpuFacts(n_cards=1)).judge("gpu", 0)
    assert finding.status is Status.CRITICAL
    assert "no driver" in finding.detail


def test_more_slots_than_gpus_and_an_odd_driver_are_warnings(hosts, smi_xml):
    good = facts_of(smi_xml("h200"))
    odd = dataclasses.replace(good, driver="535.1")
    cluster = hosts(3).facts(0, gpu=good).facts(1, gpu=good).facts(2, gpu=odd)
    host = dataclasses.replace(cluster.reports[0].probe.host, slots=2)
    cluster.probe(0, host=host)
    assert "2 slots share 1 GPU(s)" in cluster.judge("gpu", 0)[0].detail
    assert cluster.judge("gpu", 2)[0].detail == "driver 535.1, most others 570.124.06"


@pytest.mark.parametrize(
    ("capability", "arch_list", "support"),
    [
        ((8, 6), ["sm_37", "sm_50", "sm_60", "sm_70"], "none"),  # the trap: torch 1.7 for CUDA 10.2
        ((8, 6), ["sm_70", "compute_70"], "jit"),
        ((8, 6), ["sm_70", "sm_75", "sm_80"], "binary"),  # same major, older minor
        ((8, 6), CUDA_128, "binary"),
        ((8, 0), ["sm_86"], "none"),  # newer minor does not run on an older device
        ((6, 1), CUDA_128, "none"),  # Pascal: dropped by builds for CUDA 12.8
        ((9, 0), ["sm_90a"], "binary"),
        ((10, 3), ["sm_100a"], "none"),
        ((10, 3), ["sm_100f"], "binary"),
        ((12, 0), ["sm_90", "compute_90"], "jit"),
        ((12, 1), ["compute_120a"], "none"),
        ((8, 6), [], "none"),
    ],
)
def test_code_runs_by_nvidias_compatibility_rules(capability, arch_list, support):
    assert kernel_support(capability, arch_list) == support


def test_the_way_to_a_build_for_an_old_gpu_is_in_the_documentation():
    page = Path(__file__).resolve().parents[2] / "docs" / "start.md"
    assert where_built((6, 1)) == "docs/start.md#old-gpus"
    assert "\n## Old GPUs\n" in page.read_text()
    assert where_built((8, 6)) == "pytorch.org"


def cuda_host(hosts, smi_xml, torch, *, build="11.1"):
    more = f"@harness:compute_capability\n{RTX_UUID}, 8.6\n@rc=0\n"
    gpu = dataclasses.replace(facts_of(smi_xml("rtx3070"), more=more), torch=torch)
    packages = {"torch": "1.9.0+cu111", "mpi4py": "4.1.2"}
    python = PythonFacts(version="3.11.7", packages=packages, torch_cuda=build)
    return hosts(1).facts(0, gpu=gpu, python=python)


def torch_cuda(**changes):
    base = TorchCuda(cuda="11.1", arch_list=("sm_80", "sm_86"), is_available=True)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("torch", "status", "words"),
    [
        (torch_cuda(), Status.OK, "has code for every GPU, not run"),
        (torch_cuda(kernel_errors=("",)), Status.OK, "a kernel ran on each"),
        (torch_cuda(arch_list=("sm_37", "sm_70")), Status.CRITICAL, "no code for GPU 0 (sm_86)"),
        (torch_cuda(arch_list=("compute_70",)), Status.WARN, "compiles for GPU 0 (sm_86)"),
        (torch_cuda(cuda="12.4"), Status.CRITICAL, "needs CUDA 12.4, the driver offers 11.4"),
        (torch_cuda(is_available=False), Status.CRITICAL, "sees no GPU"),
        (torch_cuda(kernel_errors=("CUDA error: no kernel image is available",)), Status.CRITICAL,
         "a kernel fails on GPU 0: CUDA error: no kernel image"),
        (None, Status.CRITICAL, "torch fails"),
    ],
)  # fmt: skip
def test_each_torch_build_has_its_verdict(hosts, smi_xml, torch, status, words):
    (finding,) = cuda_host(hosts, smi_xml, torch).judge("cuda", 0)
    assert finding.status is status
    assert words in finding.detail


def test_a_cpu_build_beside_a_gpu_is_critical(hosts, smi_xml):
    (finding,) = cuda_host(hosts, smi_xml, None, build=None).judge("cuda", 0)
    assert finding.status is Status.CRITICAL
    assert "a build without CUDA" in finding.detail
    # pip and install.sh alone take the installed release for the wanted one.
    assert re.search(r"install.sh --torch [0-9.]+\+cuVERSION;", finding.remedy)


def test_torchs_own_words_are_read(smi_xml):
    said = {"cuda": "12.4", "arch_list": ["sm_90"], "is_available": True, "capabilities": [[9, 0]]}
    facts = facts_of(smi_xml("h200"), more=f"@harness:torch_cuda\n{json.dumps(said)}\n@rc=0\n")
    assert facts.torch == TorchCuda(
        cuda="12.4", arch_list=("sm_90",), is_available=True, capabilities=((9, 0),)
    )
    more = "@harness:torch_cuda\nImportError: libcudart.so.11.0\n@rc=1\n"
    assert facts_of(smi_xml("h200"), more=more).torch_error == "ImportError: libcudart.so.11.0"


_TWO_UNLIKE_CARDS = """
import os
import types

__version__ = "2.0"
version = types.SimpleNamespace(cuda="12.8")
capabilities = [(8, 6), (9, 0)]  # by place on the bus; CUDA by itself has the fastest first
if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
    capabilities.reverse()
cuda = types.SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 2,
    get_device_capability=lambda index: capabilities[index],
)
_C = None
"""


def test_torch_numbers_gpus_as_nvidia_smi_does(tmp_path):
    (tmp_path / "torch.py").write_text(_TWO_UNLIKE_CARDS)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-c", remote_text("remote/kernel.py"), "0"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["capabilities"] == [[8, 6], [9, 0]]
