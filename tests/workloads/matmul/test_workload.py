"""The matmul workload: flags, the check against the peak, and real runs on local ranks."""

import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import local_ranks
import pytest
import torch
import torch.distributed as dist
from fake_clock import FakeClock
from local_ranks import run_on_ranks
from made_runs import local_header

from harness.domain.record import Sample
from harness.errors import ConfigError, VerificationError
from harness.measure.derive.devices import matmul_table, summa_table
from harness.measure.derive.spans import samples_of, spans_of
from harness.measure.store import Run
from harness.runtime.devices.sampling import Budget
from harness.workloads.matmul import local as matmul_local
from harness.workloads.matmul.local import check_peak, time_product, unsupported_reason
from harness.workloads.matmul.scaling import DistributedProduct, measure_point, rank_counts
from harness.workloads.matmul.workload import MatmulConfig, matmul_cases, matmul_text, run_matmul

CPU = torch.device("cpu")
SMALL = MatmulConfig(
    sizes=(32, 48, 48), dtype=("fp32",), time_budget_s=0.01, min_samples=3, distributed_samples=2,
    strong_size=96, weak_size=64,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": ("fp8",)}, "dtype 'fp8' is not one of fp32, tf32, bf16, fp16"),
        ({"distributed_dtype": "int8"}, "dtype 'int8'"),
        ({"sizes": (0,)}, "size 0 is outside 8 to 131072"),
        ({"strong_size": 16}, "size 16 over 3 ranks .* at least 24"),
        ({"distributed_samples": 0}, "--distributed-samples 0 must be at least 1"),
        ({"time_budget_s": float("nan")}, "--time-budget-s nan must be above 0"),
    ],
)
def test_impossible_flags_are_refused_with_both_values(change, message):
    with pytest.raises(ConfigError, match=message):
        matmul_cases(replace(SMALL, **change), 3)


@pytest.mark.parametrize(
    ("size", "counts"),
    [(1, [1]), (5, [1, 2, 3, 4, 5]), (12, [1, 2, 3, 4, 5, 6, 7, 8, 12]),
     (32, [1, 2, 3, 4, 5, 6, 7, 8, 16, 32])],
)  # fmt: skip
def test_scaling_runs_on_every_small_number_of_ranks_then_powers_of_two(size, counts):
    assert rank_counts(size) == counts


def test_a_rate_above_the_peak_is_an_error_that_names_both(monkeypatch):
    monkeypatch.setattr(matmul_local, "peak_flops_per_s", lambda kind: {"fp32": 20e12})
    with pytest.raises(VerificationError, match=r"156 TFLOP/s is above the 20 TFLOP/s that Card"):
        check_peak(156e12, [1.0, 1.0, 1.1], "fp32", "Card")
    check_peak(19e12, [1.0, 1.0, 1.1], "fp32", "Card")
    check_peak(156e12, [1.0], "bf16", "Card")
    with pytest.raises(VerificationError, match=r"20\.3 TFLOP/s"):  # at the median, 0.975 s
        check_peak(19.8e12, [0.9, 1.05], "fp32", "Card")


def test_one_sample_may_boost_a_little_above_the_peak_and_no_more(monkeypatch):
    monkeypatch.setattr(matmul_local, "peak_flops_per_s", lambda kind: {"fp32": 20e12})
    check_peak(19e12, [1.0, 1.0, 0.9], "fp32", "Card")
    with pytest.raises(VerificationError, match="38 TFLOP/s"):
        check_peak(19e12, [1.0, 1.0, 0.5], "fp32", "Card")


def test_a_cpu_has_no_tf32_and_says_why():
    assert "tensor cores" in unsupported_reason("tf32", CPU)
    assert unsupported_reason("fp32", CPU) == ""


def test_under_a_quota_a_sample_is_the_mean_of_several_products(monkeypatch):
    """Two products in turn: a long sample shows the share that a short one would miss."""
    monkeypatch.setattr(matmul_local, "shortest_sample_s", lambda device: 0.010)
    clock = FakeClock()
    multiply = matmul_local._Operands.multiply

    def slowly(self):
        clock.advance(0.004)
        multiply(self)

    monkeypatch.setattr(matmul_local._Operands, "multiply", slowly)
    budget = Budget(time_s=0.001, n_min=3, n_warm_up=1)
    durations, operands = time_product(16, "fp32", CPU, clock, budget)
    assert durations == pytest.approx([0.004] * 3)
    assert torch.allclose(operands.c, operands.a @ operands.b)


def test_samples_that_vary_have_their_interval_and_a_warning():
    labels = {"m": 1024, "n": 1024, "k": 1024, "dtype": "fp32"}
    times = [0.008] * 3 + [0.0025, 0.0129]
    samples = [
        Sample(metric="matmul_s", value=v, labels=labels | {"n": n})
        for n, values in ((1024, times), (512, [0.008] * 5))
        for v in values
    ]
    run = Run(path=Path("r"), header=local_header(["a"]), ranks={0: samples})
    text = matmul_text([run])
    assert "268 GFLOP/s  166 GFLOP/s to 859 GFLOP/s (range)  859 GFLOP/s" in text
    assert text.splitlines()[-1] == (
        "warning: samples of 1 of 1 products vary (most: rank 0 a fp32 n = 1024, standard "
        "deviation is 47% of the mean, minimum is 68% below the mean, maximum is 64% above the "
        "mean): end other work and measure again"
    )


@pytest.fixture(scope="module")
def measured():
    """By number of ranks: what each rank returned, and the run."""
    return {n_ranks: run_on_ranks(run_matmul, SMALL, n_ranks) for n_ranks in (1, 5)}


@pytest.mark.parametrize("n_ranks", [1, 5])
def test_products_are_right_on_any_number_of_ranks(n_ranks, measured):
    """The body verifies every block against float64, and raises when one is wrong."""
    results, run = measured[n_ranks]
    rows = results[0]["distributed"]
    wanted = [(scaling, n) for scaling in ("strong", "weak") for n in range(1, n_ranks + 1)]
    assert [(row["scaling"], row["n_ranks"]) for row in rows] == wanted
    table = matmul_table(run)
    assert {(row.rank, row.n) for row in table} == {
        (r, n) for r in range(n_ranks) for n in (32, 48)
    }
    assert all(row.error is not None and row.error < 1e-5 for row in table)
    for records in run.ranks.values():  # a size that is given twice is measured once
        steps = [(s.labels["n"], s.step) for s in samples_of(records, "matmul_s")]
        assert len(set(steps)) == len(steps)
    assert [(row.scaling, row.n_ranks) for row in summa_table(run)] == wanted
    rates = [row.flops_per_s for row in summa_table(run)]  # whose efficiency is the only one
    assert [row["flops_per_s"] for row in rows] == pytest.approx(rates)
    assert all("efficiency" not in row for row in rows)
    text = matmul_text([run])
    assert "GFLOP/s" in text
    assert "strong" in text


def test_records_hold_spans_and_what_a_rank_received(measured):
    _, run = measured[5]
    product = {"scaling": "strong", "n_ranks": 2}
    for records in (run.ranks[0], run.ranks[1]):
        spans = [r for r in spans_of(records) if r.name == "summa strong 2 ranks"]
        assert {span.kind for span in spans} == {"compute", "communication"}
        samples = {
            (r.metric, r.step): r.value
            for r in records
            if isinstance(r, Sample) and product.items() <= r.labels.items()
        }
        for step in range(2):
            whole = samples["summa_s", step]
            assert 0 < samples["summa_compute_s", step] < whole
            exposed = samples["summa_exposed_communication_s", step]
            assert 0 <= exposed <= samples["summa_communication_s", step]
            assert samples["summa_compute_s", step] + exposed <= whole * 1.001
        # Two ranks hold half the columns or rows each: the other half of one operand comes over.
        assert 0 < samples["summa_received_bytes", 0] <= 96 * 96 * 4
        # Reads of nothing, such as an interval of zero samples, must not slip in.
        assert not any(math.isnan(value) for value in samples.values())


def test_what_one_rank_refuses_all_refuse_with_its_reason():
    """A device too small for every size, and a product with a wrong block."""
    (told, others), _ = run_on_ranks(local_ranks.refused_products, SMALL, 2)
    assert told == others
    assert "rank 1 (node1) cannot multiply in fp32" in told["memory"]
    assert "(size 32: fp32 needs " in told["memory"]
    assert ", the device has 256 MiB): choose smaller --sizes" in told["memory"]
    assert "rank 1's block" in told["block"]


def test_ranks_wait_for_a_panel_no_longer_than_the_run_allows(monkeypatch):
    told = []

    def new_group(ranks, timeout):
        told.append(timeout)
        raise InterruptedError

    monkeypatch.setattr(dist, "new_group", new_group)
    product = DistributedProduct(scaling="strong", n_ranks=1, size=64)
    context = SimpleNamespace(world=None, collective_timeout_s=7.0)
    with pytest.raises(InterruptedError):
        measure_point(product, "fp32", [1.0], context, 1)
    assert told == [timedelta(seconds=7)]


def test_a_slow_device_may_take_longer_than_a_collective():
    configs = [replace(SMALL, scaling="none", in_turn=in_turn) for in_turn in (False, True)]
    results, _ = run_on_ranks(local_ranks.matmul_beside_a_slow_rank, configs, 2)
    assert all(one["flops_per_s"]["fp32"] > 0 for found in results for one in found)
