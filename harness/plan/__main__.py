"""`python -m harness.plan search|advise|show|convert`: plan without running a step."""

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input, 130 when interrupted before any plan."""
    # Planning multiplies no matrices, and the threads of numpy's BLAS spin while they wait: they
    # took as much time as planning a graph of 400 operators. To be set before numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from harness.plan.commands import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
