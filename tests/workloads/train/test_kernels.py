"""Steps under torch.profiler: the trace, its phases, and the longest operators."""

import gzip
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from made_runs import world_of

from harness.errors import ResultsError
from harness.measure.derive.spans import samples_of, spans_of
from harness.measure.recorder import Recorder
from harness.measure.store import RecordWriter
from harness.runtime.devices.sampling import clock_for
from harness.runtime.ranks.world import Context, Progress
from harness.workloads.train.kernels import TRACE_FILE, _write, trace_steps


def test_trace_names_phases_of_the_asked_steps_and_lists_operators_by_time(tmp_path):
    world = world_of(0, 1)
    recorder = Recorder(clock_for(world.device))
    published = recorder.reached
    context = Context(
        world=world, recorder=recorder, writer=RecordWriter(tmp_path, 0),
        progress=Progress(is_shown=False), run_dir=tmp_path,
    )  # fmt: skip
    large, small = torch.ones(300, 300), torch.ones(2, 2)

    def step():
        with recorder.span("forward"):
            large @ large
        with recorder.span("backward"):
            small @ small
            small.exp()

    trace_steps(step, 3, context)
    assert recorder.reached is published
    with gzip.open(tmp_path / TRACE_FILE.format(rank=0)) as file:
        events = json.load(file)["traceEvents"]
    names = Counter(e["name"] for e in events if e.get("cat") in ("user_annotation", "cpu_op"))
    assert (names["forward"], names["backward"], names["aten::exp"]) == (3, 3, 3)
    records = recorder.collect()
    assert not spans_of(records)
    kernels = samples_of(records, "kernel_s")
    calls = {sample.labels["name"]: sample.labels["calls"] for sample in kernels}
    assert (calls["aten::mm"], calls["aten::exp"]) == (2, 1)
    assert [k.value for k in kernels] == sorted((k.value for k in kernels), reverse=True)


def test_a_full_disk_for_temporary_files_is_named_and_leaves_no_trace(tmp_path):
    silent = SimpleNamespace(export_chrome_trace=lambda path: None)  # as kineto on a full disk
    with pytest.raises(ResultsError, match=r"/trace\.json on .* make room there"):
        _write(silent, tmp_path / "run" / "rank0.pt.trace.json.gz")
    assert not list((tmp_path / "run").iterdir())
