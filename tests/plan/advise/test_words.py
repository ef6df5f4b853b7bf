"""A strategy's label as words and as flags of `train`."""

from types import SimpleNamespace

import pytest

from harness.plan.advise.command import _strategy_words
from harness.plan.advise.words import _in_words


@pytest.mark.parametrize(
    ("label", "words", "flags"),
    [
        ("ddp", "ddp", "ddp"),
        ("ddp, recomputed", "ddp (recomputed)", "ddp --recompute"),
        (
            "ddp, recomputed, sharded optimizer",
            "ddp (recomputed, sharded optimizer state)",
            "ddp --recompute --shard-state optimizer",
        ),
        (
            "pipeline of 2, 4 microbatches, recomputed in segments",
            "pipeline of 2 in 4 microbatches (recomputed in segments)",
            "pipeline --schedule 1f1b --microbatches 4 --recompute --recompute-segments 64",
        ),
    ],
)
def test_a_label_becomes_words_and_flags(label, words, flags):
    assert _in_words(label) == words
    options = SimpleNamespace(output=None)
    assert " ".join(_strategy_words(options, SimpleNamespace(label=label))) == flags
