"""Freezing layers frees the memory that the simulator predicts."""

import pytest
from frozen_memory import N_RANKS, peaks_as_layers_freeze


def test_memory_falls_by_the_prediction(ranks):
    """Of 6 layers a pipeline has 3 on each rank."""
    found = ranks.run(N_RANKS, peaks_as_layers_freeze, (("ddp", "1f1b", "gpipe"), [0, 2, 5]))
    for rank, by_name in enumerate(found):
        for name, (first, *frozen) in by_name.items():
            # Received values, up to 5 %, are in memory of the step before, which is not measured.
            assert first.predicted == pytest.approx(first.measured, rel=0.06), name
            for now in frozen[(name != "ddp" and rank == 1) :]:
                fall = first.measured - now.measured
                assert fall > 0.2 * first.measured, name
                assert first.predicted - now.predicted == pytest.approx(fall, rel=0.1), name


def test_memory_falls_by_the_prediction_where_activations_are_recomputed(ranks):
    found = ranks.run(N_RANKS, peaks_as_layers_freeze, (("ddp", "recomputed"), [0]))
    for by_name in found:
        (kept,), (recomputed,) = by_name["ddp"], by_name["recomputed"]
        fall = kept.measured - recomputed.measured
        assert fall > 0.15 * kept.measured
        assert kept.predicted - recomputed.predicted == pytest.approx(fall, rel=0.1)
