"""What a rank runs; one module per workload."""

from __future__ import annotations

from harness.workloads.common.contract import Workload
from harness.workloads.links.workload import LINKS
from harness.workloads.matmul.workload import MATMUL
from harness.workloads.profile.workload import PROFILE
from harness.workloads.search.workload import SEARCH
from harness.workloads.train.workload import TRAIN

WORKLOADS: dict[str, Workload] = {
    "matmul": MATMUL,
    "links": LINKS,
    "profile": PROFILE,
    "search": SEARCH,
    "train": TRAIN,
}
