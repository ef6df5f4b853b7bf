"""From `nvidia-smi -q -x` and torch's own words to GpuFacts.

nvidia-smi's XML changes between drivers (clocks_throttle_reasons became clocks_event_reasons in
R535; ECC counters have three shapes), so that tags are looked up by what is stable in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Protocol
from xml.etree import ElementTree

from harness.nodes.facts import Gpu, GpuFacts, GpuProcess, TorchCuda


class SectionLike(Protocol):
    """A part of the probe's text."""

    @property
    def lines(self) -> tuple[str, ...]: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def text(self) -> str: ...


def parse_gpus(sections: Mapping[str, SectionLike]) -> GpuFacts:
    """Read cards, driver, GPUs, who uses them, and what torch can do with them."""
    n_cards = len(sections["nvidia_cards"].lines)
    smi = sections["nvidia_smi"]
    if not smi.lines:
        return GpuFacts(n_cards=n_cards)
    root = _xml(smi.text)
    if root is None:
        error = "nvidia-smi did not answer in time" if smi.returncode == 124 else smi.lines[0]
        return GpuFacts(n_cards=n_cards, has_smi=True, smi_error=error)
    users = dict(line.split(" ", 1) for line in sections["gpu_users"].lines if " " in line)
    capabilities = _capabilities(sections["compute_capability"].lines)
    torch, torch_error = _torch(sections["torch_cuda"])
    return GpuFacts(
        n_cards=n_cards,
        has_smi=True,
        driver=root.findtext("driver_version", ""),
        cuda=root.findtext("cuda_version", ""),
        gpus=tuple(
            _gpu(index, element, users, capabilities)
            for index, element in enumerate(root.findall("gpu"))
        ),
        torch=torch,
        torch_error=torch_error,
    )


def _xml(text: str) -> ElementTree.Element | None:
    start, end = text.find("<?xml"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < 0:
        return None
    try:
        return ElementTree.fromstring(text[start : end + len("</nvidia_smi_log>")])
    except ElementTree.ParseError:
        return None


def _gpu(
    index: int,
    element: ElementTree.Element,
    users: Mapping[str, str],
    capabilities: Mapping[str, tuple[int, int]],
) -> Gpu:
    uuid = element.findtext("uuid", "")
    utilization = _quantity(element.findtext("utilization/gpu_util"))
    return Gpu(
        index=index,
        name=element.findtext("product_name", ""),
        uuid=uuid,
        memory_total_bytes=_mib(element.findtext("fb_memory_usage/total")),
        memory_used_bytes=_mib(element.findtext("fb_memory_usage/used")),
        utilization=None if utilization is None else utilization / 100,
        temperature_c=_quantity(element.findtext("temperature/gpu_temp")),
        clock_mhz=_quantity(element.findtext("clocks/sm_clock")),
        clock_max_mhz=_quantity(element.findtext("max_clocks/sm_clock")),
        throttle_reasons=_throttle_reasons(element),
        ecc_mode=_word(element.findtext("ecc_mode/current_ecc")),
        ecc_uncorrected=_uncorrected(element),
        mig_mode=_word(element.findtext("mig_mode/current_mig")),
        processes=tuple(
            GpuProcess(
                pid=int(process.findtext("pid", "0")),
                name=process.findtext("process_name", ""),
                memory_bytes=_mib(process.findtext("used_memory")),
                user=users.get(process.findtext("pid", ""), ""),
            )
            for process in element.findall("processes/process_info")
            if process.findtext("pid", "").isdigit()
        ),
        capability=capabilities.get(uuid),
    )


def _quantity(text: str | None) -> float | None:
    """`1725 MHz`, `63 C`, `45 %`; None for `N/A` and its like."""
    match = re.match(r"\s*(-?\d+(?:\.\d+)?)", text or "")
    return float(match[1]) if match else None


def _mib(text: str | None) -> int | None:
    """nvidia-smi's MiB in bytes."""
    value = _quantity(text)
    return None if value is None else round(value) * 2**20


def _word(text: str | None) -> str:
    return "" if text is None or text in ("N/A", "[N/A]") else text


def _throttle_reasons(element: ElementTree.Element) -> tuple[str, ...]:
    for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
        reasons = element.find(name)
        if reasons is not None:
            active = [child.tag for child in reasons if (child.text or "").strip() == "Active"]
            return tuple(re.sub(r"^clocks_\w+?_reason_", "", tag) for tag in active)
    return ()


def _uncorrected(element: ElementTree.Element) -> int | None:
    """Uncorrectable errors since the last reset, over all memories.

    Ampere and later count SRAM and DRAM by `*_uncorrectable*`; Volta and before count
    `double_bit/total`, of which other double_bit counters are parts.
    """
    volatile = element.find("ecc_errors/volatile")
    if volatile is None:
        return None
    total = _quantity(volatile.findtext("double_bit/total"))
    if total is not None:
        return int(total)
    counts = [_quantity(child.text) for child in volatile if "uncorrectable" in child.tag]
    known = [int(count) for count in counts if count is not None]
    return sum(known) if known else None


def _capabilities(lines: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """`GPU-..., 8.6`; older drivers do not know the field."""
    found = (re.match(r"(\S+), (\d+)\.(\d+)$", line) for line in lines)
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


def _torch(section: SectionLike) -> tuple[TorchCuda | None, str]:
    if not section.lines:
        return None, ""
    try:
        answer = json.loads(section.lines[-1])
        errors = answer.get("kernel_errors")
        torch = TorchCuda(
            cuda=answer["cuda"],
            arch_list=tuple(map(str, answer["arch_list"])),
            is_available=bool(answer["is_available"]),
            capabilities=tuple((int(a), int(b)) for a, b in answer.get("capabilities", [])),
            kernel_errors=None if errors is None else tuple(map(str, errors)),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        timed_out = section.returncode == 124
        return None, "torch did not import in time" if timed_out else section.lines[-1]
    return torch, ""
