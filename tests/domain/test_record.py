"""Spans as lines of a file, and in words; the header of a run."""

import msgspec
import pytest
from made_runs import header_of

from harness.domain.record import Record, Sample, Span, SpanFields, has_details, is_detail
from harness.domain.run import RankInfo, device_names

GIB = 2**30


def span(kind, **fields):
    return Span(kind=kind, start_s=1.0, duration_s=0.5, **fields)


def test_later_steps_have_details_ever_more_rarely():
    found = [step for step in range(30_000) if has_details(step)]
    assert found == [*range(1000), *range(1000, 10_000, 10), *range(10_000, 30_000, 100)]


def test_a_steps_time_and_loss_are_no_details():
    step = {"start_s": 0.0, "duration_s": 1.0, "step": 7}
    kept = [
        Span(kind="step", **step),
        Span(kind="change", **step),
        Span(kind="forward", **step | {"step": None}),
    ]
    kept += [Sample(metric="loss", value=1.0, step=7), Sample(metric="n_samples", value=1.0)]
    dropped = [Span(kind="forward", **step), Sample(metric="n_samples", value=1.0, step=7)]
    assert [is_detail(record) for record in kept + dropped] == [False] * 5 + [True] * 2


def test_a_line_holds_only_the_fields_that_apply():
    plain = '{"type":"span","kind":"forward","start_s":1.0,"duration_s":0.5'
    assert msgspec.json.encode(span("forward")).decode() == plain + "}"
    weights = span("forward", step=2, stage=1, microbatch=0, pass_="recompute")
    line = plain + ',"step":2,"stage":1,"microbatch":0,"pass":"recompute"}'
    assert msgspec.json.encode(weights).decode() == line
    assert msgspec.json.decode(line, type=Record) == weights


def test_every_optional_field_can_be_recorded():
    required = {"kind", "start_s", "duration_s"}
    optional = set(Span.__struct_fields__) - required
    assert optional == SpanFields.__annotations__.keys() | {"step"}


@pytest.mark.parametrize(
    "field", ['"stage":-1', '"pass":"sideways"', '"peer":"1"', '"is_wait":1', '"microbatch":1e12']
)
def test_a_field_out_of_bounds_is_refused(field):
    line = f'{{"type":"span","kind":"forward","start_s":1,"duration_s":1,{field}}}'
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(line, type=Record)


@pytest.mark.parametrize(
    ("words", "one"),
    [
        ("", span("optimizer")),
        ("stage1 #0", span("forward", stage=1, microbatch=0)),
        ("recompute stage1 #3", span("forward", stage=1, microbatch=3, pass_="recompute")),
        ("conv1", span("backward", stage=0, operator="conv1")),
        ("weights of conv1 #3", span("backward", operator="conv1", microbatch=3, pass_="weights")),
        ("bucket0", span("communication", name="bucket0")),
        (
            "wait for gradient of conv1 #3 from rank 0",
            span(
                "communication",
                operator="conv1",
                microbatch=3,
                pass_="backward",
                peer=0,
                is_wait=True,
            ),
        ),
        (
            "conv1 a -> b #3",
            span(
                "communication",
                name="conv1 a -> b",
                operator="conv1",
                microbatch=3,
                pass_="forward",
                peer=1,
            ),
        ),
    ],
)
def test_a_label_says_in_words_what_the_fields_say(words, one):
    assert one.label == words


def test_devices_are_named_by_host_and_place_on_it():
    ranks = [
        RankInfo(rank=rank, hostname=host, device="", device_kind="", n_cores=1, memory_bytes=1)
        for rank, host in enumerate("abab")
    ]
    names = {0: "a:0", 1: "b:0", 2: "a:1", 3: "b:1"}
    assert device_names(ranks) == device_names(reversed(ranks)) == names


def test_an_ending_is_one_line():
    header = header_of()
    traced = msgspec.structs.replace(header, status="crash", reason="rank 0 (a): no\nTraceback")
    assert (traced.ending, header.ending) == ("crashed: rank 0 (a): no", "not finished")


@pytest.mark.parametrize(
    ("device", "gib", "expected"),
    [("cuda:0", 80.75, 76 * GIB), ("cpu", 4, 1.75 * GIB), ("cpu", 0.25, 1)],
)
def test_plans_fill_a_device_but_for_its_process_and_allocator(device, gib, expected):
    info = RankInfo(
        rank=0, hostname="h", device=device, device_kind="", n_cores=1,
        memory_bytes=round(gib * GIB),
    )  # fmt: skip
    assert info.training_bytes == expected
