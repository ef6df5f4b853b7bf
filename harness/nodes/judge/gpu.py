"""Verdicts on GPUs: driver, health, other users, and support by torch.

Error messages of nvidia-smi, each with its remedy.
"""

import re
from collections import Counter
from collections.abc import Iterable

from harness.domain.torch_builds import kernel_support, where_built
from harness.nodes.facts import GpuFacts, Judgement, SmiGpu, Status, critical, ok, unknown, warn
from harness.nodes.parse_gpu import BROKEN
from harness.nodes.survey import HostReport, Survey
from harness.units import format_bytes

_SEE = "ssh {host} sudo dmesg | grep -i -E 'nvrm|xid'"
_REINSTALL = "ssh {host} sudo apt-get install --reinstall nvidia-driver && sudo reboot"

# The first match applies.
_REMEDIES = [
    (
        "version mismatch",
        "ssh {host} sudo reboot: the driver was updated, and the old one is still loaded",
    ),
    (
        "insufficient permission|permission denied",
        "ssh {host} ls -l /dev/nvidia*, then add the account to the group that owns them: "
        "ssh {host} sudo usermod -aG video $USER, and log in again",
    ),
    (
        "requires reset",
        "ssh {host} sudo nvidia-smi --gpu-reset, with no program on the GPU, or reboot {host}",
    ),
    (
        "is lost|fallen off|device handle",
        "ssh {host} sudo reboot; if the GPU is lost again, check its seat and power: " + _SEE,
    ),
    (
        "blocked by the operating system",
        "on Windows: update the NVIDIA driver, then `wsl --update` and `wsl --shutdown`",
    ),
    (
        "no devices were found",
        "ssh {host} lspci | grep -i nvidia; a card that is listed there needs its driver: " + _SEE,
    ),
    (
        "nvml: unknown error|nvml: not found",
        "restart the container, if {host} is one: it loses GPUs when systemd reloads; else " + _SEE,
    ),
    (
        "in time",
        "ssh {host} sudo reboot: a driver that hangs does not recover; why: " + _SEE,
    ),
    (
        "segmentation|core dumped|bus error|illegal instruction|status (13[2-9]|14[0-9])",
        _REINSTALL + "; if it crashes again, " + _SEE,
    ),
    (
        "libnvidia-ml|cannot open shared object|not found|exec format|no such file",
        "driver and library are not whole: " + _REINSTALL,
    ),
]  # fmt: skip


def remedy_of(words: str, host: str) -> str:
    """The remedy for a failure of nvidia-smi, by its message."""
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, words, re.IGNORECASE):
            return remedy.format(host=host)
    return f"{_SEE}; then {_REINSTALL}".format(host=host)


# A display server and the driver's reserve need less than this.
IN_USE_BYTES = 500 * 2**20
BUSY_UTILIZATION = 0.1
HOT_C = 85.0
# Boards with two cards give each 8 of 16 lanes, which is no fault.
FEW_LANES = 4
# Idle clocks and power caps set by an administrator are not faults.
_BAD_THROTTLES = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "too hot (hardware)",
    "sw_thermal_slowdown": "too hot (driver)",
    "hw_power_brake_slowdown": "power supply brake",
}
# An error in any other field loses only that value.
_VITAL = re.compile(
    "memory|total|used|free|clock|ecc|error|uncorr|dram|sram|util|name|uuid|gpu_temp|pstate"
)


def judge_gpu(report: HostReport, survey: Survey) -> list[Judgement]:
    """Every GPU works, is idle, cool and unthrottled, and has the same driver as the others."""
    gpu = report.facts.gpu
    if gpu.smi_error:
        return _judge_failure(report)
    if not gpu.gpus:
        return _judge_absence(report, survey)
    verdicts = [v for one in gpu.gpus for v in _judge_one(report, one)]
    verdicts += _judge_host(report, survey)
    return verdicts or ok(describe_gpus(gpu))


def _has_no_card(gpu: GpuFacts) -> bool:
    """Whether nvidia-smi finds no GPU because the host has none."""
    words = "no devices were found|couldn't communicate"
    return not gpu.n_cards and bool(re.search(words, gpu.smi_error, re.IGNORECASE))


def _judge_failure(report: HostReport) -> list[Judgement]:
    gpu = report.facts.gpu
    remedy = remedy_of(f"{gpu.smi_error} status {gpu.smi_returncode}", report.name)
    if _has_no_card(gpu):
        return warn(
            f"no NVIDIA card on the bus, yet nvidia-smi is installed: {gpu.smi_error}",
            f"nothing, if {report.name} is to have none; else {remedy}",
        )
    status = f" (status {gpu.smi_returncode})" if gpu.smi_returncode else ""
    return critical(f"nvidia-smi: {gpu.smi_error}{status}", remedy)


def describe_gpus(gpu: GpuFacts) -> str:
    """Count of GPUs per model, memory and clock; the driver."""
    models = Counter(map(_describe_model, gpu.gpus))
    names = ", ".join(f"{count}x {name}" for name, count in models.items())
    return f"{names}, driver {gpu.driver}"


def _describe_model(gpu: SmiGpu) -> str:
    n_bytes = gpu.memory_total_bytes
    memory = "with the host's memory" if n_bytes is None else format_bytes(n_bytes)
    if gpu.clock_mhz is None or gpu.clock_max_mhz is None:
        return f"{gpu.name} {memory}"
    return f"{gpu.name} {memory} at {gpu.clock_mhz:.0f}/{gpu.clock_max_mhz:.0f} MHz"


def _judge_absence(report: HostReport, survey: Survey) -> list[Judgement]:
    gpu = report.facts.gpu
    if gpu.n_cards:
        return critical(
            f"{gpu.n_cards} NVIDIA card(s) on the bus, but no driver that sees one",
            _REINSTALL.format(host=report.name),
        )
    with_gpus = [other.name for other in survey.answered if other.facts.gpu.gpus]
    if not with_gpus:
        return ok("no GPU")
    return warn(
        f"no GPU, unlike {', '.join(with_gpus)}: all ranks would use gloo and wait for its CPU",
        f"take {report.name} out of the hostfile for GPU runs",
    )


def _judge_one(report: HostReport, gpu: SmiGpu) -> list[Judgement]:
    name = f"GPU {gpu.index} ({gpu.name})"
    verdicts = _judge_errors(report, gpu, name)
    if any(one.status is Status.CRITICAL for one in verdicts):
        return verdicts
    verdicts += _judge_memory(report, gpu, name)
    bad = [text for reason, text in _BAD_THROTTLES.items() if reason in gpu.throttle_reasons]
    if bad:
        remedy = (
            f"clean fans and airflow, check power: ssh {report.name} nvidia-smi -q -d PERFORMANCE"
        )
        verdicts += warn(f"{name} is slowed down: {', '.join(bad)}", remedy)
    elif gpu.temperature_c is not None and gpu.temperature_c >= HOT_C:
        verdicts += warn(f"{name} is at {gpu.temperature_c:.0f} C", "clean fans and airflow")
    if gpu.fabric:
        remedy = f"ssh {report.name} sudo systemctl restart nvidia-fabricmanager"
        verdicts += warn(f"{name} waits for its NVSwitch fabric ({gpu.fabric})", remedy)
    lanes, most_lanes = gpu.pcie_lanes or (0, 0)
    if lanes < most_lanes and lanes <= FEW_LANES:
        verdicts += warn(
            f"{name} has {lanes} of {most_lanes} PCIe lanes: copies to and from it are slow",
            "seat the card again, without a riser, or move it to a slot with more lanes",
        )
    if gpu.mig_mode == "Enabled":
        verdicts += warn(
            f"{name} is cut into MIG instances ({gpu.n_mig_devices} made): a rank sees one "
            "slice only",
            f"ssh {report.name} sudo nvidia-smi -i {gpu.index} -mig 0",
        )
    return verdicts + _judge_users(report, gpu, name)


def _judge_errors(report: HostReport, gpu: SmiGpu, name: str) -> list[Judgement]:
    """Verdicts on the fields that nvidia-smi could not read."""
    verdicts: list[Judgement] = []
    for words, fields in gpu.errors:
        remedy = remedy_of(words, report.name)
        shown = ", ".join(fields[:4]) + (f" and {len(fields) - 4} more" if fields[4:] else "")
        if words == BROKEN:
            text = f"{name} cannot be judged: nvidia-smi printed {words}"
            verdicts += critical(text, f"ssh {report.name} nvidia-smi; a newer driver")
        elif re.search("permission", words, re.IGNORECASE):
            if gpu.mig_mode != "Enabled":  # with MIG, only root may read these fields
                verdicts += warn(f"{name} cannot be read whole: {words} ({shown})", remedy)
        elif "total" in fields or re.search("lost|fallen|requires", words, re.IGNORECASE):
            verdicts += critical(f"{name} does not answer: {words}", remedy)
        elif any(_VITAL.search(field) for field in fields):
            verdicts += critical(f"{name} is faulty: {words} in {shown}", remedy)
        else:
            verdicts += warn(f"{name} has {words} in {shown}", remedy)
    return verdicts


def _judge_memory(report: HostReport, gpu: SmiGpu, name: str) -> list[Judgement]:
    """Verdicts on memory errors and on the recovery that the driver requests."""
    verdicts = []
    reset = f"ssh {report.name} sudo nvidia-smi --gpu-reset -i {gpu.index}"
    if gpu.ecc_uncorrected:
        verdicts += critical(
            f"{name} has {gpu.ecc_uncorrected} uncorrectable memory errors: results are not "
            "to be trusted",
            f"{reset}; if they return, replace it",
        )
    if gpu.remap == "failure":
        text = f"{name} has bad memory that could not be remapped"
        verdicts += critical(text, "replace it: it is worn out")
    elif gpu.remap:
        text = f"{name} has bad memory, which is remapped at its next reset"
        verdicts += warn(text, f"{reset}, or reboot {report.name}")
    if gpu.recovery:
        text = f"{name} needs to be recovered, by its driver: {gpu.recovery}"
        verdicts += critical(text, f"{reset}, or reboot {report.name}")
    return verdicts


def _judge_users(report: HostReport, gpu: SmiGpu, name: str) -> list[Judgement]:
    used = gpu.memory_used_bytes or 0
    busy = (gpu.utilization or 0.0) > BUSY_UTILIZATION
    if used <= IN_USE_BYTES and not busy:
        return []
    users = [
        f"{process.name.rsplit('/', 1)[-1]} (pid {process.pid}"
        + (f" of {process.user}" if process.user else "")
        + (f", {format_bytes(process.memory_bytes)}" if process.memory_bytes else "")
        + ")"
        for process in gpu.processes
    ]
    who = ", ".join(users) or "a process that nvidia-smi does not name"
    text = f"{name} is in use: {format_bytes(used)} held, {gpu.utilization or 0:.0%} busy, by {who}"
    owners = sorted({p.user for p in gpu.processes if p.user})
    ask = f"wait, or ask {', '.join(owners)}" if owners else "wait, or find its owner"
    return warn(text, f"{ask}: ssh {report.name} nvidia-smi")


def _judge_host(report: HostReport, survey: Survey) -> list[Judgement]:
    gpu, slots = report.facts.gpu, report.probe.host.slots
    verdicts = []
    n_missing = max(gpu.n_cards, gpu.n_attached or 0) - len(gpu.gpus)
    if n_missing > 0:
        text = f"{n_missing} of {n_missing + len(gpu.gpus)} NVIDIA card(s) are not shown"
        verdicts += critical(f"{text} by nvidia-smi", remedy_of("is lost", report.name))
    if gpu.smi_remarks:
        words = " / ".join(gpu.smi_remarks[:3])[:300]
        text = f"nvidia-smi says more (status {gpu.smi_returncode or 0}): {words}"
        verdicts += warn(text, remedy_of(words, report.name))
    elif gpu.smi_returncode:
        text = f"nvidia-smi ended with status {gpu.smi_returncode} after its answer"
        verdicts += warn(text, remedy_of(f"status {gpu.smi_returncode}", report.name))
    drivers = [o.facts.gpu.driver for o in survey.answered if o.facts.gpu.driver]
    usual = Counter(drivers).most_common(1)[0][0] if drivers else ""
    if gpu.driver and gpu.driver != usual:
        text = f"driver {gpu.driver}, most others {usual}"
        verdicts += warn(text, f"install driver {usual} on {report.name}")
    if slots is not None and slots > len(gpu.gpus):
        text = f"{slots} slots share {len(gpu.gpus)} GPU(s): NCCL refuses two ranks on one"
        verdicts += warn(text, f"write `{report.name} slots={len(gpu.gpus)}` in the hostfile")
    return verdicts


def judge_torch_cuda(report: HostReport, survey: Survey) -> list[Judgement]:
    """This torch build has code for each GPU; with --deep, a kernel gives the correct result."""
    facts = report.facts
    gpu = facts.gpu
    if not gpu.gpus:
        if gpu.smi_error and not _has_no_card(gpu):
            return unknown("nvidia-smi fails: see gpu", remedy_of(gpu.smi_error, report.name))
        return ok("no GPU to support")
    if not facts.has_package("torch"):
        remedy = f"bash setup/sync_env.sh {survey.order.hostfile}"
        return unknown("no torch in the environment", remedy)
    assert facts.python is not None
    version = facts.python.packages["torch"]
    if facts.python.torch_cuda is None:
        return critical(
            f"torch {version} is a build without CUDA: the GPU would stand idle",
            f"on {report.name}: PIP_EXTRA_INDEX_URL=INDEX bash setup/install.sh --torch "
            f"{version.split('+')[0]}+cuVERSION; pytorch.org shows INDEX and VERSION",
        )
    if gpu.torch is None:
        error = gpu.torch_error or "torch was not asked"
        remedy = f"ssh {report.name} {facts.environment}/bin/python -c 'import torch'"
        remedy += " (a slow file system: raise --timeout)" if "in time" in error else ""
        return critical(f"torch fails: {error}", remedy)
    return _judge_build(report, version)


def _judge_build(report: HostReport, version: str) -> list[Judgement]:
    gpu = report.facts.gpu
    torch = gpu.torch
    assert torch is not None
    verdicts = []
    needed, offered = _major(torch.cuda or ""), _major(gpu.cuda)
    if needed and offered and needed > offered:
        text = f"torch {version} needs CUDA {torch.cuda}, the driver offers {gpu.cuda}"
        verdicts += critical(text, "update the driver, or install a torch for its CUDA")
    elif not torch.is_available:
        remedy = f"ssh {report.name} 'echo $CUDA_VISIBLE_DEVICES; nvidia-smi; ls -l /dev/nvidia*'"
        verdicts += critical(f"torch {version} sees no GPU", remedy)
    for index, capability in enumerate(_capabilities(gpu)):
        name = f"GPU {index} (sm_{capability[0]}{capability[1]})"
        support = kernel_support(capability, torch.arch_list)
        has = " ".join(torch.arch_list)
        remedy = f"install a torch build that holds sm_{capability[0]}{capability[1]}"
        remedy += f": {where_built(capability)}"
        if support == "none":
            verdicts += critical(f"torch {version} has no code for {name}: {has}", remedy)
        elif support == "jit":
            text = f"torch {version} compiles for {name} at each first start (PTX): {has}"
            verdicts += warn(text, remedy)
    for index, error in enumerate(torch.kernel_errors or ()):
        if error:
            text = f"a kernel fails on GPU {index}: {error}"
            verdicts += critical(text, _SEE.format(host=report.name))
    if verdicts:
        return verdicts
    ran = "a kernel ran on each" if torch.kernel_errors is not None else "not run (--deep runs it)"
    return ok(f"torch {version} has code for every GPU, {ran}")


def _major(release: str) -> int:
    match = re.match(r"(\d+)\.", release)
    return int(match[1]) if match else 0


def _capabilities(gpu: GpuFacts) -> Iterable[tuple[int, int]]:
    """Compute capabilities by nvidia-smi, or by torch if the driver is too old to report them."""
    capabilities = [one.capability for one in gpu.gpus if one.capability is not None]
    if len(capabilities) == len(gpu.gpus):
        return capabilities
    return gpu.torch.capabilities if gpu.torch else ()
