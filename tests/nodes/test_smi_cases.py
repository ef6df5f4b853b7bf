"""Unusual machines, by what their nvidia-smi printed; the real probe asks a stand-in for it."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from launching import write_program

from harness.nodes.facts import Status
from harness.nodes.parse import parse_facts, split_sections
from harness.nodes.parse_gpu import parse_gpus
from harness.nodes.probe import Order, script

OK, WARN, CRITICAL = Status.OK, Status.WARN, Status.CRITICAL
ONE_GPU = (Path(__file__).parent / "nvidia_smi" / "a100.xml").read_text()


def other(text=ONE_GPU, **fields):
    """nvidia-smi's answer, with other contents of all elements of some names."""
    for name, content in fields.items():
        text, n_found = re.subn(f"<{name}>[^<]*<", f"<{name}>{content}<", text)
        assert n_found, name
    return text


def beside(*gpus):
    """The answer about several GPUs, by their fields."""
    before, gpu, after = re.split("(?<=</attached_gpus>\n)|(?<=</gpu>\n)", ONE_GPU)
    each = [other(gpu, uuid=f"GPU-{index}", **fields) for index, fields in enumerate(gpus)]
    return "".join([other(before, attached_gpus=len(gpus)), *each, after])


def process(pid, name, used):
    return (
        f"<process_info><gpu_instance_id>N/A</gpu_instance_id><pid>{pid}</pid><type>C</type>"
        f"<process_name>{name}</process_name><used_memory>{used}</used_memory></process_info>"
    )


SERVERS = (
    "current_mig", "pending_mig", "current_ecc", "sram_uncorrectable_parity",
    "sram_uncorrectable_secded", "dram_uncorrectable",
)  # fmt: skip
NOT_A_SERVER, FAULTY = dict.fromkeys(SERVERS, "N/A"), dict.fromkeys(SERVERS, "Unknown Error")
SHARED_MEMORY = dict.fromkeys(("total", "used", "free"), "N/A")
CLOCKS = "<supported_clocks></supported_mem_clock><supported_mem_clock>5001 MHz</supported_clocks>"
ROWS = (
    "<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>2</remapped_row_unc>"
    "<remapped_row_pending>Yes</remapped_row_pending>"
    "<remapped_row_failure>Yes</remapped_row_failure></remapped_rows>"
)
MIG_DEVICE = (
    "<mig_device><index>0</index><gpu_instance_id>7</gpu_instance_id>"
    "<compute_instance_id>0</compute_instance_id><fb_memory_usage><total>4864 MiB</total>"
    "<used>0 MiB</used><free>4860 MiB</free></fb_memory_usage></mig_device>"
)
# By machine: answer, exit status, status of the finding, its words, and words of its remedy.
MACHINES = {
    "healthy": (
        beside({}, {}), 0,
        OK, "2x NVIDIA A100-SXM4-40GB 40 GiB at 210/1410 MHz, driver 535.54.03", "",
    ),
    "mixed": (
        beside(
            {"product_name": "Tesla P100-PCIE-16GB", "total": "16280 MiB"},
            {"product_name": "Tesla V100-PCIE-32GB", "total": "32510 MiB"},
            {"product_name": "Tesla T4", "total": "15109 MiB"},
        ), 0,
        OK, "1x Tesla P100-PCIE-16GB 15.9 GiB", "",
    ),
    "broken-xml": (
        ONE_GPU.replace("<temperature>", f"{CLOCKS}<temperature>"), 0,
        OK, "1x NVIDIA A100-SXM4-40GB 40 GiB at 210/1410 MHz", "",
    ),
    "gb10": (
        other(
            driver_version="580.126.09", cuda_version="13.0", product_name="NVIDIA GB10",
            processes=process(1, "/usr/lib/xorg/Xorg", "18 MiB"), **NOT_A_SERVER, **SHARED_MEMORY,
        ), 0,
        OK, "1x NVIDIA GB10 with the host's memory at 210/1410 MHz, driver 580", "",
    ),
    "orin": (
        other(
            driver_version="540.4.0", cuda_version="12.6", product_name="Orin (nvgpu)", uuid="N/A",
            gpu_util="N/A", gpu_temp="N/A", sm_clock="N/A", **NOT_A_SERVER, **SHARED_MEMORY,
        ), 0,
        OK, "1x Orin (nvgpu) with the host's memory, driver 540.4.0", "",
    ),
    "mig-root": (
        other(
            current_mig="Enabled", pending_mig="Enabled", mig_devices=MIG_DEVICE, gpu_util="N/A"
        ), 0,
        WARN, "cut into MIG instances (1 made): a rank sees one", "-i 0 -mig 0",
    ),
    "wsl": (
        other(
            driver_version="551.86", cuda_version="12.4", product_name="NVIDIA GeForce RTX 3080",
            total="10240 MiB", used="1536 MiB", gpu_util="3 %",
            processes=process(23, "/Xwayland", "N/A"), **NOT_A_SERVER,
        ), 0,
        WARN, "RTX 3080) is in use: 1.5 GiB held, 3% busy, by Xwayland (pid 23", "wait",
    ),
    "unescaped-process": (
        other(used="900 MiB", processes=process(77, "python train.py --a 1 & <x>", "500 MiB")), 0,
        WARN, "by python train.py --a 1 & <x> (pid 77", "wait",
    ),
    "err-all": (
        other(
            product_name="NVIDIA A10G", total="23028 MiB", used="4184 MiB", free="18844 MiB",
            fan_speed="Unknown Error", gpu_util="Unknown Error", gpu_temp="Unknown Error",
            sm_clock="Unknown Error", **FAULTY,
        ), 0,
        CRITICAL, "GPU 0 (NVIDIA A10G) is faulty: Unknown Error", "grep -i -E 'nvrm",
    ),
    "remap-pending": (
        ONE_GPU.replace("<temperature>", f"{ROWS}<temperature>"), 0,
        CRITICAL, "bad memory that could not be remapped", "replace it",
    ),
    "cpu-node-with-smi": (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.\n\n", 9,
        WARN, "no NVIDIA card on the bus, yet", "nothing, if n0",
    ),
    "no-devices": (
        "No devices were found\n", 6,
        WARN, "is installed: No devices were found", "ssh n0 lspci",
    ),
    "empty": (
        "", 255,
        CRITICAL, "printed no GPU and ended with status 255", "ssh n0 sudo dmesg",
    ),
    "handle-unknown": (
        "Unable to determine the device handle for GPU0000:BA:00.0: Unknown Error\n", 255,
        CRITICAL, "handle for GPU0000:BA:00.0: Unknown Error", "sudo reboot",
    ),
    "lost-text": (
        "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  "
        "Reboot the system to recover this GPU\n", 15,
        CRITICAL, "GPU 0000:02:00.0: GPU is lost.", "ssh n0 sudo reboot; if the GPU",
    ),
    "mismatch": (
        "Failed to initialize NVML: Driver/library version mismatch\n"
        "NVML library version: 550.54\n", 18,
        CRITICAL, "Driver/library version mismatch / NVML library", "old one is",
    ),
    "no-permission": (
        "Failed to initialize NVML: Insufficient Permissions\n", 4,
        CRITICAL, "Insufficient Permissions (status 4)", "usermod -aG video",
    ),
    "segfault": (
        "Segmentation fault (core dumped)\n", 139,
        CRITICAL, "Segmentation fault (core dumped) (status 139)", "--reinstall",
    ),
    "unknown-nvml": (
        "Failed to initialize NVML: Unknown Error\n", 255,
        CRITICAL, "initialize NVML: Unknown Error", "restart the container",
    ),
    "wsl-blocked": (
        "Failed to initialize NVML: GPU access blocked by the operating system\n"
        "Failed to properly shut down NVML: GPU access blocked by the operating system\n", 17,
        CRITICAL, "blocked by the operating system", "`wsl --update`",
    ),
}  # fmt: skip


def probe_with(answer, returncode, tmp_path):
    """The facts of this machine, with another nvidia-smi."""
    (tmp_path / "answer").write_bytes(answer)
    text = f'#!/bin/sh\n[ "$1" != -q ] || cat {tmp_path}/answer\nexit {returncode}\n'
    program = write_program(tmp_path / "bin" / "nvidia-smi", text)
    order = Order(peers=("localhost",), env_dir="/no/env", repo_dir="/no/repo", timeout_s=30)
    done = subprocess.run(
        ["sh", "-s"], input=script(order).encode(), capture_output=True, timeout=120,
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.stderr == b""
    facts = parse_facts(done.stdout.decode(errors="replace"))
    assert facts.hostname == os.uname().nodename
    return facts


def test_the_probe_hands_on_what_nvidia_smi_printed_and_its_status(tmp_path):
    name = "caf\xe9\n@harness:end\n@rc=9\ny\x1b[31m"  # no mark of the probe, and no UTF-8
    text = other(processes=process(77, name, "500 MiB"))
    (gpu,) = probe_with(text.encode("latin-1"), 0, tmp_path).gpu.gpus
    assert gpu.memory_total_bytes == 40960 * 2**20
    failed = probe_with(b"No devices were found\n", 6, tmp_path).gpu
    assert (failed.smi_error, failed.smi_returncode) == ("No devices were found", 6)


def gpu_of(text, n_cards=0, returncode=0):
    cards = "".join(f"0000:0{i}:00.0\n" for i in range(n_cards))
    return parse_gpus(
        split_sections(
            f"@harness:nvidia_cards\n{cards}\n@harness:nvidia_smi\n{text}\n@rc={returncode}\n"
        )
    )


@pytest.mark.parametrize(
    ("answer", "returncode", "status", "detail", "remedy"), MACHINES.values(), ids=MACHINES
)
def test_each_machine_has_its_finding_and_remedy(hosts, answer, returncode, status, detail, remedy):
    (finding,) = hosts(1).facts(0, gpu=gpu_of(answer, returncode=returncode)).judge("gpu", 0)
    assert finding.status is status
    assert detail in finding.detail
    assert remedy in finding.remedy
    assert bool(finding.remedy) is (status is not OK)


CASES_OF_ONE = [
    ("<dram_uncorrectable>0<", "<dram_uncorrectable>2<", CRITICAL, "2 uncorrectable memory errors"),
    ("hw_thermal_slowdown>Not Active<", "hw_thermal_slowdown>Active<", WARN,
     "slowed down: too hot (hardware)"),
    ("<fan_speed>N/A", "<fan_speed>ERR!", WARN, "has ERR! in fan_speed"),
    ("<gpu_temp>30 C", "<gpu_temp>ERR!", CRITICAL, "faulty: ERR! in gpu_temp"),
    ("<total>40960 MiB", "<total>[Unknown Error]", CRITICAL, "does not answer: Unknown Error"),
    ("<total>40960 MiB", "<total>[N/A]", OK, "with the host's memory"),
    ("<total>40960 MiB", "<total>[GPU requires reset]", CRITICAL, "not answer: GPU requires reset"),
    ("<total>40960 MiB", "<total>No data", CRITICAL, "does not answer: No data"),
    ("<gpu_util>0 %", "<gpu_util>[GPU is lost]", CRITICAL, "does not answer: GPU is lost"),
    ("<sm_clock>210 MHz", "<sm_clock>[Not Supported]", OK, "40 GiB, driver"),
    ("<used>4 MiB", "<used>[Insufficient Permissions]", WARN, "cannot be read whole"),
    ("</temperature>", "</temperature><remapped_rows><remapped_row_pending>Yes"
     "</remapped_row_pending></remapped_rows>", WARN, "remapped at its next reset"),
    ("</temperature>", "</temperature><retired_pages><pending_blacklist>Yes</pending_blacklist>"
     "</retired_pages>", WARN, "remapped at its next reset"),
    ("</temperature>", "</temperature><gpu_recovery_action>Drain and Reset</gpu_recovery_action>",
     CRITICAL, "Drain and Reset"),
    ("</temperature>", "</temperature><gpu_reset_status><reset_required>Yes</reset_required>"
     "</gpu_reset_status>", CRITICAL, "needs to be recovered, by its driver: Reset"),
    ("</temperature>", "</temperature><fabric><state>In Progress</state><status>N/A</status>"
     "</fabric>", WARN, "waits for its NVSwitch fabric (In Progress)"),
    ("</temperature>", "</temperature><fabric><state>Completed</state><status>Success</status>"
     "</fabric>", OK, "A100"),
    ("</temperature>", "</temperature><gpu_recovery_action>None</gpu_recovery_action>", OK, "A100"),
    ("</temperature>", "<temperature>", CRITICAL, "nvidia-smi printed broken XML"),
    ("</nvidia_smi_log>", "</nvidia_smi_log>\nWARNING: infoROM is corrupted at gpu 0000:01:00.0",
     WARN, "nvidia-smi says more (status 0): WARNING: infoROM is corrupted"),
    ("</gpu>\n</nvidia_smi_log>", "", CRITICAL, "cannot be judged"),
    ("<attached_gpus>1", "<attached_gpus>8", CRITICAL, "7 of 8 NVIDIA card(s) are not shown"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "status", "words"), CASES_OF_ONE)
def test_each_field_that_cannot_be_read_has_its_verdict(hosts, old, new, status, words):
    assert old in ONE_GPU
    (finding,) = hosts(1).facts(0, gpu=gpu_of(ONE_GPU.replace(old, new))).judge("gpu", 0)
    assert (finding.status, words in finding.detail) == (status, True), finding.detail


def test_a_gpu_that_cannot_be_read_leaves_the_other_judged(hosts):
    text = beside({}, {"gpu_temp": "88 C"}).replace("</temperature>", "<temperature>", 1)
    findings = hosts(1).facts(0, gpu=gpu_of(text)).judge("gpu", 0)
    assert [(f.status, f.detail) for f in findings] == [
        (CRITICAL, "GPU 0 (NVIDIA A100-SXM4-40GB) cannot be judged: nvidia-smi printed broken XML"),
        (WARN, "GPU 1 (NVIDIA A100-SXM4-40GB) is at 88 C"),
    ]


def test_a_card_that_nvidia_smi_does_not_show_is_named(hosts):
    (finding,) = hosts(1).facts(0, gpu=gpu_of(ONE_GPU, n_cards=4)).judge("gpu", 0)
    assert finding.detail == "3 of 4 NVIDIA card(s) are not shown by nvidia-smi"


def test_with_cards_on_the_bus_no_devices_are_critical_and_torch_is_unknown(hosts):
    gpu = gpu_of("No devices were found", n_cards=2, returncode=6)
    (finding,) = hosts(1).facts(0, gpu=gpu).judge("gpu", 0)
    (cuda,) = hosts(1).facts(0, gpu=gpu).judge("cuda", 0)
    assert (finding.status, finding.detail) == (
        CRITICAL, "nvidia-smi: No devices were found (status 6)",
    )  # fmt: skip
    assert (cuda.status, cuda.detail) == (Status.UNKNOWN, "nvidia-smi fails: see gpu")


@pytest.mark.parametrize(
    "text",
    [
        "@harness:cgroup\ncpu.max ² 1\nmemory ² 1\nmemory " + "9" * 5000,
        "@harness:cpus_allowed\nCpus_allowed_list: 0-" + "9" * 5000,
        "@harness:memory\nMemTotal: " + "9" * 5000 + " kB",
        "@harness:disk\n/dev/sda " + "9" * 5000 + " 1 1 1% /",
        "@harness:links\n2: e: <UP> mtu " + "9" * 5000,
        "@harness:net_sys\ne physical ² full",
        "@harness:net_dev\ne: 1\n@harness:net_sys\ne physical ² full",
        "@harness:disk\n1\n@rc=" + "9" * 5000,
        "@harness:versions\n" + "[" * 10**5,
        "@harness:torch_cuda\n" + "[" * 10**5,
        "@harness:nvidia_smi\n<?xml ?>" + "<gpu " * 10**5,
        "@harness:nvidia_smi\n<?xml ?><gpu id=''>" + "<a>" * 10**5 + "</gpu>",
        "@harness:disk\n" + " " * 10**6,
        "@harness:routes\n1.2.3.4" + " " * 10**6,
    ],
)  # fmt: skip
def test_hostile_numbers_and_depths_are_unknown(text):
    facts = parse_facts(text)
    assert facts.memory_limit_bytes is None
    assert facts.n_cores is None
