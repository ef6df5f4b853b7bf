"""Error messages of nvidia-smi, each with its remedy."""

from __future__ import annotations

import re

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
