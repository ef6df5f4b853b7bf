"""What a rank runs; one module per workload."""

from __future__ import annotations

from harness.workloads.contract import Workload

WORKLOADS: dict[str, Workload] = {}
