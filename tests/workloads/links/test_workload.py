"""The links workload: flags, the fit of a link, the cluster file, and real runs on local ranks."""

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import local_ranks
import msgspec
import pytest
import torch
from fake_clock import FakeClock
from local_ranks import run_on_ranks
from made_runs import local_header, world_of

from harness.domain.cluster import Cluster, CollectivePoint
from harness.errors import ConfigError, VerificationError
from harness.measure.derive.links import collective_table, link_matrices, overhead_table
from harness.measure.derive.spans import samples_of
from harness.measure.recorder import HostClock
from harness.measure.store import write_header
from harness.runtime.devices.sampling import Budget
from harness.workloads.links import overhead as links_overhead
from harness.workloads.links.pairs import (
    PairTimes,
    build_cluster,
    fit_link,
    measured_flops,
    time_pair,
)
from harness.workloads.links.workload import (
    LinksConfig,
    _write_cluster,
    links_cases,
    links_text,
    run_links,
)

MB = 1e6
SMALL = LinksConfig(
    # The first two sizes are one in whole elements of three ranks.
    sizes=("1021", "1KiB", "64KiB"),
    pair_sizes=("16KiB", "256KiB"),
    time_budget_s=0.001,
    min_samples=3,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operations": ("all_recude",)}, r"\['all_recude'\] are not among all_reduce"),
        ({"operations": ()}, "none are not among"),
        ({"sizes": ("16MiBs",)}, "16MiBs"),
        ({"sizes": ("0",)}, "'0' is outside 1 B to 8GiB"),
        ({"pair_sizes": ("9GiB",)}, "'9GiB' is outside"),
        ({"time_budget_s": float("inf")}, "--time-budget-s inf must be above 0, and finite"),
        ({"min_samples": 200}, "--min-samples 200 and --max-samples 100"),
        ({"warm_up": 0}, "--warm-up 0 must be at least 1"),
        ({"measure": "pairs", "operations": ("broadcast",)}, "pairs has no use for --operations"),
        ({"measure": "pairs", "sizes": ("1KiB",)}, "--measure pairs has no use for --sizes: drop"),
        ({"measure": "collectives", "pair_sizes": ("1KiB",)}, "no use for --pair-sizes"),
    ],
)
def test_impossible_flags_are_refused_with_their_values(change, message):
    with pytest.raises(ConfigError, match=message):
        links_cases(replace(LinksConfig(), **change), 2)


def line(latency_s, bandwidth, sizes):
    return PairTimes(latency_s, {n: latency_s + n / bandwidth for n in sizes})


@pytest.mark.parametrize("sizes", [[1 << 20], [1 << 18, 1 << 22], [1 << 18, 1 << 22, 1 << 24]])
def test_a_straight_line_is_fitted_exactly(sizes):
    assert fit_link(line(100e-6, 117 * MB, sizes)) == (100e-6, pytest.approx(117 * MB))


def test_a_burst_at_a_small_size_does_not_raise_the_bandwidth():
    times = line(50e-6, 117 * MB, [1 << 18, 1 << 22])
    times.transfers[1 << 18] /= 2  # half of it passed inside the token bucket's burst
    assert fit_link(times)[1] == pytest.approx(117 * MB)


def test_the_cluster_holds_links_collectives_nics_and_rates():
    header = local_header(["a", "b", "a"])
    sizes = [1 << 20, 1 << 22]
    pairs = {
        (0, 1): line(1e-3, 100 * MB, sizes),
        (1, 0): line(1e-3, 110 * MB, sizes),
        (0, 2): line(1e-5, 5000 * MB, sizes),
    }
    point = CollectivePoint(
        operation="all_reduce", transport="gloo", n_ranks=3, n_bytes=12, duration_s=0.5
    )
    rates = [{"fp32": 1e12}, {}, {"fp32": 2e12}]
    cluster = build_cluster(header, pairs, [point], rates, [1e-9, 0.0, 3e-9])
    assert Cluster.from_json(cluster.to_json()) == cluster
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in cluster.links}
    assert rates == {
        ("a:0", "b:0"): pytest.approx(100 * MB),
        ("a:0", "a:1"): pytest.approx(5000 * MB),
        ("b:0", "a:0"): pytest.approx(110 * MB),
    }
    # A link inside the node says nothing about its NIC.
    assert [node.nic_bytes_per_s for node in cluster.nodes] == [pytest.approx(110 * MB)] * 2
    assert [device.name for device in cluster.devices] == ["a:0", "a:1", "b:0"]
    assert [device.flops_per_s for device in cluster.devices] == [
        {"fp32": 1e12},
        {"fp32": 2e12},
        {},
    ]
    assert [device.host_s_per_byte for device in cluster.devices] == [1e-9, 3e-9, 0.0]
    assert cluster.collectives == [point]


@pytest.mark.parametrize(("transport", "is_shared"), [("torch", True), ("mpi", False)])
def test_links_over_mpi_are_not_those_that_training_is_planned_by(tmp_path, transport, is_shared):
    run_dir = tmp_path / "run"
    write_header(run_dir, local_header(["a", "b"]))
    context = SimpleNamespace(run_dir=run_dir, world=SimpleNamespace(size=2))
    pairs = {pair: line(40e-6, 121 * MB, [1 << 22]) for pair in ((0, 1), (1, 0))}
    _write_cluster(LinksConfig(transport=transport), context, pairs, [], [])
    assert (run_dir / "cluster.json").exists()
    assert (tmp_path / "cluster.json").exists() == is_shared


def test_a_disturbed_latency_neither_stays_nor_raises_the_bandwidth():
    pairs = {pair: line(40e-6, 121 * MB, [1 << 22]) for pair in ((0, 1), (1, 0))}
    pairs[1, 0] = replace(pairs[1, 0], latency_s=1.35e-3)
    links = build_cluster(local_header(["a", "b"]), pairs, [], [{}, {}], []).links
    assert [link.latency_s for link in links] == [40e-6] * 2
    assert [link.bandwidth_bytes_per_s for link in links] == [pytest.approx(121 * MB)] * 2


def test_rates_come_from_the_newest_matmul_run_on_the_same_devices(tmp_path):
    header = local_header(["a", "b"])
    assert measured_flops(tmp_path, header) == [{}, {}]

    def write_run(start, seconds, **changes):
        changed = {"workload": "matmul", "start_utc": start, **changes}
        name = f"{start}-matmul-r0"
        write_header(tmp_path / name, msgspec.structs.replace(header, **changed))
        sample = (
            '{"type":"sample","metric":"matmul_s","value":%g,'
            '"labels":{"m":100,"n":100,"k":100,"dtype":"fp32"}}\n'
        )
        (tmp_path / name / "rank1.jsonl").write_text(sample % seconds)

    write_run("2026-01-01", 1.0)
    write_run("2026-01-02", 0.5)
    write_run("2026-01-03", 0.1, status="invalid")
    write_run("2026-01-04", 0.2, ranks=local_header(["a", "c"]).ranks)
    assert measured_flops(tmp_path, header) == [{}, {"fp32": 4e6}]


def test_every_pair_and_collective_is_measured_checked_and_written():
    again = replace(SMALL, operations=(*SMALL.operations, "all_reduce"))
    results, run = run_on_ranks(local_ranks.links_with_cluster, again, 3)
    matrices = link_matrices(run)
    assert [matrix.transport for matrix in matrices] == ["gloo"]
    for source in range(3):
        for target in range(3):
            is_measured = matrices[0].latency_s[source, target] > 0
            assert is_measured == (source != target)
    assert matrices[0].n_bytes == 256 << 10
    rows = collective_table(run)
    assert {(row.operation, row.n_bytes) for row in rows} == {
        (operation, n_bytes)
        for operation in SMALL.operations
        for n_bytes in (1032, 65544)  # the next multiples of three ranks' elements
    }
    assert all(row.time.n >= 3 for row in rows)
    cluster = Cluster.from_json(results[0].encode())
    assert len(cluster.links) == 6
    names = [device.name for device in cluster.devices]
    for link in cluster.links:
        pair = names.index(link.source), names.index(link.target)
        assert link.latency_s == matrices[0].latency_s[pair]
    measured = [(point.operation, point.n_bytes) for point in cluster.collectives]
    assert sorted(measured) == [(row.operation, row.n_bytes) for row in rows]
    text = links_text([run])
    assert "half round trip, shortest (median)" in text
    assert "bandwidth at 256 KiB (CV)" in text
    # Local ranks copy and add up on the cores that compute.
    rows = overhead_table(run)
    taken = [device.host_s_per_byte for device in cluster.devices]
    assert [row.taken_s_per_byte for row in rows] == taken
    assert max(taken) > 0
    assert all(row.speed > 0 for row in rows)
    assert "overhead per byte" in links_text([run])


def test_computing_waits_for_itself_and_not_for_transfers(monkeypatch):
    waited = []

    class Stream:
        def synchronize(self):
            waited.append("computing")

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("everything"))
    chunks = links_overhead._Chunks(SimpleNamespace(device=torch.device("cpu")))
    chunks._is_cuda = True
    over = iter([False, True])
    assert chunks.until(lambda: next(over))[0] == 2
    assert waited == ["computing"] * 2


def test_opening_a_connection_does_not_make_a_message_long(monkeypatch):
    clock, connecting_s = FakeClock(), iter([10.0])  # of the first message; then 100 MB/s

    def start(out, message):
        clock.advance(next(connecting_s, 0.0) + message.nbytes / (100 * MB))
        return []

    monkeypatch.setattr(links_overhead, "post_ring", start)
    monkeypatch.setattr(links_overhead, "barrier", lambda: None)
    monkeypatch.setattr(links_overhead, "maximum_over_ranks", lambda values, world: values)
    monkeypatch.setattr(links_overhead.time, "perf_counter", clock.mark)
    world = SimpleNamespace(backend="gloo", wire=torch.device("cpu"))
    message = links_overhead._message_of(0.1, world)
    assert 0.1 <= message.nbytes / (100 * MB) <= 0.2


class InProcess:
    """Two ranks of one process: a message is a queue's item."""

    name, size, device, clock = "queues", 2, torch.device("cpu"), HostClock()

    def __init__(self, rank, to, corrupts=False):
        self.rank, self._to, self._corrupts = rank, to, corrupts

    def send(self, data, target):
        self._to[target].put(data.clone())

    def receive(self, data, source):
        data.copy_(self._to[self.rank].get(timeout=5))
        if self._corrupts and len(data) > 1:
            data[0] += 1


def test_both_ranks_of_a_pair_fail_when_the_target_receives_wrong_data():
    queues = [queue.Queue(), queue.Queue()]
    ranks = [InProcess(0, queues), InProcess(1, queues, corrupts=True)]
    budget = Budget(time_s=0.001, n_min=1, n_warm_up=1)
    with ThreadPoolExecutor() as pool:
        parts = [pool.submit(time_pair, (0, 1), [64], transport, budget) for transport in ranks]
    for part in parts:
        with pytest.raises(VerificationError, match=r"1 of 16 elements .* from rank 0 at rank 1"):
            part.result()


def test_wrong_data_between_two_ranks_fails_on_all():
    told, _ = run_on_ranks(local_ranks.corrupted_pairs, None, 3)
    for text in told:
        assert "1 of 256 elements of 1 KiB arrived wrong from rank 0 at rank 1" in text


def test_a_link_too_slow_for_the_smallest_message_keeps_its_time():
    told, run = run_on_ranks(local_ranks.slow_pairs, None, 2)
    assert told[0] == told[1]
    transfers, (first, second) = told[0]
    assert list(transfers[1, 0]) == [1 << 10, 1 << 12, 1 << 14]
    assert list(transfers[0, 1]) == [1 << 10]
    assert transfers[0, 1][1 << 10] > 0.2
    assert first == (
        "4 KiB over gloo on 1 of 2 links, such as rank 0 to rank 1: a smaller message takes over "
        "200 ms; --pair-sizes measures it anyway"
    )
    assert second.startswith("16 KiB over gloo on 1 of 2 links")
    n_samples = [s.labels["n_bytes"] for s in samples_of(run.ranks[0], "link_transfer_s")]
    assert n_samples == [1 << 10]  # the warm-up alone


def test_only_what_is_asked_for_is_measured_and_replaces_no_cluster_file():
    narrow = [replace(SMALL, measure="pairs"), replace(SMALL, measure="collectives")]
    results, run = run_on_ranks(local_ranks.links_beside_a_cluster, narrow, 2)
    assert results[0] == ["known", "known"]
    assert overhead_table(run) == []
    assert len(link_matrices(run)) == 1
    assert collective_table(run) != []


def test_one_rank_alone_has_no_pairs_and_no_collectives():
    results, run = run_on_ranks(local_ranks.links_with_cluster, SMALL, 1)
    assert link_matrices(run) == []
    assert collective_table(run) == []
    cluster = Cluster.from_json(results[0].encode())
    assert cluster.links == []
    assert [device.host_s_per_byte for device in cluster.devices] == [0.0]


def test_mpi_without_mpirun_is_refused():
    context = SimpleNamespace(world=world_of(), recorder=SimpleNamespace(clock=HostClock()))
    with pytest.raises(ConfigError, match="--transport mpi needs ranks that mpirun started"):
        run_links(replace(SMALL, transport="mpi"), context)
