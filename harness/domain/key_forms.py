"""Ways in which an attention that is cut by positions gets the keys and values of other positions.

    input      a device gathers the attention's input, and projects all keys and values by itself
    gathered   a device projects keys and values of its own positions, and gathers the others
    ring       keys and values travel from device to device, one block at a time, while each device
               attends to the block that it has (Liu et al., "Ring Attention", 2023)

Simulator and executor share these rules.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, Cut, Interval, n_parts
from harness.domain.sharding import HEADS, reads_of
from harness.errors import StrategyError

KeyForm = Literal["input", "gathered", "ring"]
KEY_FORMS: tuple[KeyForm, ...] = get_args(KeyForm)

POSITIONS = "seq"


class Rounds(NamedTuple):
    """Messages of keys, values or their gradients that a device sends in one pass of an attention.

    Attributes:
        beside: messages that travel beside the computing of each of the n rounds.
        alone: messages beside which the device does not compute.
    """

    beside: tuple[int, ...]
    alone: int

    @property
    def n_messages(self) -> int:
        return sum(self.beside) + self.alone


def rounds(keys: KeyForm, n: int, *, is_backward: bool) -> Rounds:
    """The messages of one of n devices. In a ring's backward the keys and values of a block travel
    one round ahead, and their gradients one round behind."""
    if keys == "input":
        return Rounds((0,) * n, 0)
    if keys == "gathered":
        return Rounds((0,) * n, n - 1)
    ahead = [int(k < n - 1) for k in range(n)]
    if not is_backward:
        return Rounds(tuple(ahead), 0)
    return Rounds(tuple(one + (k >= 2) for k, one in enumerate(ahead)), 1)


def key_features(operator: Operator) -> int:
    """Features of a position's keys and values together; 0 if these cannot travel."""
    found = operator.attrs.get("key_features", 0)
    has_dims = {SAMPLE, POSITIONS, "feature"} <= operator.shape.keys()
    return found if isinstance(found, int) and has_dims else 0


def key_forms(operator: Operator, graph: Graph) -> tuple[KeyForm, ...]:
    """The forms that an attention can have if it is cut by positions."""
    n_positions = operator.shape.get(POSITIONS)
    by_name = {op.name: op for op in graph.operators}
    lengths = {
        by_name[name].shape.get(POSITIONS, n_positions)
        for argument, name in enumerate(operator.inputs)
        if reads_of(operator, argument) != "whole"
    }
    if not key_features(operator) or lengths != {n_positions}:
        return KEY_FORMS[:1]
    return KEY_FORMS[:2] if operator.attrs.get("has_dropout") is True else KEY_FORMS


def check_keys(
    operator: Operator,
    keys: KeyForm,
    partition: Mapping[str, Cut],
    devices: Sequence[int],
    graph: Graph,
) -> None:
    """Refuse a form that does not suit an operator or its cut."""
    if keys == "input":
        return
    subject = f"operator {operator.name!r} ({operator.kind}) has keys {keys!r}"
    if keys not in key_forms(operator, graph):
        raise StrategyError(
            f"{subject}, which suits an attention over as many keys as queries, captured as one "
            "operator, and of these a ring one without dropout of its probabilities: use keys "
            f"{' or '.join(map(repr, key_forms(operator, graph)))}"
        )
    if n_parts(partition.get(POSITIONS, 1)) == 1:
        raise StrategyError(
            f"{subject}, but is cut as {dict(partition)}: cut it along {POSITIONS!r}, or use keys "
            "'input'"
        )
    if len(set(devices)) < len(devices):
        raise StrategyError(
            f"{subject}, and several blocks on one device of {list(devices)}: give each block a "
            "device of its own, or use keys 'input'"
        )


def flops_ratio(
    operator: Operator, keys: KeyForm, whole: Mapping[str, int], positions: Interval
) -> float:
    """FLOPs of a block over its share of the operator's FLOPs, by positions: `input` projects all
    keys. Under a causal mask a ring leaves out scores, as a whole operator does unless it
    `scores_all`; the other forms leave out keys after the last query.

    Args:
        whole: sizes of the operator's dims.
    """
    width, n_keys = whole["feature"], whole[POSITIONS]
    start, stop = positions
    if stop - start == n_keys:
        return 1.0
    each = 2 * key_features(operator) * width
    is_causal = operator.attrs.get("is_causal") is True
    is_skipping = is_causal and operator.attrs.get("scores_all") is not True
    shown = n_keys / 2 if is_skipping else n_keys  # keys that a query is scored with, in the mean
    scored = float(stop if is_causal else n_keys)
    if is_causal and keys == "ring":
        scored = (start + stop) / 2
    n_projected = n_keys if keys == "input" else stop - start
    found = 4 * width * (scored + width) + each * n_projected / (stop - start)
    return found / (4 * width * (shown + width) + each)


def scores_share(operator: Operator, whole: Mapping[str, int]) -> float:
    """Share of an operator's FLOPs that scores and their products with values take."""
    is_causal = operator.attrs.get("is_causal") is True
    scores = whole[POSITIONS] * (1 if is_causal else 2)
    return scores / (scores + 2 * whole["feature"] + key_features(operator))


def kept_elements(
    operator: Operator, keys: KeyForm, whole: Mapping[str, int], block: Mapping[str, Interval]
) -> float:
    """Elements that a block keeps for backward beside its output: queries, the mix of values, keys
    and values. A ring keeps its own keys; other forms repeat all keys for each head of queries."""
    start, stop = block[POSITIONS]
    row = 2 * whole["feature"] * _n_rows(whole, block)
    if keys == "ring":
        return row * (stop - start) + own_key_elements(operator, whole, block)
    return row * (stop - start + whole[POSITIONS])


def foreign_key_elements(
    keys: KeyForm, whole: Mapping[str, int], block: Mapping[str, Interval]
) -> float:
    """Elements of the keys and values of other positions that a block keeps for backward."""
    start, stop = block[POSITIONS]
    n_foreign = 0 if keys == "ring" else whole[POSITIONS] - (stop - start)
    return 2 * whole["feature"] * _n_rows(whole, block) * n_foreign


def own_key_elements(
    operator: Operator, whole: Mapping[str, int], block: Mapping[str, Interval]
) -> float:
    """Elements of the keys and values of a block's own positions."""
    start, stop = block[POSITIONS]
    return (stop - start) * key_features(operator) * _n_rows(whole, block)


def _n_rows(whole: Mapping[str, int], block: Mapping[str, Interval]) -> float:
    """Samples of a block, times its share of the heads."""
    (first, last), n_heads = block[SAMPLE], whole.get(HEADS, 1)
    low, high = block.get(HEADS, (0, n_heads))
    return (last - first) * (high - low) / n_heads
