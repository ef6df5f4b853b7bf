"""A clock for tests of several packages."""


class FakeClock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, duration_s: float) -> None:
        self.now_s += duration_s

    def mark(self) -> float:
        return self.now_s

    def is_ready(self, mark: float) -> bool:
        return mark <= self.now_s

    def settle(self) -> None:
        """Fake marks are readable at once."""

    def seconds_at(self, mark: float) -> float:
        return mark
