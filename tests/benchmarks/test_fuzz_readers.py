"""Every reader answers broken files with its own one-line error, whatever is wrong with them."""

import sys
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import ROOT

from harness.errors import HarnessError

sys.path.insert(0, str(ROOT / "benchmarks"))
import fuzz_cases
import fuzz_mutations

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


def read(name, data, folder):
    """Nothing but the reader's own error, of one line, may come out."""
    try:
        READERS[name].read(data, folder)
    except HarnessError as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) <= 2100, message


@pytest.mark.parametrize("name", READERS)
def test_only_the_readers_own_error_comes_out(name, tmp_path):
    seeds = READERS[name].seeds()
    for data in seeds:
        READERS[name].read(data, tmp_path)

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32), st.sampled_from(seeds))
    def mutations(seed, data):
        read(name, fuzz_mutations.mutate(Random(seed), data), tmp_path)

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(st.binary() | st.text().map(lambda text: text.encode(errors="replace")))
    def anything(data):
        read(name, data, tmp_path)

    mutations()
    anything()


@pytest.mark.parametrize("path", sorted(CASES.iterdir()), ids=lambda path: path.name)
def test_what_once_escaped_is_refused(path, tmp_path):
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
