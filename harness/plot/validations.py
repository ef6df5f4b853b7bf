"""Published sets that `python -m harness.plan validate --output` wrote into a results directory."""

from __future__ import annotations

from pathlib import Path

from harness.domain.validation import Validation, validation_file
from harness.errors import HarnessError
from harness.measure.store import Problem


def read_validations(results: Path) -> tuple[list[Validation], list[Problem]]:
    """All files; one that is malformed is a problem, named with its path, and left out."""
    found: list[Validation] = []
    problems: list[Problem] = []
    for path in sorted(results.glob(validation_file("*"))):
        try:
            found.append(Validation.load(path))
        except HarnessError as error:
            problems.append((path, str(error)))
    return found, problems
