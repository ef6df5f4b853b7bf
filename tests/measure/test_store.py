"""What is written is read back; what is broken is skipped and named."""

import errno
import json
import os

import msgspec
import pytest
from made_runs import header_of, read_results

from harness.domain.cluster import Cluster
from harness.domain.record import Sample, Span
from harness.errors import ResultsError
from harness.measure.store import (
    RecordWriter,
    claim_directory,
    read_header,
    replacing,
    write_atomically,
    write_header,
)

CLUSTER = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=2**30)
HEADER = header_of([], cluster=CLUSTER, run_id="a", config={"model": "lenet"})
SPAN = Span(kind="forward", start_s=1.0, duration_s=0.5, step=3)
SAMPLE = Sample(metric="loss", value=2.5, labels={"part": "x"}, step=3)


def write_run(root, name="a", records=(SPAN, SAMPLE)):
    write_header(root / name, msgspec.structs.replace(HEADER, run_id=name))
    writer = RecordWriter(root / name, 1)
    writer.write(records)
    writer.close()
    return root / name


def test_a_run_is_read_back_as_written(tmp_path):
    write_run(tmp_path)
    results = read_results(tmp_path)
    assert results.skipped == []
    (run,) = results.runs
    assert run.header == HEADER
    assert run.ranks == {1: [SPAN, SAMPLE]}


def test_launches_of_the_same_second_get_directories_of_their_own(tmp_path):
    results = tmp_path / "results"
    assert [claim_directory(results, "a", number) for number in (7, 8)] == ["a", "a-8"]
    (tmp_path / "file").write_text("")
    assert claim_directory(tmp_path / "file", "a", 7) == "a"


def test_a_torn_last_line_loses_that_line_alone(tmp_path):
    path = write_run(tmp_path) / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    results = read_results(tmp_path)
    assert results.runs[0].ranks == {1: [SPAN]}
    ((skipped, reason),) = results.skipped
    assert skipped == path
    assert reason.startswith("line 2:")


def test_bytes_that_are_no_text_are_named_and_skipped(tmp_path):
    path = write_run(tmp_path) / "rank1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"x"', b'"\xff"'))
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "run.json").write_bytes(b'{"schema": "\xfc"}')
    results = read_results(tmp_path)
    assert results.runs[0].ranks == {1: [SPAN]}
    assert sorted(skipped.name for skipped, _ in results.skipped) == ["latin", "rank1.jsonl"]


def test_foreign_files_and_folders_are_named(tmp_path):
    write_run(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "other").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{not json")
    results = read_results(tmp_path)
    assert len(results.runs) == 1
    assert sorted(path.name for path, _ in results.skipped) == ["b", "notes.txt", "other"]


def test_a_file_that_cannot_be_read_costs_its_rank_alone(tmp_path):
    run_dir = write_run(tmp_path)
    (run_dir / "rank1.jsonl").unlink()
    (run_dir / "rank1.jsonl").mkdir()
    (run_dir / "rank2.jsonl").write_text("")
    results = read_results(tmp_path)
    assert list(results.runs[0].ranks) == [2]
    assert results.skipped == [(run_dir / "rank1.jsonl", "Is a directory")]


def test_a_header_with_an_impossible_cluster_is_named_and_skipped(tmp_path):
    run_dir = write_run(tmp_path)
    header = json.loads((run_dir / "run.json").read_text())
    header["cluster"]["nodes"] = []
    (run_dir / "run.json").write_text(json.dumps(header))
    results = read_results(tmp_path)
    assert results.runs == []
    assert "the cluster has no device" in results.skipped[0][1]


def test_a_reason_controls_no_terminal(tmp_path):
    run_dir = write_run(tmp_path)
    header = json.loads((run_dir / "run.json").read_text())
    header["reason"] = "\x1b[2Jlost\x07\nTraceback"
    (run_dir / "run.json").write_text(json.dumps(header))
    assert read_header(run_dir).reason == " [2Jlost \nTraceback"


def test_an_unknown_version_is_refused_with_both_versions(tmp_path):
    run_dir = write_run(tmp_path)
    text = (run_dir / "run.json").read_text().replace('"version": 3\n}', '"version": 99\n}')
    (run_dir / "run.json").write_text(text)
    with pytest.raises(ResultsError, match=r"version 99.*version 3: run it again"):
        read_header(run_dir)


def test_samples_of_a_change_without_its_number_are_skipped_and_named(tmp_path):
    labels = {"before": "ddp", "after": "pipeline", "why": "drift"}
    metrics = {"change_s": labels, "change_build_s": {}, "cache_received_bytes": {"change": -1}}
    write_run(
        tmp_path, records=[Sample(metric=m, value=1.0, labels=own) for m, own in metrics.items()]
    )
    reasons = [reason for _, reason in read_results(tmp_path).skipped]
    number = "it must be a whole number from 0 to"
    assert [reason.partition(" 1152")[0] for reason in reasons] == [
        f"line 1: change_s has no label change: {number}",
        f"line 2: change_build_s has no label change: {number}",
        f"line 3: cache_received_bytes has change -1: {number}",
    ]


def test_appending_after_a_crash_keeps_what_was_there(tmp_path):
    run_dir = write_run(tmp_path)
    writer = RecordWriter(run_dir, 1)
    writer.write([SAMPLE])
    writer.close()
    assert len(read_results(tmp_path).runs[0].ranks[1]) == 3


def test_a_file_whose_writing_fails_stays_and_nothing_else_does(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("a library's own: No space left on device (os error 28)")

    with pytest.raises(ResultsError, match=f"{path} on .* cannot be written: No space left on dev"):
        write_half()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(path.name, "old")]


def test_a_file_system_that_reserves_nothing_holds_runs(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    write_header(tmp_path, HEADER)
    ended = msgspec.structs.replace(HEADER, status="ok")
    write_header(tmp_path, ended)
    assert read_header(tmp_path) == ended


def fill(directory):
    with (directory / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):  # noqa: PT012
        while True:
            file.write(b"x" * 512)


@pytest.mark.cluster
def test_a_full_disk_costs_the_line_being_written_and_no_header(small_disk):
    run_dir = write_run(small_disk)
    fill(small_disk)
    writer = RecordWriter(run_dir, 1)
    with pytest.raises(ResultsError, match=r"rank1.jsonl on .* No space left on device"):
        writer.write([SPAN] * 100_000)
    writer.close()
    ended = msgspec.structs.replace(HEADER, status="crash", reason="No space left on device")
    write_header(run_dir, ended)
    results = read_results(small_disk)
    assert [path.name for path, _ in results.skipped] == ["filler"]
    (run,) = results.runs
    assert run.header == ended
    assert run.ranks[1][:2] == [SPAN, SAMPLE]


@pytest.mark.cluster
def test_a_full_disk_leaves_files_of_planning_as_they_were(small_disk):
    path = small_disk / "cluster.json"
    write_atomically(path, b"old")
    fill(small_disk)
    with pytest.raises(ResultsError, match=r"cluster.json on .* No space left on device"):
        write_atomically(path, b"new" * 10_000)
    with pytest.raises(ResultsError, match="No space left on device"):
        write_atomically(small_disk / "deeper" / "profile-lenet.json", b"new" * 10_000)
    assert path.read_bytes() == b"old"
    assert not list(small_disk.rglob("*.tmp"))


def test_a_results_path_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(ResultsError, match="not a directory"):
        read_results(tmp_path / "missing")


def test_what_planning_reads_lies_beside_runs_and_is_not_skipped(tmp_path):
    for name in ("cluster.json", "profile-vgg16.json", "profile-vgg16.graph.json", "README.md"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    assert [path.name for path, _ in read_results(tmp_path).skipped] == ["notes.txt"]
