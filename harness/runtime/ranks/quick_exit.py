"""End the process that imports this module without freeing its modules, which takes torch a second.

The fork server imports it before all others, so that its own exit comes after theirs.
"""

import atexit
import os


def _end(pid: int) -> None:
    if os.getpid() == pid:  # not a fork's
        os._exit(0)


atexit.register(_end, os.getpid())
