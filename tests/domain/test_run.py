"""Facts of a rank in a run's header."""

import pytest

from harness.domain.run import RankInfo

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "gib", "expected"),
    [("cuda:0", 80.75, 76 * GIB), ("cpu", 4, 1.75 * GIB), ("cpu", 0.25, 1)],
)
def test_plans_fill_a_device_but_for_its_process_and_allocator(device, gib, expected):
    info = RankInfo(
        rank=0, hostname="h", device=device, device_kind="", n_cores=1,
        memory_bytes=round(gib * GIB),
    )  # fmt: skip
    assert info.training_bytes == expected
