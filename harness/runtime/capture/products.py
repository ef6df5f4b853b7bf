"""Describe products by letters: einsum, and matmul and bmm by a stack of weights.

A stack of weights, such as those of a mixture's experts (experts, width, hidden), is one parameter
of three or more dims. A matmul of activations alone stays as it is, cut by samples.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from harness.domain.einsum import Equation
from harness.domain.graph import Attribute
from harness.runtime.tracing.constructs import function_name

_FEWEST_STACKED = 3
_MATMULS = ("matmul", "bmm")

Dims = tuple[int, ...]


@dataclass(frozen=True)
class EinsumProduct:
    """An einsum that can be cut.

    Attributes:
        mixes_samples: a sample's result depends on other samples.
    """

    attributes: dict[str, Attribute]
    has_weights: bool
    mixes_samples: bool


def describe_product(
    node: fx.Node,
    shape_of: Callable[[fx.Node], Sequence[int]],
    growing: Callable[[fx.Node], Dims],
) -> EinsumProduct | None:
    """The equation of a node; None if it is another function, or cannot be cut along a letter.

    Args:
        growing: dims of a value that change with the batch.
    """
    found = _equation(node, shape_of)
    if found is None:
        return None
    equation, operands = found
    sizes: dict[str, int] = {}
    for letters, operand in zip(equation.operands, operands, strict=True):
        pairs = list(zip(letters, shape_of(operand), strict=True))
        if any(sizes.setdefault(letter, size) != size for letter, size in pairs):
            return None  # a dim of 1 is repeated
    result = {equation.result[k] for k in growing(node)}
    if len(result) > 1:
        return None
    of_samples = result.union(
        letters[k]
        for letters, operand in zip(equation.operands, operands, strict=True)
        if operand.op != "get_attr"
        for k in growing(operand)
    )
    attributes: dict[str, Attribute] = {"equation": str(equation)}
    summed = [x for x in sizes if x not in equation.result and x not in of_samples]
    if summed:
        attributes |= {"summed": summed[0], "n_summed": sizes[summed[0]]}
    is_sample_wise = len(of_samples) <= 1 and of_samples.issubset(equation.result)
    return EinsumProduct(attributes, bool(equation.weights), not is_sample_wise)


def _equation(
    node: fx.Node, shape_of: Callable[[fx.Node], Sequence[int]]
) -> tuple[Equation, list[fx.Node]] | None:
    if node.op not in ("call_function", "call_method"):
        return None
    name, operands = function_name(node.target), list[fx.Node]()
    fx.node.map_arg((node.args, node.kwargs), operands.append)
    if name == "einsum" and isinstance(node.args[0], str):
        text = node.args[0].replace(" ", "")
    elif name in _MATMULS and len(operands) == 2:
        text = _of_matmul([len(shape_of(operand)) for operand in operands])
    else:
        return None
    left, arrow, result = _spelled_out(text, map(len, map(shape_of, operands))).partition("->")
    letters = left.split(",")
    is_plain = arrow and all(len(set(x)) == len(x) and x.isalpha() for x in (*letters, result))
    if not is_plain or len(letters) != len(operands):
        return None
    held = tuple(operand.op == "get_attr" for operand in operands)
    widest = max((len(x) for x, is_held in zip(letters, held, strict=True) if is_held), default=0)
    if name in _MATMULS and widest < _FEWEST_STACKED:
        return None
    return Equation(tuple(letters), held, result), operands


def _spelled_out(text: str, ranks: Iterable[int]) -> str:
    """An equation with letters for the dims that "..." stands for, which end alike."""
    operands = zip(text.partition("->")[0].split(","), ranks, strict=False)
    counts = [rank + 3 - len(part) for part, rank in operands if "..." in part]
    free = "".join(x for x in string.ascii_letters if x not in text)[: max(counts, default=0)]
    parts = iter(counts)
    spelled = re.sub(r"\.\.\.(?=.*->)", lambda _: free[len(free) - next(parts) :], text)
    return spelled.replace("...", free)


def _of_matmul(ranks: Sequence[int]) -> str:
    """The equation of torch.matmul of two stacks of matrices; empty for vectors."""
    if min(ranks) < 2:
        return ""
    *stack, row, summed, column = list(string.ascii_lowercase[: max(ranks) + 1])
    first, second = ("".join(stack[len(stack) - rank + 2 :]) for rank in ranks)
    return f"{first}{row}{summed},{second}{summed}{column}->{''.join(stack)}{row}{column}"
