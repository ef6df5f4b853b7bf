"""Record load, temperature, memory and power of a rank's device over time, by a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from harness.domain.record import Sample
from harness.measure.recorder import Clock, Recorder

_INTERVAL_S = 1.0

Reading = dict[str, float]


def _gpu_reader(index: int) -> Callable[[], Reading] | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(index).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (AttributeError, pynvml.NVMLError):
        return None

    readings: dict[str, Callable[[], float]] = {
        "device_utilization_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "device_temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, 0),
        "memory_used_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
    }
    return lambda: read_available(readings, pynvml.NVMLError)


def read_available(readings: dict[str, Callable[[], float]], refusal: type[Exception]) -> Reading:
    """Read every quantity that the device supports; some GPUs have no power meter, for example."""
    values: Reading = {}
    for name, read in readings.items():
        with contextlib.suppress(refusal):
            values[name] = float(read())
    return values


def _cpu_reader(n_cores: float) -> Callable[[], Reading]:
    process = psutil.Process()
    process.cpu_percent()

    def read() -> Reading:
        reading = {
            "device_utilization_percent": process.cpu_percent() / n_cores,
            "memory_used_bytes": float(process.memory_info().rss),
        }
        sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
        for first, *_ in filter(None, sensors.values()):
            reading.setdefault("device_temperature_c", first.current)
        return reading

    return read


def _origin_s(clock: Clock) -> float:
    """The clock's origin in seconds of `perf_counter`; waits for the device."""
    clock.settle()
    mark, now_s = clock.mark(), time.perf_counter()
    clock.settle()
    return now_s - clock.seconds_at(mark)


@contextlib.contextmanager
def watched_device(device: torch.device, n_cores: float, recorder: Recorder) -> Iterator[None]:
    """Read the device about once a second while the body runs; add the samples to the recorder.

    On a CPU, load (in percent of `n_cores`) and memory are those of this process.
    """
    reader: Any = _gpu_reader(device.index or 0) if device.type == "cuda" else _cpu_reader(n_cores)
    if reader is None:
        yield
        return
    origin_s = _origin_s(recorder.clock)
    is_over, samples = threading.Event(), list[Sample]()

    def watch() -> None:
        while not is_over.wait(_INTERVAL_S):
            at_s = time.perf_counter() - origin_s
            samples.extend(
                Sample(metric=name, value=value, labels={"device": str(device)}, time_s=at_s)
                for name, value in reader().items()
            )

    watcher = threading.Thread(target=watch, daemon=True, name="telemetry")
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        for sample in samples:
            recorder.add(sample)
