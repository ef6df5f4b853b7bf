"""The dims of an einsum: which dim of its result or of its sum each dim of an operand is.

The attribute `equation` of an operator of kind einsum has a letter for each dim, and a star before
each operand that is a tensor of the model: `necd,*edh->nech` multiplies a value (samples, experts,
slots, width) by a weight (experts, width, hidden). `summed` is the letter that a cut into partial
sums divides.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from harness.errors import GraphError
from harness.inputs import shorten

if TYPE_CHECKING:  # graph.py checks its operators by this module
    from harness.domain.graph import Operator

_HELD = "*"
_FORM = re.compile(r"\*?[a-zA-Z]+(,\*?[a-zA-Z]+)*->[a-zA-Z]+")


class Equation(NamedTuple):
    """Letters of the dims.

    Attributes:
        operands: of all operands, in order.
        held: for each, whether it is a tensor of the model.
    """

    operands: tuple[str, ...]
    held: tuple[bool, ...]
    result: str

    def __str__(self) -> str:
        """The equation with stars, as `parsed` reads it."""
        pairs = zip(self.operands, self.held, strict=True)
        return f"{','.join(_HELD * held + letters for letters, held in pairs)}->{self.result}"

    @property
    def plain(self) -> str:
        """The equation as torch.einsum reads it."""
        return f"{','.join(self.operands)}->{self.result}"

    @property
    def inputs(self) -> list[str]:
        """Letters of the operands that other operators compute."""
        return self._letters(held=False)

    @property
    def weights(self) -> set[str]:
        """Letters of tensors of the model."""
        return {letter for letters in self._letters(held=True) for letter in letters}

    @property
    def experts(self) -> str | None:
        """The first letter that result, weights and an input share: every part of that dim has
        inputs and weights of its own, such as an expert."""
        shared = self.weights & {letter for letters in self.inputs for letter in letters}
        return next((letter for letter in self.result if letter in shared), None)

    def _letters(self, *, held: bool) -> list[str]:
        return [x for x, is_held in zip(self.operands, self.held, strict=True) if is_held == held]


@cache
def parsed(text: str) -> Equation:
    """Read an equation with stars."""
    left, result = text.split("->")
    operands = left.split(",")
    return Equation(
        tuple(x.removeprefix(_HELD) for x in operands),
        tuple(x.startswith(_HELD) for x in operands),
        result,
    )


def check_equation(operator: Operator) -> None:
    """Refuse an einsum whose equation does not fit its inputs, its output or its sum."""
    text, summed = operator.attrs.get("equation"), operator.attrs.get("summed")
    found = parsed(text) if isinstance(text, str) and _FORM.fullmatch(text) else None
    is_fitting = found is not None and (
        len(found.inputs) == len(operator.inputs) and len(found.result) == len(operator.shape)
    )
    size = operator.attrs.get("n_summed", 0 if summed is None else None)
    if not is_fitting or not isinstance(size, int) or (size < 1) != (summed is None):
        raise GraphError(
            f"operator {operator.name!r} has the equation {shorten(text)}, which sums "
            f"{shorten(size)} of {shorten(summed)}, but {len(operator.inputs)} inputs and "
            f"{len(operator.shape)} dims: capture the model again"
        )


def equation_of(operator: Operator) -> Equation | None:
    """The equation of an operator; None for other kinds than einsum."""
    return parsed(str(operator.attrs["equation"])) if operator.kind == "einsum" else None


def expert_dim(operator: Operator) -> str | None:
    """The dim of the output whose parts have inputs and weights of their own; None if none has."""
    equation = equation_of(operator)
    if equation is None or equation.experts is None:
        return None
    return list(operator.shape)[equation.result.index(equation.experts)]
