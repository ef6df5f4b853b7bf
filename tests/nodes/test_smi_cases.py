"""Unusual machines: a stand-in prints what their nvidia-smi printed; the real probe asks it."""

import os
import subprocess
from pathlib import Path

import pytest
from launching import write_program

from harness.nodes.facts import Status
from harness.nodes.parse import parse_facts, split_sections
from harness.nodes.parse_gpu import parse_gpus
from harness.nodes.probe import Order, script

CASES = Path(__file__).parent / "nvidia_smi" / "cases"
OK, WARN, CRITICAL = Status.OK, Status.WARN, Status.CRITICAL
# By file: status, words of the finding, words of the remedy; no word of another finding.
ANSWERS = {
    "healthy.xml": (OK, "2x NVIDIA A100-SXM4-40GB 40 GiB at 210/1410 MHz, driver 535.54.03", ""),
    "mixed.xml": (OK, "1x Tesla P100-PCIE-16GB 15.9 GiB", ""),
    "broken-xml.xml": (OK, "1x NVIDIA A100-SXM4-40GB 40 GiB at 210/1410 MHz", ""),
    "gb10.xml": (OK, "1x NVIDIA GB10 with the host's memory at 210/1410 MHz, driver 580", ""),
    "orin.xml": (OK, "1x Orin (nvgpu) with the host's memory, driver 540.4.0", ""),
    "mig-root.xml": (WARN, "cut into MIG instances (1 made): a rank sees one", "-i 0 -mig 0"),
    "wsl.xml": (WARN, "RTX 3080) is in use: 1.5 GiB held, 3% busy, by Xwayland (pid 23", "wait"),
    "latin1-process.xml": (WARN, "900 MiB held, 0% busy, by python (pid 77", "wait"),
    "unescaped-process.xml": (WARN, "by python train.py --a 1 & <x> (pid 77", "wait"),
    "err-all.xml": (CRITICAL, "GPU 0 (NVIDIA A10G) is faulty: Unknown Error", "grep -i -E 'nvrm"),
    "remap-pending.xml": (CRITICAL, "bad memory that could not be remapped", "replace it"),
    "cpu-node-with-smi.txt": (WARN, "no NVIDIA card on the bus, yet", "nothing, if n0"),
    "no-devices.txt": (WARN, "is installed: No devices were found", "ssh n0 lspci"),
    "empty.txt": (CRITICAL, "printed no GPU and ended with status 255", "ssh n0 sudo dmesg"),
    "handle-unknown.txt": (CRITICAL, "handle for GPU0000:BA:00.0: Unknown Error", "sudo reboot"),
    "lost-text.txt": (CRITICAL, "GPU 0000:02:00.0: GPU is lost.", "ssh n0 sudo reboot; if the GPU"),
    "mismatch.txt": (CRITICAL, "Driver/library version mismatch / NVML library", "old one is"),
    "no-permission.txt": (CRITICAL, "Insufficient Permissions (status 4)", "usermod -aG video"),
    "segfault.txt": (CRITICAL, "Segmentation fault (core dumped) (status 139)", "--reinstall"),
    "unknown-nvml.txt": (CRITICAL, "initialize NVML: Unknown Error", "restart the container"),
    "wsl-blocked.txt": (CRITICAL, "blocked by the operating system", "`wsl --update`"),
}  # fmt: skip


def test_every_case_has_an_answer():
    assert {path.name for path in CASES.iterdir() if path.suffix != ".rc"} == set(ANSWERS)


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


@pytest.mark.parametrize("name", ANSWERS)
def test_each_machine_has_its_finding_and_remedy(hosts, name, tmp_path):
    path = CASES / name
    code = path.with_suffix(".rc")
    returncode = int(code.read_text()) if code.exists() else 0
    facts = probe_with(path.read_bytes(), returncode, tmp_path)
    (finding,) = hosts(1).facts(0, gpu=facts.gpu).judge("gpu", 0)
    status, detail, remedy = ANSWERS[name]
    assert finding.status is status
    assert detail in finding.detail
    assert remedy in finding.remedy
    assert bool(finding.remedy) is (status is not OK)


def test_the_name_of_a_process_is_no_mark_of_the_probe(tmp_path):
    text = (CASES / "latin1-process.xml").read_bytes()
    name = text.partition(b"<process_name>")[2].partition(b"<")[0]
    facts = probe_with(text.replace(name, b"x\n@harness:end\n@rc=9\ny\x1b[31m"), 0, tmp_path)
    (gpu,) = facts.gpu.gpus
    assert (gpu.memory_total_bytes, facts.gpu.smi_returncode) == (40960 * 2**20, None)


def gpu_of(text, n_cards=0, returncode=0):
    cards = "".join(f"0000:0{i}:00.0\n" for i in range(n_cards))
    return parse_gpus(
        split_sections(
            f"@harness:nvidia_cards\n{cards}\n@harness:nvidia_smi\n{text}\n@rc={returncode}\n"
        )
    )


HEALTHY = (CASES / "healthy.xml").read_text()
ONE = HEALTHY.replace("<attached_gpus>2", "<attached_gpus>1").partition("\t<gpu id")
ONE_GPU = ONE[0] + ONE[1] + ONE[2].partition("</gpu>")[0] + "</gpu>\n</nvidia_smi_log>"
CASES_OF_ONE = [
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
    text = HEALTHY.replace("</temperature>", "<temperature>", 1).replace("210 MHz", "300 MHz")
    text = text[::-1].replace("C 03>pmet_upg<", "C 88>pmet_upg<", 1)[::-1]
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
        "@harness:cgroup\ncpu.max ² 1\nmemory.max ²\nmemory.max " + "9" * 5000,
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
