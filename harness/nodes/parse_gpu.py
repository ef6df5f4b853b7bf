"""Parse `nvidia-smi -q -x` and the output of kernel.py into GpuFacts.

nvidia-smi's XML changes between drivers (clocks_throttle_reasons became clocks_event_reasons in
R535; ECC counters have three shapes), so tags are matched by their stable parts. Some drivers
print broken XML and do not escape names of processes. Each GPU's element is therefore parsed by
itself, without unneeded parts, so that a broken one does not affect the others.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from harness.inputs import find_int, find_number
from harness.nodes.facts import GpuFacts, GpuProcess, Section, SmiGpu, TorchCuda

_MOST_MIB = 10**9
BROKEN = "broken XML"
# Values by which various drivers mark an absent feature.
_ABSENT = ("n/a", "not supported", "requested functionality has been deprecated", "none", "")
_ERRORS = (
    "err!", "error", "lost", "insufficient permissions", "fallen off", "blocked", "timeout",
    "requires reset", "corrupted",
)  # fmt: skip
# Characters that are invalid in XML or control a terminal.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")


def parse_gpus(sections: Mapping[str, Section]) -> GpuFacts:
    """Parse cards, driver, GPUs, their processes, and torch's support for them."""
    n_cards = len(sections["nvidia_cards"].lines)
    smi = sections["nvidia_smi"]
    if not smi.lines and smi.returncode is None:
        return GpuFacts(n_cards=n_cards)
    text, remarks = _split(smi.text)
    pieces = _pieces(text)
    if not pieces:
        return GpuFacts(
            n_cards=n_cards, smi_error=_failure(smi, remarks), smi_returncode=smi.returncode
        )
    users = dict(line.split(" ", 1) for line in sections["gpu_users"].lines if " " in line)
    capabilities = _capabilities(sections["compute_capability"].lines)
    torch, torch_error = _torch(sections["torch_cuda"])
    return GpuFacts(
        n_cards=n_cards,
        smi_returncode=smi.returncode if smi.returncode or remarks else None,
        smi_remarks=remarks,
        driver=_word(_between(text, "driver_version")),
        cuda=_word(_between(text, "cuda_version")),
        n_attached=find_int(_between(text, "attached_gpus"), 0, 1024),
        gpus=tuple(_gpu(index, *piece, users, capabilities) for index, piece in enumerate(pieces)),
        torch=torch,
        torch_error=torch_error,
    )


def _failure(smi: Section, remarks: tuple[str, ...]) -> str:
    """nvidia-smi's message, or its exit status if it printed none."""
    if smi.returncode in (124, 137):
        return "nvidia-smi did not answer in time"
    words = " / ".join(remarks[:3])
    if not words:
        return f"printed no GPU and ended with status {smi.returncode}"
    return words if len(words) <= 300 else f"{words[:297]}..."


def _split(text: str) -> tuple[str, tuple[str, ...]]:
    """The XML (to the end of the text if it is cut off) and the other lines."""
    text = _CONTROL.sub("", text)
    starts = [at for at in (text.find("<?xml"), text.find("<nvidia_smi_log")) if at >= 0]
    start = min(starts, default=len(text))
    mark = "</nvidia_smi_log>"
    end = text.rfind(mark)
    end = end + len(mark) if end >= start else len(text)
    around = [*text[:start].splitlines(), *text[end:].splitlines()]
    return text[start:end], tuple(line.strip() for line in around if line.strip())


def _between(text: str, tag: str) -> str:
    """The text of the first element with this tag and no attributes."""
    _, opened, rest = text.partition(f"<{tag}>")
    content, closed, _ = rest.partition(f"</{tag}>")
    return content.strip() if opened and closed else ""


def _pieces(text: str) -> list[tuple[str, ElementTree.Element | None]]:
    """Product name and element of each GPU; None: its XML is broken."""
    parts = [part.partition("</gpu>") for part in _escape_names(text).split("<gpu ")[1:]]
    return [
        (_between(body, "product_name") or "unknown", _element(body) if end else None)
        for body, end, _ in parts
    ]


def _element(body: str) -> ElementTree.Element | None:
    before, start, after = body.partition("<supported_clocks>")
    if start and "</supported_clocks>" in after:  # broken in several drivers, and not needed
        body = before + after.rpartition("</supported_clocks>")[2]
    try:
        return ElementTree.fromstring(f"<gpu {body}</gpu>")
    except (ElementTree.ParseError, RecursionError):
        return None


def _escape_names(text: str) -> str:
    """Escape the names of processes, whether or not the driver has escaped them."""
    first, *rest = text.split("<process_name>")
    parts = [first]
    for part in rest:
        name, end, after = part.partition("</process_name>")
        bare = name.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        parts.append(f"{escape(bare)}{end}{after}" if end else part)
    return "<process_name>".join(parts)


def _gpu(
    index: int,
    name: str,
    element: ElementTree.Element | None,
    users: Mapping[str, str],
    capabilities: Mapping[str, tuple[int, int]],
) -> SmiGpu:
    if element is None:
        return SmiGpu(index=index, name=name, errors=((BROKEN, ("all",)),))
    uuid = element.findtext("uuid", "")
    utilization = _quantity(element.findtext("utilization/gpu_util"))
    return SmiGpu(
        index=index,
        name=name,
        uuid=uuid,
        memory_total_bytes=_mib(element.findtext("fb_memory_usage/total")),
        memory_used_bytes=_mib(element.findtext("fb_memory_usage/used")),
        utilization=None if utilization is None else utilization / 100,
        temperature_c=_quantity(element.findtext("temperature/gpu_temp")),
        clock_mhz=_quantity(element.findtext("clocks/sm_clock")),
        clock_max_mhz=_quantity(element.findtext("max_clocks/sm_clock")),
        throttle_reasons=_throttle_reasons(element),
        ecc_uncorrected=_uncorrected(element),
        mig_mode=_word(element.findtext("mig_mode/current_mig")),
        n_mig_devices=len(element.findall("mig_devices/mig_device")),
        remap=_remap(element),
        recovery=_word(element.findtext("gpu_recovery_action")) or _reset(element),
        fabric=_fabric(element),
        pcie_lanes=_pcie_lanes(element),
        errors=_errors(element),
        processes=tuple(
            GpuProcess(
                pid=pid,
                name=process.findtext("process_name", ""),
                memory_bytes=_mib(process.findtext("used_memory")),
                user=users.get(process.findtext("pid", ""), ""),
            )
            for process in element.findall("processes/process_info")
            if (pid := find_int(process.findtext("pid", ""), 0, 2**31)) is not None
        ),
        capability=capabilities.get(uuid),
    )


def _quantity(text: str | None) -> float | None:
    """The number in `1725 MHz`, `63 C` or `45 %`; None for `N/A` and similar."""
    words = (text or "").split()
    return find_number(words[0], -1e6, _MOST_MIB) if words else None


def _mib(text: str | None) -> int | None:
    """nvidia-smi's MiB in bytes."""
    value = _quantity(text)
    return None if value is None or value < 0 else round(value) * 2**20


def _plain(text: str | None) -> str:
    return (text or "").strip().strip("[]")


def _is_error(text: str) -> bool:
    return any(word in text.lower() for word in _ERRORS)


def _word(text: str | None) -> str:
    word = _plain(text)
    return "" if word.lower() in _ABSENT or _is_error(word) else word


def _errors(element: ElementTree.Element) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Error messages, each with its fields; names of processes are no fields."""
    found: dict[str, list[str]] = defaultdict(list)
    for child in element.iter():
        words = _plain(child.text)
        is_field = len(child) == 0 and child.tag != "process_name" and len(words) < 80
        if is_field and _is_error(words):
            found[words].append(child.tag)
    total = _plain(element.findtext("fb_memory_usage/total"))
    if _word(total) and _quantity(total) is None:  # other than that it has no memory of its own
        found[total].append("total")
    return tuple((words, tuple(dict.fromkeys(tags))) for words, tags in found.items())


def _reset(element: ElementTree.Element) -> str:
    """The reset that drivers before R560 request."""
    for tag, action in (
        ("reset_required", "Reset"),
        ("drain_and_reset_recommended", "Drain and Reset"),
    ):
        if _plain(element.findtext(f"gpu_reset_status/{tag}")).lower() == "yes":
            return action
    return ""


def _fabric(element: ElementTree.Element) -> str:
    """State of the NVSwitch fabric; empty if it is ready, or if the GPU has none."""
    state, status = (_word(element.findtext(f"fabric/{name}")) for name in ("state", "status"))
    is_ready = state in ("", "Completed") and status in ("", "Success")
    return "" if is_ready else f"{state} {status}".strip()


def _pcie_lanes(element: ElementTree.Element) -> tuple[int, int] | None:
    """Lanes in use and at most, of widths such as `16x`."""
    widths = "pci/pci_gpu_link_info/link_widths"
    texts = (element.findtext(f"{widths}/{name}_link_width", "") for name in ("current", "max"))
    current, most = (find_int(text.strip().removesuffix("x"), 1, 64) for text in texts)
    return None if current is None or most is None else (current, most)


def _remap(element: ElementTree.Element) -> str:
    """State of remapping: rows on Ampere and later, retired pages on older GPUs."""

    def has(*paths: str) -> bool:
        return any(_plain(element.findtext(path)).lower() == "yes" for path in paths)

    if has("remapped_rows/remapped_row_failure"):
        return "failure"
    pages = ("pending_retirement", "pending_blacklist")
    waits = has("remapped_rows/remapped_row_pending", *(f"retired_pages/{name}" for name in pages))
    return "pending" if waits else ""


def _throttle_reasons(element: ElementTree.Element) -> tuple[str, ...]:
    for name in ("clocks_event_reasons", "clocks_throttle_reasons"):
        reasons = element.find(name)
        if reasons is not None:
            active = [child.tag for child in reasons if _plain(child.text) == "Active"]
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
    """Parse lines `GPU-..., 8.6`; older drivers do not know the field."""
    found = (re.match(r"(\S+), ([0-9]{1,3})\.([0-9]{1,3})$", line) for line in lines)
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


def _torch(section: Section) -> tuple[TorchCuda | None, str]:
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        timed_out = section.returncode == 124
        return None, "torch did not import in time" if timed_out else section.lines[-1]
    return torch, ""
