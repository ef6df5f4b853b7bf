"""Hand-sized runs of two or three ranks, every derived number worked out beside them."""

import dataclasses

import msgspec
import numpy as np
import pytest
from made_runs import cluster_of, run_of

from harness.domain.record import Sample, Span
from harness.measure.derive.devices import (
    low_peak_warnings,
    matmul_peaks,
    matmul_table,
    memory_table,
    summa_table,
)
from harness.measure.derive.doubts import DoubtKind, outliers
from harness.measure.derive.links import (
    above_link_text,
    best_links_bytes_per_s,
    bus_factor,
    collective_table,
    disturbed_text,
    link_matrices,
    link_noise,
    nic_limit_bytes_per_s,
    slow_text,
)
from harness.measure.derive.scaling import ScalingPoint, scaling_table
from harness.measure.derive.spans import phase_table
from harness.measure.derive.steps import full_times, step_times
from harness.measure.derive.strategies import strategy_tables
from harness.measure.derive.training import training_summary, with_outliers_of_repeats
from harness.measure.statistics import summarize
from harness.measure.text import rate_interval_words
from harness.units import format_bandwidth, format_flops


def make_run(ranks, *, peak=None, nic_bytes_per_s=None, config=None, **changes):
    return run_of(
        *ranks,
        cluster=cluster_of(
            [f"node{rank}" for rank in range(len(ranks))], nic_bytes_per_s=nic_bytes_per_s
        ),
        info={"peak_flops_per_s": peak or {}},
        config=config or {"strategy": "ddp", "model": "lenet", "dtype": "fp32"},
        **changes,
    )


def span(kind, start_s, end_s, step=0, **more):
    return Span(kind=kind, start_s=start_s, duration_s=end_s - start_s, step=step, **more)


def one_step(step=0, *, stretch=1.0):
    """data 0-1, forward 1-3, backward 3-7, buckets 4-6, 5-8 and 9-10, optimizer 8-9, end 10.5."""
    layout = [
        ("step", 0, 10.5),
        ("data", 0, 1),
        ("forward", 1, 3),
        ("backward", 3, 7),
        ("communication", 4, 6),
        ("communication", 5, 8),
        ("communication", 9, 10),
        ("optimizer", 8, 9),
    ]
    origin = 100.0 * step
    return [
        span(kind, origin + start * stretch, origin + end * stretch, step)
        for kind, start, end in layout
    ]


def test_exposed_communication_is_what_no_compute_covers():
    table = phase_table(one_step())
    assert table.phases == {
        "data": 1.0,
        "host_to_device": 0.0,
        "forward": 2.0,
        "backward": 4.0,
        "compute": 0.0,
        "exposed_communication": 2.0,  # 7-8 and 9-10
        "optimizer": 1.0,
        "other": 0.5,
    }
    assert table.communication_s == [5.0]  # 4-8 and 9-10
    assert table.overlapped_s == [3.0]
    assert sum(table.phases.values()) == table.step_s


def test_a_step_that_never_ended_is_not_counted():
    assert len(phase_table([span("forward", 0, 1)]).steps) == 0


def test_step_time_is_the_slowest_ranks():
    run = make_run([[span("step", 0, 2)], [span("step", 50, 53)]])
    assert step_times(run) == {0: 3.0}


def full_run():
    def extras(rank):
        of_steps = {
            "n_samples": 10 + rank, "model_flops": 1e12, "n_synchronisations": 3,
            "no_sync_step_s": 8.0 + rank, "no_sync_compute_s": 5.0 + rank,
        }  # fmt: skip
        return [
            *(Sample(metric=m, value=v, step=s) for m, v in of_steps.items() for s in range(2)),
            *(
                Sample(metric="nic_sent_bytes", value=v, step=s, labels={"interface": i})
                for s in range(2)
                for i, v in (("eth0", 1000.0), ("eth1", 50.0))
            ),
            Sample(metric="gradient_bytes", value=4000),
            Sample(metric="memory_peak_bytes", value=100 + rank, labels={"kind": "allocated"}),
            Sample(metric="loss", value=2.0, step=0),
            Sample(metric="loss", value=1.5, step=1),
        ]

    steps = [*one_step(0), *one_step(1)]
    return make_run([[*steps, *extras(0)], [*steps, *extras(1)]], peak={"fp32": 1e12})


def test_samples_of_a_step_are_counted_by_step_because_strategies_give_them_to_other_ranks():
    shares = [(4, 4, 4), (0, 12, 0), (12, 0, 0)]  # of the ranks, in each step
    ranks = [
        [
            *(span("step", 2 * at, 2 * at + 1, step=at) for at in range(3)),
            *(
                Sample(metric="n_samples", value=own[rank], step=at)
                for at, own in enumerate(shares)
            ),
        ]
        for rank in range(3)
    ]
    assert training_summary(make_run(ranks)).throughput == 12


def test_the_rate_is_that_of_the_largest_batches():
    steps = [(12, 4.0), (4, 3.0), (12, 8.0)]  # samples, seconds
    records = [
        *(span("step", 10 * at, 10 * at + s, step=at) for at, (_, s) in enumerate(steps)),
        *(Sample(metric="n_samples", value=n, step=at) for at, (n, _) in enumerate(steps)),
        Sample(metric="model_flops", value=160),  # of a full batch
    ]
    run = make_run([records], config={"batch": 16})
    summary = training_summary(run)
    ((row,),) = strategy_tables([(run, summary)])
    assert summary.throughput == row.throughput == 2
    assert summary.flops_per_s == 20


def test_only_full_batches_compare_with_steps_without_communication():
    sizes = [(64, 4.0), (32, 2.0)] * 2  # samples, seconds
    records = [
        *(span("step", 10 * at, 10 * at + s, step=at) for at, (_, s) in enumerate(sizes)),
        *(span("backward", 10 * at, 10 * at + s - 1, step=at) for at, (_, s) in enumerate(sizes)),
        *(Sample(metric="n_samples", value=n, step=at) for at, (n, _) in enumerate(sizes)),
        Sample(metric="no_sync_step_s", value=3.5, step=0),
        Sample(metric="no_sync_compute_s", value=2.5, step=0),
    ]
    run = make_run([records], config={"batch": 64})
    summary = training_summary(run)
    assert full_times(run) == {0: 4.0, 2: 4.0}
    assert (summary.phases["backward"], summary.phases["other"]) == (3.0, 1.0)
    assert (summary.no_sync_exposed_s, summary.slowed_compute_s) == (0.5, 0.5)
    assert (summary.duration.median, summary.n_samples, summary.throughput) == (4.0, 64, 16)


def test_training_summary_of_a_hand_sized_run():
    summary = training_summary(full_run(), {("GPU", 4, "fp32"): 0.5e12})
    assert summary.duration.median == 10.5
    assert summary.n_samples == 21
    assert summary.throughput == 2.0
    assert summary.throughput_per_device == 1.0
    assert summary.exposed_communication_s == 2.0
    assert summary.overlap == pytest.approx(0.6)
    assert summary.no_sync_exposed_s == 1.5
    assert summary.slowed_compute_s == 1.5  # 7 - 5.5
    assert summary.synchronisations_per_s == 3 / 10.5
    assert summary.flops_per_s == 2e12 / 10.5
    assert summary.mfu == pytest.approx(1 / 10.5)
    assert summary.mfu_of_measured_peak == pytest.approx(2 / 10.5)
    assert summary.memory_bytes == {"allocated": 101}
    assert summary.sent_bytes_per_s == 1050 / 10.5
    assert summary.ring_bytes == 4000
    assert (summary.first_loss, summary.last_loss) == (2.0, 1.5)
    assert sum(summary.phases.values()) == pytest.approx(10.5)


def test_text_has_tokens_and_an_mfu_without_scores():
    run = full_run()
    more = [Sample(metric="score_flops", value=0.5e12), Sample(metric="tokens_per_sample", value=8)]
    ranks = [[*records, *more] for records in run.ranks.values()]
    summary = training_summary(make_run(ranks, peak={"fp32": 1e12}))
    assert summary.tokens_per_s == 16.0
    assert summary.mfu_without_scores == pytest.approx(0.5 / 10.5)


def test_mfu_of_a_device_without_a_published_peak_is_blank():
    run = full_run()
    summary = training_summary(make_run(list(run.ranks.values())))
    assert summary.flops_per_s is not None
    assert summary.mfu is None
    assert summary.mfu_of_measured_peak is None


def test_devices_that_a_plan_leaves_out_count_in_no_mfu():
    run = full_run()
    idle = [span("step", 0, 0.001), Sample(metric="model_flops", value=0.0, step=0)]
    peaks = {("GPU", 4, "fp32"): 0.5e12}
    whole = training_summary(make_run([run.ranks[0]], peak={"fp32": 1e12}), peaks)
    found = training_summary(make_run([run.ranks[0], idle], peak={"fp32": 1e12}), peaks)
    assert found.used_ranks == (0,)
    assert (found.mfu, found.mfu_of_measured_peak) == (whole.mfu, whole.mfu_of_measured_peak)
    assert found.mfu == pytest.approx(1 / 10.5)
    first, second = run.header.ranks
    unknown = msgspec.structs.replace(second, peak_flops_per_s={}, device_kind="old")
    header = msgspec.structs.replace(run.header, ranks=[first, unknown])
    run = dataclasses.replace(run, header=header, ranks={0: run.ranks[0], 1: idle})
    assert training_summary(run, peaks).mfu == found.mfu


def test_the_last_loss_of_a_run_that_was_lost_is_of_an_earlier_step():
    steps = [record for step in range(4) for record in one_step(step)]
    losses = [Sample(metric="loss", value=2.0 - step, step=step) for step in range(2)]
    lost = training_summary(make_run([[*steps, *losses]], status="crash"))
    assert (lost.first_loss, lost.last_loss, lost.last_loss_step) == (2.0, 1.0, 1)
    assert training_summary(full_run()).last_loss_step is None


def test_a_run_out_of_memory_is_a_row_without_numbers():
    summary = training_summary(make_run([[], []], status="oom"))
    assert (summary.status, summary.throughput, summary.duration) == ("oom", None, None)
    assert summary.phases == {}


def test_epochs_stand_in_when_no_steps_were_logged():
    ranks = [
        [Sample(metric="epoch_s", value=100.0 + r, step=e) for e in range(3)] for r in range(2)
    ]
    for records in ranks:
        records.extend(Sample(metric="n_samples", value=1010, step=e) for e in range(3))
    summary = training_summary(make_run(ranks))
    assert (summary.unit, summary.n_samples, summary.throughput) == ("epoch", 2020, 20.0)


def test_rank_with_a_third_more_own_work_is_a_straggler():
    run = make_run([one_step(), one_step(stretch=1.3), one_step(stretch=1.4)])
    summary = training_summary(run)
    assert [rank.is_straggler for rank in summary.ranks] == [False, False, True]
    assert any("node2" in warning.text for warning in summary.warnings)


def test_a_failed_run_has_its_numbers_and_no_verdicts():
    steps = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.6]
    ranks = [
        [record for step, s in enumerate(steps) for record in one_step(step, stretch=s * slow)]
        for slow in (1.0, 2.0)
    ]
    ended, failed = (training_summary(make_run(ranks, status=status)) for status in ("ok", "crash"))
    assert ended.outlier_steps
    assert any("straggler" in warning.text for warning in ended.warnings)
    assert failed.outlier_steps == failed.warnings == ()
    assert not any(rank.is_straggler for rank in failed.ranks)
    assert failed.duration == ended.duration


def counted(flops, records):
    return [*records, Sample(metric="model_flops", value=flops, step=0)]


def test_a_straggler_is_slow_for_its_flops():
    # The second takes a third longer for a quarter more, the third 1.4 times as long for as much.
    ranks = [counted(4e9, one_step()), counted(5e9, one_step(stretch=1.3)),
             counted(4.1e9, one_step(stretch=1.4))]  # fmt: skip
    summary = training_summary(make_run(ranks))
    assert [rank.is_straggler for rank in summary.ranks] == [False, False, True]


def test_stages_of_a_pipeline_and_ranks_left_out_have_no_stragglers():
    def stage(number, duration_s):
        return counted(4e9, [span("step", 0, 10), span("forward", 0, duration_s, stage=number)])

    def left_out(duration_s):
        return counted(0.0, [span(kind, 0, duration_s) for kind in ("step", "data")])

    summary = training_summary(
        make_run([stage(0, 2.0), stage(1, 6.0), stage(1, 9.0), left_out(0.1), left_out(0.2)])
    )
    assert [rank.is_straggler for rank in summary.ranks] == [False, False, True, False, False]


def test_means_are_over_the_ranks_that_compute():
    summary = training_summary(make_run([one_step(), one_step(), [span("step", 0, 0.001)]]))
    alone = training_summary(make_run([one_step()]))
    assert summary.phases == alone.phases
    assert summary.exposed_communication_s == alone.exposed_communication_s == 2.0


def test_outliers_are_far_beyond_the_quartiles():
    times = dict(enumerate([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.6]))
    assert outliers(times) == (7,)
    assert outliers(dict(enumerate([1.0] * 9 + [1.05]))) == ()


def test_outliers_of_repeats_are_far_above_the_steps_of_all():
    repeats = [1.0, 1.01, 0.99, 1.0], [1.9, 2.0, 1.0, 1.0], [1.0, 1.0, 1.02, 1.0]
    runs = [make_run([[span("step", 0, s, k) for k, s in enumerate(own)]]) for own in repeats]
    summaries = [training_summary(run) for run in runs]
    assert [one.outlier_steps for one in summaries] == [(), (), ()]
    found = with_outliers_of_repeats(summaries, [step_times(run) for run in runs])
    assert [one.outlier_steps for one in found] == [(), (0, 1), ()]
    texts = [[d.text for d in one.warnings if d.kind == DoubtKind.OUTLIERS] for one in found]
    assert texts == [[], ["2 steps far above the others"], []]


def matmul(rank_times, **more):
    ranks = [
        [
            Sample(metric="matmul_s", value=t, labels={"m": n, "n": n, "k": n, "dtype": "fp32"})
            for n, times in sizes.items()
            for t in times
        ]
        for sizes in rank_times
    ]
    return make_run(ranks, workload="matmul", **more)


def test_matmul_rate_is_of_the_median_time():
    (row,) = matmul_table(matmul([{100: [1.0, 4.0, 2.0]}]))
    assert row.flops_per_s == 2e6 / 2.0
    words = rate_interval_words(row.time, 2e6, format_flops)
    assert (words, row.max_flops_per_s) == ("500000 FLOP/s to 2 MFLOP/s (range)", 2e6)
    assert not row.is_above_peak


def test_rate_above_the_published_peak_is_marked():
    (row,) = matmul_table(matmul([{100: [1.0]}], peak={"fp32": 1e6}))
    assert row.is_above_peak


def test_memory_bandwidth_counts_reads_and_writes():
    samples = [
        Sample(metric=metric, value=time_s, labels={"n_bytes": 600}, step=step)
        for metric in ("memory_copy_s", "memory_triad_s")
        for step, time_s in enumerate((1.0, 3.0, 2.0))
    ]
    copy, triad = memory_table(make_run([samples], workload="matmul"))
    assert (copy.kernel, copy.bytes_per_s) == ("copy", 600)
    words = rate_interval_words(copy.time, 1200.0, format_bandwidth)
    assert words == "400 B/s to 1.2 kB/s (range)"
    assert (triad.kernel, triad.bytes_per_s) == ("triad", 900)


def test_measured_peak_is_the_best_size_of_the_median_device():
    run = matmul([{10: [1.0], 100: [1.0]}, {100: [2.0]}, {100: [4.0]}])
    assert matmul_peaks([run]) == {("GPU", 4, "fp32"): 1e6}
    assert matmul_peaks([matmul([{10: [1.0]}], status="invalid")]) == {}


SUMMA = {"m": 100, "n": 100, "k": 200, "dtype": "fp32", "scaling": "strong"}


def test_summa_efficiency_is_against_the_sum_of_local_peaks():
    exposed = "summa_exposed_communication_s"
    ranks = [
        [
            Sample(metric="summa_s", value=1.0 + rank, labels=SUMMA, step=0),
            Sample(metric=exposed, value=0.5 - rank / 4, labels=SUMMA, step=0),
        ]
        for rank in range(2)
    ]
    (row,) = summa_table(make_run(ranks, workload="matmul"), {("GPU", 4, "fp32"): 2e6})
    assert (row.time.median, row.flops_per_s, row.efficiency) == (2.0, 2e6, 0.5)
    assert row.exposed_communication_s == 0.25  # of the slowest rank, as the time is
    assert row.compute_s is None
    assert low_peak_warnings([row]) == []


def test_a_rate_above_the_measured_peak_is_warned_of():
    run = make_run([[Sample(metric="summa_s", value=1.0, labels=SUMMA, step=0)]], workload="matmul")
    (warning,) = low_peak_warnings(summa_table(run, {("GPU", 4, "fp32"): 2e6}))
    assert "(most: 200%, n = 100 fp32 on 1)" in warning
    summary = training_summary(full_run(), {("GPU", 4, "fp32"): 0.5e11})
    (doubt,) = (doubt for doubt in summary.warnings if doubt.kind is DoubtKind.PEAK)
    assert doubt.text == (
        "MFU of measured peak is 190%: the measured matmul peak is too low, measure it again"
    )


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("all_reduce", 1.6), ("all_gather", 0.8), ("all_to_all", 0.8), ("broadcast", 1.0)],
)
def test_bus_factors_of_five_ranks(operation, factor):
    assert bus_factor(operation, 5) == pytest.approx(factor)


def test_collective_iteration_takes_as_long_as_its_slowest_rank():
    labels = {"operation": "all_reduce", "transport": "gloo", "n_bytes": 1000}
    ranks = [
        [Sample(metric="collective_s", value=v, labels=labels, step=i) for i, v in enumerate(own)]
        for own in ([1.0, 5.0, 2.0], [4.0, 1.0, 2.0])
    ]
    (row,) = collective_table(make_run(ranks, workload="links"))
    assert row.time.median == 4.0  # of 4, 5, 2
    assert (row.algbw, row.busbw) == (250.0, 250.0)


def test_link_matrix_keeps_direction_and_leaves_gaps():
    def pair(metric, value, source, target, n_bytes):
        labels = {"source": source, "target": target, "transport": "gloo", "n_bytes": n_bytes}
        return Sample(metric=metric, value=value, labels=labels)

    ranks = [
        [
            pair("link_transfer_s", 0.1, 0, 1, 10),
            pair("link_transfer_s", 2.0, 0, 1, 1000),
            pair("link_transfer_s", 4.0, 1, 0, 1000),
            pair("link_latency_s", 1e-4, 0, 1, 1),
        ],
        [],
    ]
    run = make_run(ranks, workload="links", nic_bytes_per_s=600.0)
    (matrix,) = link_matrices(run)
    assert (matrix.names, matrix.n_bytes) == (["node0", "node1"], 1000)
    np.testing.assert_equal(matrix.bandwidth_bytes_per_s, [[np.nan, 500.0], [250.0, np.nan]])
    assert matrix.latency_s[0, 1] == 1e-4
    assert np.isnan(matrix.latency_s[1, 0])
    assert nic_limit_bytes_per_s(run) == 600.0
    assert best_links_bytes_per_s(run) == {"gloo": 500.0}


def test_latency_is_the_shortest_of_both_directions_and_a_far_median_is_said():
    def ping(value, source, target, transport):
        labels = {"source": source, "target": target, "transport": transport}
        return Sample(metric="link_latency_s", value=value, labels=labels)

    samples = [ping(value, 0, 1, "gloo") for value in (2e-4, 1e-4, 2e-4)]
    samples += [ping(value, 1, 0, "gloo") for value in (2e-4, 9e-4, 9e-3)]
    samples += [ping(1e-4, 0, 1, "mpi"), ping(3e-4, 1, 0, "mpi")]
    gloo, mpi = link_matrices(make_run([samples, []], workload="links"))
    assert gloo.latency_s[0, 1] == gloo.latency_s[1, 0] == 1e-4
    assert (gloo.median_latency_s[0, 1], gloo.median_latency_s[1, 0]) == (2e-4, 9e-4)
    assert disturbed_text(mpi) == ""
    assert disturbed_text(gloo) == (
        "the median half round trip over gloo is over 3 times the shortest on 1 of 2 links (most: "
        "node1 to node0, 900 us and 100 us): other work disturbs the links, measure again"
    )


def test_links_far_below_the_best_and_their_nics_are_counted_and_the_slowest_is_named():
    def sent(value, source, target):
        labels = {"source": source, "target": target, "transport": "gloo", "n_bytes": 100 << 20}
        return Sample(metric="link_transfer_s", value=value, labels=labels)

    pairs = [(0, 1, 1.0), (1, 0, 9.0), (0, 2, 2.5), (2, 0, 1.9), (1, 2, 1.1), (2, 1, 1.0)]
    samples = [sent(value, a, b) for a, b, value in pairs]
    run = make_run([samples, [], []], workload="links")
    (matrix,) = link_matrices(run)
    assert slow_text(run, matrix) == (
        "2 of 6 links between hosts over gloo have less than half of the bandwidth that the best "
        "one has and their NICs allow (least: node1 to node0, 11.7 MB/s of 105 MB/s): look for a "
        "bad cable, a slow NIC or port of the switch, or other traffic"
    )
    for change in ({"nic_bytes_per_s": 12e6}, {"hostname": "node0"}):
        ranks = [msgspec.structs.replace(info, **change) for info in run.header.ranks]
        header = msgspec.structs.replace(run.header, ranks=ranks)
        assert slow_text(dataclasses.replace(run, header=header), matrix) == ""


def test_collectives_above_the_link_are_counted_and_noise_is_said():
    labels = {"source": 0, "target": 1, "transport": "gloo", "n_bytes": 1000}
    samples = [
        Sample(metric="link_transfer_s", value=value, labels=labels) for value in (1.0, 1.0, 4.0)
    ]
    for n_bytes, value in ((1 << 10, 0.5), (1 << 20, 2000.0)):
        of_size = {"operation": "broadcast", "transport": "gloo", "n_bytes": n_bytes}
        samples.append(Sample(metric="collective_s", value=value, labels=of_size, step=0))
    run = make_run([samples, []], workload="links")
    rows, best = collective_table(run), best_links_bytes_per_s(run)
    assert above_link_text(run, rows, best) == (
        "1 of 2 collectives are above 100 % of the link (most: broadcast gloo 1 KiB, 205%): the "
        "link was measured too low, or ranks share a host"
    )
    assert above_link_text(run, rows[1:], best) == ""
    (matrix,) = link_matrices(run)
    assert matrix.transfers[0, 1].cv == pytest.approx(3**0.5 / 2)
    assert link_noise(rows, [matrix]) == [
        "samples of 1 of 1 links vary (most: node0 to node1 over gloo, standard deviation is 87% "
        "of the mean, minimum is 50% below the mean, maximum is 100% above the mean): end other "
        "work and measure again"
    ]


def point(n, work, time_s, **more):
    series = more.pop("series", "ddp")
    return ScalingPoint(
        family="f",
        series=series,
        strategy=series,
        n_devices=n,
        work=work,
        time=summarize([time_s * 0.9, time_s, time_s * 1.1]),
        **more,
    )


def test_strong_efficiency_holds_the_work_and_weak_the_work_per_device():
    points = [point(1, 100, 10.0), point(2, 100, 8.0), point(2, 200, 12.5)]
    (one, strong) = scaling_table(points, "strong")
    assert (one.efficiency, strong.efficiency) == (1.0, 10 / (2 * 8))
    assert strong.speedup == 1.25
    assert (strong.low, strong.high) == pytest.approx((0.625 * 0.9 / 1.1, 0.625 * 1.1 / 0.9))
    (_, weak) = scaling_table(points, "weak")
    assert weak.efficiency == 10 / 12.5


def test_one_number_of_devices_has_no_scaling():
    assert scaling_table([point(2, 100, 5.0), point(2, 100, 6.0)], "strong") == []
