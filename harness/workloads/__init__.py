"""What a rank runs; one module per workload."""

from __future__ import annotations

from harness.workloads.contract import Workload
from harness.workloads.links import LINKS
from harness.workloads.matmul import MATMUL
from harness.workloads.plan_search import SEARCH
from harness.workloads.profile import PROFILE
from harness.workloads.train import TRAIN

WORKLOADS: dict[str, Workload] = {
    "matmul": MATMUL,
    "links": LINKS,
    "profile": PROFILE,
    "search": SEARCH,
    "train": TRAIN,
}
