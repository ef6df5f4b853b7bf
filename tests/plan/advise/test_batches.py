"""Batches by their time to the same loss."""

import math
from dataclasses import replace

import pytest
from made_graphs import GB, layers
from made_runs import header_of

from harness.domain.cluster import Cluster
from harness.domain.record import Sample
from harness.measure.derive.noise import NoiseScale
from harness.measure.store import RecordWriter, write_header
from harness.plan.advise.advice import Adviser
from harness.plan.advise.batches import compare_batches, measured_noise
from harness.plan.advise.pricing import AdviceRequest
from harness.plan.advise.words import advice_lines, advice_object

GRAPH, PROFILE = layers(4, parameters=10**9)
PAIR = Cluster.uniform(2, 1, kind="device", inside_bytes_per_s=3e8, memory_bytes=100 * GB)
REQUEST = AdviceRequest(graph=GRAPH, profile=PROFILE, batch=GRAPH.batch, families=("single", "ddp"))


def advised(request=REQUEST):
    return Adviser(request, PAIR, seconds=20).advise()


def noise(n_samples):
    return NoiseScale(n_samples=n_samples, low=n_samples / 2, high=2 * n_samples)


def test_a_larger_batch_gains_its_samples_per_second_less_the_samples_that_it_needs_more():
    advice = advised()
    found = compare_batches(advice, noise(16.0)).choices
    assert [one.best.batch for one in found] == [2, 4, 8, 16, 32, 64]
    for one in found:
        assert one.needed == 1 + one.best.batch / 16
        rate = one.best.samples_per_s / advice.best.samples_per_s
        assert one.gain == pytest.approx(rate * (1 + 8 / 16) / one.needed)
    assert found[2].best is advice.best
    # Gradients of 8 GB take as long with each batch.
    largest = compare_batches(advice, noise(math.inf)).choices[-1]
    assert (largest.best.label, largest.best.cluster.n_devices) == ("ddp", 2)
    assert largest.gain == largest.best.samples_per_s / advice.best.samples_per_s > 1.5
    line = "A batch of 64 on node0 and node1 with ddp would reach the same loss"
    batches = compare_batches(advice, noise(1e6))
    assert any(text.startswith(line) for text in advice_lines(advice, batches))
    assert f"gradient noise scale: {noise(1e6)} samples" in advice_lines(advice, batches)
    none = compare_batches(advice, noise(0.0)).choices[-1]  # a step of any batch gains as much
    assert (none.needed, none.gain) == (math.inf, pytest.approx(largest.gain * 8 / 64))
    unbounded = NoiseScale(n_samples=math.inf, low=64.0, high=math.inf)
    lines = advice_lines(advice, compare_batches(advice, unbounded))
    assert any("below 2.00" in line for line in lines)  # not 1.00, which no measurement shows
    assert any(text.startswith(f"{line} up to ") for text in lines)
    few = compare_batches(advice, noise(1e-3))
    assert few.choices[0].gain > few.choices[-1].gain
    assert advice_object(advice, few)["batches"][0]["times_best"] == few.choices[0].gain


def test_a_measured_step_is_not_compared_with_predicted_ones():
    advice = advised()
    slow = replace(advice.best, step_s=3 * advice.best.step_s, is_measured=True)
    found = compare_batches(replace(advice, best=slow), noise(16.0)).choices
    plain = compare_batches(advice, noise(16.0)).choices
    assert [one.gain for one in found] == [one.gain for one in plain]
    assert found[2].best is slow


def test_the_batch_of_each_device_changes_where_that_is_given():
    found = compare_batches(advised(replace(REQUEST, batch=None, per_device_batch=2)), noise(9.0))
    assert {one.best.batch % one.best.cluster.n_devices for one in found.choices} == {0}


def test_the_newest_run_of_the_model_has_measured_the_noise(tmp_path):
    assert measured_noise(None, "lenet") is None
    for k, (model, square) in enumerate([("lenet", 3.0), ("lenet", 5.0), ("vgg16", 9.0)]):
        config = {"model": model, "noise_steps": 16}
        header = header_of(run_id=f"run{k}", workload="train", status="ok", config=config)
        write_header(tmp_path / f"run{k}", header)
        writer = RecordWriter(tmp_path / f"run{k}", 0)
        labels = [(1, square), (2, 2.0)]
        writer.write(
            Sample(metric="gradient_square_norm", value=value, labels={"n_distinct": n})
            for n, value in labels
        )
        writer.close()
    # The newer one has |G|^2 = 2 * 2 - 5 < 0 and so no bounds, the older one |G|^2 = 1 and S = 2.
    assert measured_noise(tmp_path, "lenet").n_samples == 2
    assert measured_noise(tmp_path, "resnet18") is None
