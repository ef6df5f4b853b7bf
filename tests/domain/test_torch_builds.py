"""Which torch is told to be unfit, and that the package asks for no other."""

import tomllib
from pathlib import Path

import pytest

from harness.domain.torch_builds import END, FIRST, torch_problem


def test_the_package_requires_these_releases():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    (wanted,) = (
        w for w in tomllib.loads(text)["project"]["dependencies"] if w.startswith("torch>")
    )
    assert wanted == f"torch>={FIRST[0]}.{FIRST[1]},<{END[0]}"


@pytest.mark.parametrize(
    ("version", "is_fit"),
    [("2.13.0+cpu", True), ("2.9.1", True), ("2.15.0a0+git1", True), ("", True), ("2.6.0", False),
     ("3.0.0", False), ("1.13.1", False)],
)  # fmt: skip
def test_a_torch_outside_the_range_is_named(version, is_fit):
    assert bool(torch_problem(version)) is not is_fit
    assert torch_problem(version).startswith("" if is_fit else f"torch {version} is none of ")
