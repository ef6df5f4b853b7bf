"""Tables as users see them."""

from harness.measure.text import columns, table


def test_columns_are_aligned_to_the_left():
    text = columns(["run", "step"], [["ddp", "1.5 ms"], ["single", "20 ms"]])
    assert text == "run     step\nddp     1.5 ms\nsingle  20 ms"


def test_numbers_stand_to_the_right_under_a_rule():
    assert table(["op", "bytes"], [["conv", "10"], ["fc", "-"]]) == [
        "op    bytes",
        "-----------",
        "conv     10",
        "fc        -",
    ]
