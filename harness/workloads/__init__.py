"""The WORKLOADS table: one package per workload, imported when it is run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch
    from harness.workloads.common.contract import Workload

WORKLOADS = {
    "matmul": "FLOP/s of each device, and of all devices together on one product (SUMMA)",
    "links": "latency and bandwidth of every link and collective; writes the cluster file",
    "profile": "time every operator of a model on each kind of device; search reads the file",
    "search": "find the fastest strategy for a model on these ranks, and explain it",
    "train": "train a model by any strategy: throughput, phases, communication, prediction",
}


def workload_module(name: str) -> str:
    return f"{__name__}.{name}.workload"


def load_workload(name: str) -> Workload:
    workload: Workload = import_module(workload_module(name)).WORKLOAD
    return workload
