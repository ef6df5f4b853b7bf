"""Ratios of trainings that freeze layers, from the ends of their epochs and their accuracies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from elastic import Trained, judge
from searched_cells import MODELS, Cell, Place

CELL = Cell(model=MODELS["deep_vit"], place=Place(cpu=(0.3,) * 5, bandwidth="100mbit"))


def test_times_are_compared_to_the_same_epochs_and_to_the_accuracy_that_all_reach():
    """All reach 0.8: none after its second epoch, the others after their third."""
    runs = {
        "none": [Trained([10, 20, 30], [0.7, 0.85, 0.9], [])] * 2,
        "all": [
            Trained([10, 15, 18], [0.7, 0.75, 0.8], ["3: pipeline, 3 layers frozen"]),
            Trained([5, 9, 12], [0.6, 0.7, 0.82], []),
        ],
    }
    epochs, accuracy = judge(CELL, runs)
    assert (epochs["name"], accuracy["name"]) == (
        "all, epochs 3, 100mbit",
        "all, accuracy to 0.800, 100mbit",
    )
    assert (epochs["low"], epochs["high"], epochs["n_pairs"]) == (30 / 18, 30 / 12, 2)
    assert (accuracy["low"], accuracy["high"]) == (20 / 18, 20 / 12)
    assert epochs["seconds_without"] == 30
    assert epochs["accuracy_with"] == {"median": 0.81, "low": 0.8, "high": 0.82}
    assert epochs["verdict"] == "inconclusive"  # two repeats decide nothing
    assert epochs["changes"] == ["3: pipeline, 3 layers frozen"]
