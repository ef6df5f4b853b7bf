"""Frames wait their latency out, in order, under a clock that the test sets."""

from hypothesis import given
from hypothesis import strategies as st

from harness.virtual.relay import Direction


def test_a_frame_leaves_when_its_latency_is_over():
    direction = Direction(source=3, target=4, latency_s=0.5)
    direction.accept(b"a", now_s=10.0)
    direction.accept(b"b", now_s=10.25)
    assert direction.release(10.4) == []
    assert direction.release(10.5) == [b"a"]
    assert direction.release(10.7) == []
    assert direction.release(11.0) == [b"b"]


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0, 1))
def test_frames_keep_their_order_and_none_is_lost(gaps_s, latency_s):
    direction = Direction(source=3, target=4, latency_s=latency_s)
    now_s, sent, received = 0.0, [], []
    for index, gap_s in enumerate(gaps_s):
        now_s += gap_s
        direction.accept(bytes([index]), now_s)
        sent.append(bytes([index]))
        received += direction.release(now_s)
    received += direction.release(now_s + latency_s)
    assert received == sent
