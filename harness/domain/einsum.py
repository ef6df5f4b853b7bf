"""The dims of an einsum: which dim of its result or of its sum each dim of an operand is.

The attribute `equation` of an operator of kind einsum has a letter for each dim, and a star before
each operand that is a tensor of the model: `necd,*edh->nech` multiplies a value (samples, experts,
slots, width) by a weight (experts, width, hidden). `summed` is the letter that a cut into partial
sums divides.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from harness.domain.graph import Operator

_HELD = "*"


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


def equation_of(operator: Operator) -> Equation | None:
    """The equation of an operator; None if it has none, or its dims have no names."""
    text = operator.attrs.get("equation")
    found = parsed(text) if operator.kind == "einsum" and isinstance(text, str) else None
    return found if found is not None and len(found.result) == len(operator.shape) else None


def expert_dim(operator: Operator) -> str | None:
    """The dim of the output whose parts have inputs and weights of their own; None if none has."""
    equation = equation_of(operator)
    if equation is None or equation.experts is None:
        return None
    return list(operator.shape)[equation.result.index(equation.experts)]
