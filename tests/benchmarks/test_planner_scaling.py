"""Epochs predicted from those on one GPU, and the logs that they are held to."""

import sys
from pathlib import Path

import pytest

from harness.errors import PlanError, ResultsError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from planner_scaling import (
    Training,
    ethernet_cluster,
    implied_bandwidth,
    predict_epoch,
    read_all_reduce_s,
    read_epoch_log,
    ring_bytes,
)

LOGS = Path(__file__).parents[3] / "shared" / "data" / "tesla_logs"
needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason="the measured logs are not here")
GB = 10**9
TRAINING = Training(parameter_bytes=10**9, batch_per_device=10, sample_s={"A": 0.1, "B": 0.2})


def cluster(kinds, nic=1e9, **changes):
    return ethernet_cluster(
        kinds, nic_bytes_per_s=nic, memory_bytes=100 * GB, latency_s=0.0, **changes
    )


def test_one_gpu_has_no_communication():
    found = predict_epoch(cluster(["A"]), TRAINING, samples=95)
    assert (found.n_steps, found.step_s, found.exposed_s) == (10, pytest.approx(1.0), 0)


def test_two_gpus_add_a_ring_all_reduce():
    found = predict_epoch(cluster(["A", "A"]), TRAINING, samples=100)
    # 10 samples take 1 s; 2 (n - 1) / n x 1 GB at 1 GB/s takes 1 s.
    assert found.step_s == pytest.approx(2.0)
    assert (found.compute_s, found.exposed_s) == (pytest.approx(1.0), pytest.approx(1.0))
    assert found.epoch_s == pytest.approx(5 * 2.0)


def test_the_slowest_gpu_and_link_pace_all():
    by_kind = predict_epoch(cluster(["A", "B"]), TRAINING, samples=100)
    assert by_kind.compute_s == pytest.approx(2.0)
    by_speed = predict_epoch(cluster(["A", "A"], speeds=[1.0, 0.5]), TRAINING, samples=100)
    assert by_speed.step_s == pytest.approx(by_kind.step_s)
    slow_link = predict_epoch(cluster(["A", "A", "A"], nic=[1e9, 1e9, 1e8]), TRAINING, samples=90)
    assert slow_link.exposed_s == pytest.approx(4 / 3 * 10)


def test_balanced_samples_make_up_for_a_slower_gpu():
    # 20 samples: 13 x 0.1 s beside 7 x 0.2 s.
    found = predict_epoch(cluster(["A", "B"]), TRAINING, samples=100, balanced=True)
    assert found.compute_s == pytest.approx(1.4)


def test_implied_bandwidth_inverts_the_prediction():
    found = predict_epoch(cluster(["A", "A", "A"], nic=7e8), TRAINING, samples=300)
    assert implied_bandwidth(found, found.epoch_s, ring_bytes(10**9, 3)) == pytest.approx(7e8)


def test_a_kind_without_measurement_is_refused():
    with pytest.raises(PlanError, match="no single-GPU time of 'C', only of A, B"):
        predict_epoch(cluster(["A", "C"]), TRAINING, samples=100)


def test_epoch_log_takes_the_slowest_rank_and_survives_missing_lines(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "Timestamp,Rank,Epoch,Computation_Time,GPU_Name\n"
        "t,0,1,10.0,A\nt,1,1,11.0,B\n\nt,1,2,13.0,B\nt,0,3,12.0,A\nt,1,3,11.5,B\n"
    )
    log = read_epoch_log(path)
    assert (log.epoch_s, log.kinds) == (12.0, ("A", "B"))


def test_a_file_that_is_no_log_is_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ResultsError, match=r"log\.csv has no column rank"):
        read_epoch_log(path)
    with pytest.raises(ResultsError, match="no usable DeepSpeed step line"):
        read_all_reduce_s(path)


def test_the_all_reduce_is_read_in_seconds(tmp_path):
    path = tmp_path / "steps.log"
    path.write_text(
        "x time (ms) | fwd: 60.00 | bwd: 600.00 | bwd_inner: 140.00 | "
        "bwd_allreduce: 460.00 | step: 20.00\n"
    )
    assert read_all_reduce_s(path) == pytest.approx(0.46)


@needs_logs
def test_measured_cluster_is_predicted_at_its_own_bandwidth():
    """At the wire speed that DeepSpeed's own step lines show, every epoch is within 6%.

    The tolerance is the spread of the measured epochs themselves (strong scaling on 2 GPUs
    varies from 879 to 932 s over ten epochs).
    """
    parameter_bytes = 4 * 86_600_000
    all_reduce_s = read_all_reduce_s(LOGS / "vit_b16_3gpu_deepspeed_steps.log")
    wire = ring_bytes(parameter_bytes, 3) / all_reduce_s
    assert wire == pytest.approx(1e9, rel=0.02)
    for mode, total in (("strong", 50_000), ("weak", 5_000)):
        one = read_epoch_log(LOGS / f"vit_b16_{mode}_1gpu.csv")
        training = Training(
            parameter_bytes=parameter_bytes,
            batch_per_device=16,
            sample_s={one.kinds[0]: one.epoch_s / total},
        )
        for n in (2, 3):
            log = read_epoch_log(LOGS / f"vit_b16_{mode}_{n}gpu.csv")
            samples = total if mode == "strong" else n * total
            found = predict_epoch(cluster(log.kinds, nic=wire), training, samples=samples)
            assert found.epoch_s == pytest.approx(log.epoch_s, rel=0.06)
