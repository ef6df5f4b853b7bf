"""Seconds of each whole operator on each device, for balancing stages."""

import numpy as np

from harness.domain.strategy import OperatorPlan
from harness.plan.simulate.simulator import Simulator, Trial
from harness.plan.simulate.transfers import Floats


def operator_seconds(simulator: Simulator, batch: int, n_microbatches: int = 1) -> Floats:
    """(n_devices, n_placed) seconds of forward plus backward of a microbatch, for each whole
    operator on each device."""
    devices, rates = simulator.cluster.devices, np.asarray(simulator.options.stream_s_per_byte)
    by_kind: dict[object, Floats] = {}
    found = []
    for k, (device, rate) in enumerate(
        zip(devices, np.broadcast_to(rates, len(devices)), strict=True)
    ):
        key = device.kind, device.speed, float(rate)
        if key not in by_kind:
            plans = {op: OperatorPlan({}, [k]) for op in simulator.placed}
            trial = Trial(simulator, plans, batch=batch, n_microbatches=n_microbatches)
            lowered = trial.lowered()
            ops = (lowered.rows // len(devices)).tolist()
            by_op = dict(zip(ops, lowered.work.seconds[:3].sum(axis=0), strict=True))
            by_kind[key] = np.array([by_op[op] for op in simulator.placed])
        found.append(by_kind[key])
    return np.stack(found)
