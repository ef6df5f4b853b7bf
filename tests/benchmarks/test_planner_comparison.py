"""What the planner's programs print where no interval of a median suits."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from planner_comparison import compare_extremes


def test_least_and_most_are_not_called_an_interval_of_99_percent():
    found = compare_extremes("ours / theirs", [1.0, 0.5, 0.75], theirs="listed")
    assert (found["ratio"], found["low"], found["high"]) == (0.75, 0.5, 1.0)
    assert (found["interval"], found["n_pairs"]) == ("least and most", 3)
    assert found["theirs"] == "listed"
    assert found["commit"]
