"""The last-level cache of a device: its size, and flushing it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from harness.errors import ConfigError
from harness.units import parse_bytes

_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Size assumed for a CPU without that directory (as in some containers).
_UNKNOWN_BYTES = 32 << 20
_LARGEST_BYTES = 256 << 20


def last_cache_bytes(device: torch.device) -> int:
    """Size of a GPU's L2 cache, or of a CPU core's last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_read_size(entry / "size") for entry in _CPU_CACHES.glob("index*")]
    return min(max(sizes, default=0) or _UNKNOWN_BYTES, _LARGEST_BYTES)


def _read_size(path: Path) -> int:
    try:
        return parse_bytes(path.read_text().strip() + "iB")  # the kernel writes 32768K
    except (OSError, ConfigError):
        return 0


class CacheFlush:
    """Evicts the contents of the cache by writing a buffer of the cache's size."""

    def __init__(self, device: torch.device) -> None:
        self.n_bytes = last_cache_bytes(device)
        self._buffer = torch.empty(self.n_bytes, dtype=torch.uint8, device=device)

    def __call__(self, n_bytes: float = math.inf) -> None:
        """Queue the write on the current stream; does not wait for it.

        Args:
            n_bytes: how much to evict; all by default.
        """
        self._buffer[: int(min(n_bytes, self.n_bytes))].zero_()
