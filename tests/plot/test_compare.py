"""`python -m harness.plot compare BEFORE AFTER`: pairs, outcomes, exit codes, what differs."""

from __future__ import annotations

import json

import pytest
from measured_runs import (
    copies,
    links_records,
    make_cluster,
    make_header,
    train_config,
    training_records,
    write_run,
    write_training,
)

from harness.plot.__main__ import main


def trained(root, compute_s, *, repeats=1, config=None, **more):
    """Repeats of a training on one device."""
    for repeat in range(repeats):
        write_training(
            root, f"single-{repeat}", train_config("single", 160, **(config or {})),
            make_cluster(1), compute_s, 0.0, seed=repeat, repeat=repeat, **more,
        )  # fmt: skip
    return root


def linked(root, bandwidth, run_id="links"):
    header = make_header("links", {}, make_cluster(5), run_id=run_id)
    write_run(root, header, links_records(bandwidth=bandwidth))
    return root


def compared(before, after, capsys):
    """Exit code and document of `compare --json`."""
    code = main(["compare", str(before), str(after), "--json"])
    return code, json.loads(capsys.readouterr().out)


def outcomes(document, kind):
    return {p["name"]: p["outcome"] for p in document["measurements"] if p["kind"] == kind}


def test_directory_equals_itself(comparison, capsys):
    code, document = compared(comparison, comparison, capsys)
    assert code == 0
    kinds = {pair["kind"] for pair in document["measurements"]}
    assert kinds == {
        "training", "link bandwidth", "link latency", "bus bandwidth", "matmul",
        "distributed product", "memory bandwidth",
    }  # fmt: skip
    assert {pair["ratio"] for pair in document["measurements"]} == {1.0}
    assert not document["software"] + document["only_before"] + document["only_after"]


def test_seven_repeats_of_each_give_a_verdict(tmp_path, capsys):
    before = trained(tmp_path / "before", 0.1, repeats=7)
    after = trained(tmp_path / "after", 0.2, repeats=7)
    code, document = compared(before, after, capsys)
    (pair,) = document["measurements"]
    assert code == 1
    assert (pair["outcome"], pair["n_before"], pair["n_after"]) == ("slower", 7, 7)
    assert pair["ratio"] == pytest.approx(2, rel=0.1)
    code, document = compared(after, before, capsys)
    assert (code, document["measurements"][0]["outcome"]) == (0, "faster")


def test_outcome_by_intervals_of_few_runs_has_a_question_mark(tmp_path, capsys):
    before = linked(tmp_path / "before", 1.17e8)
    code, document = compared(before, linked(tmp_path / "after", 0.5e8), capsys)
    assert code == 1
    assert set(outcomes(document, "link bandwidth").values()) == {"slower?"}
    assert set(outcomes(document, "link latency").values()) == {"same?"}
    assert outcomes(document, "link bandwidth")["tesla0:0 to tesla1:0 over nccl"]


@pytest.mark.parametrize(("n_runs", "n_steps"), [(1, 1), (1, 2), (2, 1)])
def test_one_or_two_values_of_each_decide_nothing(n_runs, n_steps, tmp_path, capsys):
    for side, compute_s in (("a", 0.1), ("b", 0.101), ("c", 0.2)):
        for repeat in range(n_runs):
            header = make_header(
                "train", train_config("single", 160), make_cluster(1), run_id=f"{side}{repeat}"
            )
            records = training_records(1, 160, compute_s, 0.0, seed=repeat)[0]
            few = [record for record in records if (record.step or 0) < n_steps]
            write_run(tmp_path / side, header, {0: few})
    for after in ("a", "b", "c"):
        code, document = compared(tmp_path / "a", tmp_path / after, capsys)
        assert (code, document["measurements"][0]["outcome"]) == (0, "inconclusive")


def test_two_runs_of_each_are_as_far_apart_as_their_steps(tmp_path, capsys):
    before = trained(tmp_path / "before", 0.1, repeats=2)
    code, document = compared(before, trained(tmp_path / "after", 0.2, repeats=2), capsys)
    assert (code, document["measurements"][0]["outcome"]) == (1, "slower?")


def test_table_has_rates_and_largest_changes(tmp_path, capsys):
    before = linked(tmp_path / "before", 1.17e8)
    assert main(["compare", str(before), str(linked(tmp_path / "after", 0.5e8))]) == 1
    text = capsys.readouterr().out
    # A message of 16 MiB takes 2.34 times as long at 50 MB/s as at 117 MB/s.
    row = next(line for line in text.splitlines() if "tesla0:0 to tesla1:0" in line)
    assert row.split()[-9:] == ["117", "MB/s", "50", "MB/s", "2.34", "1", "and", "1", "slower?"]
    assert sum(line.startswith("link bandwidth") for line in text.splitlines()) == 10
    assert "--all lists them" in text


def test_training_that_fails_now_is_worse(tmp_path, capsys):
    before = trained(tmp_path / "before", 0.1)
    after = trained(tmp_path / "after", 0.1, status="timeout", reason="no rank answered")
    code, document = compared(before, after, capsys)
    (pair,) = document["measurements"]
    assert (code, pair["outcome"], pair["after_s"]) == (1, "fails", None)
    assert "no rank answered" in pair["note"]
    assert document["sentence"].startswith("0 of 1 measurement slower, 1 failing, 0 faster")


def test_a_training_that_fails_now_and_then_is_named(tmp_path, capsys):
    before, after = (trained(tmp_path / name, 0.1, repeats=3) for name in ("before", "after"))
    config, reason = train_config("single", 160), "no rank answered"
    ended = {"status": "timeout", "reason": reason}
    write_training(after, "late", config, make_cluster(1), 0.1, 0.0, seed=3, repeat=3, **ended)
    assert main(["compare", str(before), str(after)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Not ok after: training: ")
    assert last.endswith(": 1 of 4 runs, timed out: no rank answered")


def test_settings_of_later_versions_do_not_count_but_others_do(tmp_path, capsys):
    before = trained(tmp_path / "before", 0.1, config={"optimizer": "sgd"})
    after = trained(tmp_path / "after", 0.1, config={"optimizer": "sgd", "new": 3})
    _, document = compared(before, after, capsys)
    assert len(document["measurements"]) == 1
    linked(before, 1e8), linked(after, 1e8)
    other = trained(tmp_path / "other", 0.1, config={"optimizer": "adamw"})
    linked(other, 1e8)
    _, document = compared(before, other, capsys)
    assert not outcomes(document, "training")
    assert "optimizer sgd" in document["only_before"][0]
    assert "optimizer adamw" in document["only_after"][0]


def test_versions_that_differ_are_named(tmp_path, capsys):
    before = trained(tmp_path / "before", 0.1, versions={"torch": "2.11.0"})
    after = trained(tmp_path / "after", 0.1, settings={"OMP_NUM_THREADS": "4"})
    _, document = compared(before, after, capsys)
    assert {"name": "torch", "before": "2.11.0", "after": "2.13.0"} in document["software"]
    assert {one["name"] for one in document["software"]} == {"torch", "OMP_NUM_THREADS"}


def test_devices_that_differ_are_named(tmp_path, capsys):
    before, other = trained(tmp_path / "before", 0.1), tmp_path / "other"
    cluster = make_cluster(1, kind="NVIDIA H200")
    write_training(other, "single", train_config("single", 160), cluster, 0.1, 0.0)
    _, document = compared(before, other, capsys)
    (found,) = document["software"]
    assert found["name"] == "devices"
    assert found["after"].startswith("H200 of ")
    assert found["before"] != found["after"]


def test_directories_without_a_common_measurement_are_refused(tmp_path, capsys, comparison):
    links = copies(comparison, tmp_path / "links", "links")
    matmul = copies(comparison, tmp_path / "matmul", "matmul")
    assert main(["compare", str(links), str(matmul)]) == 2
    error = capsys.readouterr().err
    assert "no measurement in common" in error
    assert str(links) in error
    assert "matmul: tesla0:0 fp32" in error
