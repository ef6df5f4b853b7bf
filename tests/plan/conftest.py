"""`python -m harness.plan` of words as a user types them: texts, parted at blanks, and paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.plan.__main__ import main

Run = Callable[..., Any]


def exit_code(*parts: object) -> int:
    texts = (part.split() if isinstance(part, str) else [str(part)] for part in parts)
    return main([word for text in texts for word in text])


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command prints as it succeeds, as `out` and `err`."""

    def run(*parts: object) -> Any:
        assert exit_code(*parts) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Run:
    """The one line that says what a command refuses, which prints nothing else."""

    def run(*parts: object) -> str:
        assert exit_code(*parts) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    return run
