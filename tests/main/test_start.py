"""A rank that ends before the first run begins has a row in the results of rank 0's host."""

import os
import sys

import pytest
from launching import MPIRUN, NEEDS_MPIRUN, ROOT, completed

from harness.measure.store import find_runs

pytestmark = NEEDS_MPIRUN

CHECK = "see its output, and run: bash setup/check_nodes.sh HOSTFILE"
KILLED = "its first process was killed by SIGKILL"
EXIT = "its first process ended with exit code"
# Each rank has a directory of its own for results, as hosts that share no disk.
SCRIPT = """
cd "$1/$OMPI_COMM_WORLD_RANK" && PYTHONPATH=$PWD exec "$2/entry.sh" train --model lenet
"""


@pytest.mark.parametrize(
    ("rank", "torch", "code", "reason"),
    [
        (0, "import os; os.kill(os.getpid(), 9)", 137, KILLED),
        (1, "import os; os.kill(os.getpid(), 9)", 137, KILLED),
        (1, "import os; os._exit(0)", 1, f"{EXIT} 0: {CHECK}"),
        (1, "import sys; sys.exit(3)", 3, f"{EXIT} 3: SystemExit: 3; {CHECK}"),
        (
            1,
            "raise ImportError('no libcudart')",
            1,
            f"{EXIT} 1: ImportError: no libcudart; {CHECK}",
        ),
    ],
)
def test_a_rank_that_ends_early_has_a_row_where_rank_0_is(tmp_path, rank, torch, code, reason):
    for k in (0, 1):
        (tmp_path / str(k)).mkdir()
        # The other rank, as after --help, waits for this one, without an import of seconds.
        (tmp_path / str(k) / "torch.py").write_text(torch if k == rank else "raise SystemExit(0)")
    command = [MPIRUN, "--oversubscribe", "-np", "2", "bash", "-c", SCRIPT, "bash"]
    done = completed(*command, tmp_path, ROOT, HARNESS_VENV=sys.prefix)
    assert done.returncode == code, done.stderr
    ((run_dir, header),) = find_runs(tmp_path / "0" / "results")[0]
    label = f"rank {rank} ({os.uname().nodename})"
    assert (header.status, header.reason) == ("crash", f"{label}: {reason}; no run was open")
    assert run_dir.name.endswith("-train-start")
    assert not (tmp_path / "1" / "results").exists()
