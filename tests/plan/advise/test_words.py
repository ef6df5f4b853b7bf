"""A strategy's label as words and as flags of `train`."""

from types import SimpleNamespace

import msgspec
import pytest
from made_graphs import layers, replicated_pipeline

from harness.domain.checkpoints import MOST_OF_STAGE, with_recomputation
from harness.domain.cluster import Cluster
from harness.plan import builders
from harness.plan.advise.command import _strategy_words
from harness.plan.advise.pricing import Priced
from harness.plan.advise.words import _in_words
from harness.plan.report import memory_saved

GRAPH, _ = layers(4)
PAIR = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=10**9)
DDP = builders.ddp(GRAPH, PAIR, 8)
PIPELINE = msgspec.structs.replace(
    replicated_pipeline(GRAPH, 8, [[0], [1]]), name="pipeline of 2, 4 microbatches"
)
ALONE = msgspec.structs.replace(PIPELINE, n_microbatches=1, name="pipeline of 2, 1 microbatch")


@pytest.mark.parametrize(
    ("plain", "n_segments", "state", "words", "flags"),
    [
        (DDP, 0, "none", "ddp", "ddp"),
        (DDP, MOST_OF_STAGE, "none", "ddp (recomputed)", "ddp --recompute"),
        (
            DDP,
            MOST_OF_STAGE,
            "optimizer",
            "ddp (recomputed, sharded optimizer state)",
            "ddp --recompute --shard-state optimizer",
        ),
        (
            PIPELINE,
            MOST_OF_STAGE,
            "none",
            "pipeline of 2 in 4 microbatches (recomputed in segments)",
            "pipeline --schedule 1f1b --microbatches 4 --recompute --recompute-segments 64",
        ),
        (
            ALONE,
            0,
            "none",
            "pipeline of 2 in 1 microbatch",
            "pipeline --schedule 1f1b --microbatches 1",
        ),
    ],
)
def test_a_label_becomes_words_and_flags(plain, n_segments, state, words, flags):
    strategy = with_recomputation(plain, GRAPH, n_segments) if n_segments else plain
    strategy = msgspec.structs.replace(strategy, shard_state=state)
    priced = Priced(
        cluster=PAIR, strategy=strategy, label=plain.name + memory_saved(strategy), batch=8,
        predicted_s=1.0, step_s=1.0, is_measured=False, fullest=("node0:0", 1, 2),
    )  # fmt: skip
    assert _in_words(priced) == words
    assert " ".join(_strategy_words(SimpleNamespace(output=None), priced)) == flags
