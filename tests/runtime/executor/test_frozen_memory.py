"""Freezing layers frees the memory that the simulator predicts."""

import pytest
from frozen_memory import N_RANKS, peaks_as_layers_freeze


@pytest.mark.parametrize("name", ["ddp", "1f1b", "gpipe"])
def test_memory_falls_by_the_prediction(name, ranks):
    """Of 6 layers the pipeline has 3 on each rank."""
    for rank, peaks in enumerate(ranks.run(N_RANKS, peaks_as_layers_freeze, (name, [0, 2, 5]))):
        first, *frozen = peaks
        assert first.predicted == pytest.approx(first.measured, rel=0.05)
        for now in frozen[(name != "ddp" and rank == 1) :]:
            fall = first.measured - now.measured
            assert fall > 0.2 * first.measured
            assert first.predicted - now.predicted == pytest.approx(fall, rel=0.1)
