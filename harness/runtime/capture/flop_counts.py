"""Count the FLOPs of a block of code, and those of products of activations apart."""

from __future__ import annotations

from types import TracebackType

from torch.utils.flop_counter import FlopCounterMode

# Their operands have no weights: an attention's scores and weighted sums.
_OF_ACTIVATIONS = ("bmm", "baddbmm", "scaled_dot_product")


class FlopCounts:
    """A context manager that counts FLOPs; a multiplication and an addition count as two."""

    def __init__(self) -> None:
        self._mode = FlopCounterMode(display=False)

    def __enter__(self) -> FlopCounts:
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, traceback)

    @property
    def total(self) -> float:
        return float(self._mode.get_total_flops())

    @property
    def of_activations(self) -> float:
        """FLOPs of products of activations with each other."""
        found = self._mode.get_flop_counts().get("Global", {})
        return float(
            sum(
                n
                for operator, n in found.items()
                if any(a in str(operator) for a in _OF_ACTIVATIONS)
            )
        )
