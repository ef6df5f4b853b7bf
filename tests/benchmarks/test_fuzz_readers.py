"""Every reader answers broken files with its own one-line error, whatever is wrong with them."""

from __future__ import annotations

import mmap
import signal
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import fuzz_cases  # noqa: E402
import fuzz_mutations  # noqa: E402
import fuzz_readers  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))
READERS = fuzz_cases.READERS
CASES = ROOT / "tests" / "cases" / "readers"
READER_OF = {
    "ds_log": "deepspeed_log", "ff_console": "flexflow_console", "ff_text": "flexflow_text",
    "ff_text_direct": "flexflow_text", "versions_probe": "probe", "safetensors": "state_shards",
    "units": "quantities",
}  # fmt: skip
# Readers that leave out what they cannot read: the rest of the file counts.
LENIENT = {"probe", "deepspeed_log", "epoch_csv"}


def read(name: str, data: bytes, folder: Path) -> None:
    """Nothing but the reader's own error, of one line, may come out."""
    try:
        READERS[name].read(data, folder)
    except HarnessError as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) <= 2100, message


@pytest.mark.parametrize("name", READERS)
def test_a_valid_file_is_read(name: str, tmp_path: Path) -> None:
    for data in READERS[name].seeds():
        READERS[name].read(data, tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_only_the_readers_own_error_comes_out(name: str, tmp_path: Path) -> None:
    seeds = READERS[name].seeds()

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32), st.sampled_from(seeds))
    def mutations(seed: int, data: bytes) -> None:
        read(name, fuzz_mutations.mutate(Random(seed), data), tmp_path)

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(st.binary() | st.text().map(lambda text: text.encode(errors="replace")))
    def anything(data: bytes) -> None:
        read(name, data, tmp_path)

    mutations()
    anything()


@pytest.mark.parametrize("path", sorted(CASES.iterdir()), ids=lambda path: path.name)
def test_what_once_escaped_is_refused(path: Path, tmp_path: Path) -> None:
    name = path.name.split("-")[0]
    name = READER_OF.get(name, name)
    if name in LENIENT:
        return read(name, path.read_bytes(), tmp_path)
    data = path.read_bytes()
    with pytest.raises(HarnessError) as caught:
        READERS[name].read(data + b" bytes" if name == "quantities" else data, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return None


def test_the_program_counts_what_escapes_and_fails_by_it(monkeypatch, tmp_path, capsys) -> None:
    def one(data: bytes, _: Path) -> None:
        if len(data) % 3 == 0:
            raise ZeroDivisionError
        if len(data) % 3 == 1:
            raise HarnessError("no")

    monkeypatch.setitem(READERS, "broken", fuzz_cases.Reader(lambda: [b"x" * 8], one))
    tally = fuzz_readers.fuzz("broken", 60, 0, tmp_path)
    assert tally.n == 60 == tally.n_read + tally.n_refused + tally.n_escaped
    assert min(tally.n_read, tally.n_refused, tally.n_escaped) > 0
    assert tally.escapes == {
        f"ZeroDivisionError in {Path(__file__).name}:{one.__code__.co_firstlineno + 2}":
        tally.n_escaped
    }  # fmt: skip
    assert len(list(tmp_path.glob("broken-ZeroDivisionError-*"))) == 1
    again = fuzz_readers.fuzz("broken", 60, 0, None)
    assert again.n_escaped == tally.n_escaped
    monkeypatch.setattr(fuzz_readers, "tallies", lambda *_: iter([tally]))
    assert fuzz_readers.main(["--only", "cluster"]) == 1
    assert f"{tally.n_escaped} escaped" in capsys.readouterr().out


def test_a_reader_that_hangs_escapes(tmp_path) -> None:
    def spin(data: bytes, _: Path) -> None:
        with suppress(ValueError):
            while True:
                pass

    kinds = signal.SIGALRM, signal.SIGPROF
    before = [signal.getsignal(kind) for kind in kinds]
    fuzz_readers.catch_hangs()
    try:
        found = fuzz_readers.read(fuzz_cases.Reader(lambda: [b""], spin), b"", tmp_path)
        assert (found.escape, found.was_read) == ("hang", False)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def test_memory_is_counted_beyond_what_was_held_before(tmp_path) -> None:
    def hoard(data: bytes, _: Path) -> None:
        # Fresh pages, whatever the allocator has kept of earlier tests.
        with mmap.mmap(-1, 300 * 2**20) as pages:
            for start in range(0, len(pages), mmap.PAGESIZE):
                pages[start] = 1

    hoarding = fuzz_cases.Reader(lambda: [b""], hoard)
    for _ in range(2):  # an earlier peak hides no later one
        found = fuzz_readers.read(hoarding, b"", tmp_path)
        assert (found.escape, 290 < found.held_mib < 320) == ("memory", True)
