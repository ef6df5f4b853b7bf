"""What a hypervisor took is warned of in one line."""

import msgspec
from made_runs import run_of

from harness.domain.record import Sample
from harness.measure.derive.devices import unpublished_peaks
from harness.measure.derive.doubts import stolen_shares, stolen_warnings
from harness.measure.store import Run


def disturbed(run_id, *shares, status="ok"):
    """A run of one rank on each of hosts a and b, of whose time these shares were stolen."""
    samples = [[Sample(metric="cpu_stolen_share", value=share)] for share in shares]
    info = {"device": "cpu", "device_kind": "CPU"}
    return run_of(*samples, hosts="ab", run_id=run_id, info=info, status=status)


def test_each_host_has_its_share():
    assert stolen_shares(disturbed("r", 0.0, 0.25)) == {"a": 0.0, "b": 0.25}


def test_the_worst_of_disturbed_runs_is_named():
    runs = [disturbed("r0", 0.01, 0.02), disturbed("r1", 0.03, 0.21), disturbed("r2", 0.05, 0.04)]
    (line,) = stolen_warnings(runs)
    assert line.startswith("in 2 of 3 runs a hypervisor gave more than 2% of a host's")
    assert "(most: 21% on b in r1)" in line


def test_quiet_and_older_runs_are_not_warned_of():
    assert stolen_warnings([disturbed("r0", 0.0, 0.02), disturbed("older")]) == []
    assert stolen_warnings([disturbed("failed", 0.5, 0.5, status="crash")]) == []


def test_a_gpu_without_a_published_peak_is_named():
    run = disturbed("r", 0.0, 0.0)
    assert unpublished_peaks([run]) == []  # a CPU has none to know
    infos = [
        msgspec.structs.replace(info, device="cuda:0", device_kind=kind, peak_flops_per_s=peaks)
        for info, kind, peaks in zip(
            run.header.ranks, ("GTX 680", "Tesla P4"), ({}, {"fp32": 5.5e12}), strict=True
        )
    ]
    header = msgspec.structs.replace(run.header, ranks=infos)
    (line,) = unpublished_peaks([Run(path=run.path, header=header, ranks={})] * 2)
    assert line.startswith("no published peak of 'GTX 680' is known")
