"""What each device takes for each operator by itself: what stages are balanced by."""

from __future__ import annotations

import numpy as np

from harness.domain.strategy import OperatorPlan
from harness.plan.simulate.simulator import Simulator, Trial
from harness.plan.simulate.transfers import Floats


def operator_seconds(simulator: Simulator, batch: int, n_microbatches: int = 1) -> Floats:
    """(n_devices, n_placed) of a microbatch, forward and backward: each operator whole on each
    device."""
    devices, rates = simulator.cluster.devices, np.asarray(simulator.options.stream_s_per_byte)
    alike: dict[object, Floats] = {}
    found = []
    for k, (device, rate) in enumerate(
        zip(devices, np.broadcast_to(rates, len(devices)), strict=True)
    ):
        key = device.kind, device.speed, float(rate)
        if key not in alike:
            plans = {op: OperatorPlan({}, [k]) for op in simulator.placed}
            trial = Trial(simulator, plans, batch=batch, n_microbatches=n_microbatches)
            lowered = trial.lowered()
            ops = (lowered.rows // len(devices)).tolist()
            by_op = dict(zip(ops, lowered.work.seconds[:3].sum(axis=0), strict=True))
            alike[key] = np.array([by_op[op] for op in simulator.placed])
        found.append(alike[key])
    return np.stack(found)
