"""What runs on a GPU, as it is started; two ranks share one over gloo."""

import os

import pytest
from launching import MPIRUN, ROOT, completed
from made_runs import read_results

from harness.measure.derive.spans import samples_of

pytestmark = pytest.mark.gpu
LENET = ("--model", "lenet", "--batch-size", "64", "--steps", "4", "--warm-up", "1")


def run(results, *words, n_ranks=1):
    """The runs of a workload, without those that it needs before it, such as of profile."""
    # All ranks on the first GPU, however many there are.
    launch = [] if n_ranks == 1 else [MPIRUN, "--oversubscribe", "-np", n_ranks]
    command, gpu = (ROOT / "entry.sh", *words, "--results", results), os.environ["FIRST_GPU"]
    done = completed(*launch, *command, timeout_s=280, CUDA_VISIBLE_DEVICES=gpu)
    assert done.returncode == 0, done.stdout + done.stderr
    return [one for one in read_results(results).runs if one.header.workload == words[0]]


def values(one, metric):
    """Of rank 0."""
    return [r.value for r in samples_of(one.ranks[0], metric)]


def losses(one):
    return values(one, "loss")


def test_matmul_is_below_the_peak_of_the_device(tmp_path):
    (one,) = run(tmp_path, "matmul", "--sizes", "1024", "--dtype", "bf16", "fp32")
    assert one.header.status == "ok"
    assert "NVIDIA" in one.header.ranks[0].device_kind


def test_operators_add_up_to_the_step_and_memory_has_a_peak(tmp_path):
    (one,) = run(tmp_path, "profile", "--model", "resnet18", "--batch-size", "128", "--shards", "1")
    assert one.header.status == "ok"
    calibrations = values(one, "profile_calibration")
    assert len(calibrations) == 2  # of the batch, and of an eighth of it
    # A step waits for launches, which operators behind a full queue do not.
    assert 0.7 < calibrations[0] < 2.0
    assert max(values(one, "memory_peak_bytes")) > 128 * 3 * 224 * 224 * 4


def test_the_executor_trains_on_one_gpu_as_plain_pytorch_does(tmp_path):
    (plain,), (ours,) = (
        run(tmp_path / engine, "train", *LENET, "--strategy", "single", "--engine", engine)
        for engine in ("torch", "executor")
    )
    # Sums in another order, fp32.
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.skipif(not MPIRUN.exists(), reason="setup/install.sh has not installed mpirun")
def test_two_ranks_on_one_gpu_have_the_losses_of_one(tmp_path):
    (alone,) = run(tmp_path / "one", "train", *LENET, "--strategy", "single")
    trained = run(
        tmp_path / "two", "train", *LENET, "--strategy", "ddp", "pipeline", "tensor", "--engine",
        "executor", n_ranks=2,
    )  # fmt: skip
    assert len(trained) == 3
    for one in trained:
        assert one.header.backend == "gloo"
        assert losses(one) == pytest.approx(losses(alone), rel=1e-4)


def test_zero_trains_batch_normalisation_in_bf16(tmp_path):
    words = ("--model", "resnet18", "--per-device-batch", "8", "--steps", "2", "--warm-up", "1")
    (one,) = run(tmp_path, "train", *words, "--strategy", "zero2", "--dtype", "bf16")
    assert one.header.status == "ok"
