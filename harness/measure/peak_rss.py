"""Peak memory of this process."""

import resource
from pathlib import Path


def peak_rss_bytes() -> int:
    """Peak resident set; on Linux since /proc/self/clear_refs last reset it.

    Elsewhere ru_maxrss, which includes the parent's memory at the fork.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
