"""The figure of batches: measured rates and the gradient noise scale."""

import math

import pytest
from matplotlib.figure import Figure as Canvas
from measured_runs import add_records, make_cluster, table_of, train_config, write_training

from harness.domain.record import Sample
from harness.plot.figures import load_figure


def add_noise(run, scale, few=4, many=32):
    """Squared norms of gradients of so many samples, without noise of their own."""
    add_records(
        run,
        [
            Sample(metric="gradient_square_norm", value=1 + scale / n, labels={"n_distinct": n})
            for n in (few, many)
        ],
    )


def test_a_line_has_the_time_to_the_same_loss_of_each_batch(tmp_path):
    for batch, step_s in ((32, 0.1), (64, 0.15), (128, 0.4)):
        config, cluster = train_config("ddp", batch), make_cluster(2)
        run = write_training(tmp_path, f"b{batch}", config, cluster, step_s, 0.0)
    assert not len(table_of("batches", tmp_path))  # without a noise scale

    add_noise(run, 64.0)
    table = table_of("batches", tmp_path)
    assert table["noise_scale_samples"].unique() == pytest.approx(64.0)
    assert list(table["samples_needed"]) == pytest.approx([1.5, 2.0, 3.0])
    times = 1.5 / table["throughput_samples_per_s"].iloc[0] * table["relative_time"]
    needed_s = table["samples_needed"] / table["throughput_samples_per_s"]
    assert table["relative_time"].min() == 1
    assert list(times / needed_s) == pytest.approx([times.iloc[0] / needed_s.iloc[0]] * 3)
    canvas = Canvas(layout="constrained")
    load_figure("batches").draw(table, canvas)
    canvas.draw_without_rendering()
    assert "noise scale 64 samples" in canvas.axes[0].get_title()


@pytest.mark.parametrize(("scale", "words"), [(0.0, "0 samples"), (math.inf, "without bounds")])
def test_a_scale_of_none_or_without_bounds_is_drawn(scale, words, tmp_path):
    for batch, step_s in ((32, 0.1), (64, 0.15)):
        config, cluster = train_config("ddp", batch), make_cluster(2)
        run = write_training(tmp_path, f"b{batch}", config, cluster, step_s, 0.0)
    squares = {4: 1.0, 32: 1.0} if scale == 0 else {4: 8.0, 32: 1.0}
    add_records(
        run,
        [
            Sample(metric="gradient_square_norm", value=square, labels={"n_distinct": n})
            for n, square in squares.items()
        ],
    )
    table = table_of("batches", tmp_path)
    # A step of any batch gains as much, or any sample does.
    work = table["batch"] if scale == 0 else 1.0
    times = work / table["throughput_samples_per_s"]
    assert list(table["relative_time"]) == pytest.approx([*times / min(times)])
    canvas = Canvas(layout="constrained")
    load_figure("batches").draw(table, canvas)
    canvas.draw_without_rendering()
    assert words in canvas.axes[0].get_title()


def test_one_batch_has_nothing_to_compare(tmp_path):
    run = write_training(tmp_path, "a", train_config("ddp", 32), make_cluster(2), 0.1, 0.0)
    add_noise(run, 64.0)
    assert not len(table_of("batches", tmp_path))
