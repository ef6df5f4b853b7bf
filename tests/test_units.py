"""Quantities in and out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ConfigError
from harness.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_number,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("16MiB", 2**24), ("4GB", 4 * 10**9), ("4096", 4096), ("1.5 KiB", 1536), ("1e6", 10**6)],
)
def test_sizes(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 1.25e8), ("100mbit", 1.25e7), ("1.25GB/s", 1.25e9), ("1e10", 1e10), ("8bit", 1.0),
        ("1Gbps", 1.25e8), ("1GBps", 1e9), ("100 Mbit/s", 1.25e7), ("1GiB/s", 2**30), ("5B/s", 5.0),
    ],
)  # fmt: skip
def test_bandwidths(text, rate):
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["1Gb/s", "10gb/s", "1gb"])
def test_a_bandwidth_of_bits_or_bytes_is_refused(text):
    with pytest.raises(ConfigError, match="is of bits or of bytes: write it"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["10", "1.25", " 400 "])
def test_a_bandwidth_whose_unit_was_forgotten_is_refused(text):
    bare = text.strip()
    with pytest.raises(ConfigError, match=f"would be {bare} bytes/s: .* {bare}gbit or {bare}GB/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(("text", "seconds"), [("500us", 5e-4), ("2", 2.0), ("5min", 300.0)])
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("parse", [parse_bytes, parse_bandwidth, parse_duration])
@pytest.mark.parametrize("text", ["", "fast", "-3", "3 parsecs"])
def test_nonsense_is_refused_with_an_example(parse, text):
    with pytest.raises(ConfigError, match="write it like"):
        parse(text)


@pytest.mark.parametrize("parse", [parse_bytes, parse_bandwidth, parse_duration])
@pytest.mark.parametrize("text", ["1e400", "1e300", "1e29"])
def test_quantities_have_an_end(parse, text):
    with pytest.raises(ConfigError, match=f"'{text}' is beyond"):
        parse(text)


@pytest.mark.parametrize("parse", [parse_bytes, parse_bandwidth, parse_duration])
@pytest.mark.parametrize("text", ["1" * 5000, " " * 10**6 + "x", "1" + " " * 10**6 + "?", "²"])
def test_long_and_foreign_digits_are_refused_in_one_short_line(parse, text):
    with pytest.raises(ConfigError, match="write it like") as caught:
        parse(text)
    assert len(str(caught.value)) < 200


@given(st.text() | st.from_regex(r"\s*[0-9.e+-]{1,9}\s*[a-zA-Z/]{0,6}\s*", fullmatch=True))
def test_a_quantity_is_read_or_refused(text):
    for parse in (parse_bytes, parse_bandwidth, parse_duration):
        try:
            assert 0 <= parse(text) <= 2**60
        except ConfigError:
            continue


def test_printing():
    assert [format_number(n) for n in (48.126, 9999.4, 25312.4)] == ["48.13", "9999", "25312"]
    assert format_number(2203.6, 3) == "2204"
    assert [format_number(n) for n in (9999.49, 9999.5, -12345.0)] == ["9999", "10000", "-12345"]
    assert format_bytes(2**24) == "16 MiB"
    assert format_bandwidth(1.25e9) == "1.25 GB/s"
    assert format_flops(1.5e13) == "15 TFLOP/s"
    assert format_duration(0.0123) == "12.3 ms"
    assert [format_duration(s) for s in (0.9994, 0.9997)] == ["999 ms", "1000 ms"]
    assert [format_bytes(1024 * n) for n in (999.7, 1023.4)] == ["1000 KiB", "1023 KiB"]
    assert format_duration(float("nan")) == "-"
    assert format_bytes(0) == "0 B"


def test_counts_have_a_plural_but_for_one():
    assert format_count(1, "stage") == "1 stage"
    assert format_count(2, "stage") == "2 stages"
    assert format_count(0, "microbatch") == "0 microbatches"
