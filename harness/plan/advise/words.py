"""Advice in words and tables, and as JSON."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from harness.domain.cluster import ANY_KIND
from harness.domain.hostfile import numbered_runs
from harness.inputs import one_line
from harness.measure.derive.noise import needed_words
from harness.measure.text import cell, table
from harness.plan.advise.advice import NEARLY, Advice, LeftOut
from harness.plan.advise.batches import Batches
from harness.plan.advise.prices import Prices
from harness.plan.advise.pricing import Priced
from harness.units import format_bandwidth, format_bytes, format_duration, format_number

_MOST_ROWS = 12
_LONGEST_LABEL = 50  # of a strategy, so that a row fits a terminal; --json has all of it
_MILLION = 1e6
_J_PER_KWH = 3.6e6
_GPU = re.compile(r"NVIDIA|Tesla|GeForce|Quadro|TITAN|Instinct|Radeon|\b[RG]TX\b")
# A machine that costs less is said to add nothing.
_LEAST_COST = 1.05
# A change of hardware that brings less is not shown.
_LEAST_GAIN = 1.02


def advice_lines(advice: Advice, batches: Batches | None = None) -> list[str]:
    """One sentence first, then the reasons, then the tables."""
    return [
        first_sentence(advice),
        # The fastest set has a line of its own.
        *(_left_out_line(o, advice) for o in advice.left_out if o.with_it is not advice.sets[0]),
        *_larger(advice),
        *_cheapest(advice),
        *(_faster_batch(advice, batches) if batches else ()),
        "",
        *_set_table(advice),
        *_change_table(advice),
        *_batch_table(advice),
        *(_choice_table(advice, batches) if batches else ()),
        "",
        *_notes(advice),
    ]


def first_sentence(advice: Advice) -> str:
    """Which machines to use, with which strategy, and what that brings."""
    best, noun = advice.best, device_word(advice)
    rate = f"{format_number(best.samples_per_s, 3)} samples/s"
    rate += " measured" if best.is_measured else ""
    if best.cluster.n_devices == 1:
        device = best.cluster.devices[0]
        more = "" if best.label == "single" else f" with {_in_words(best)}"
        kind = "" if device.kind == ANY_KIND else f" ({device.kind})"
        if advice.cluster.n_devices == 1:
            return f"The model fits on {device.name}{kind}{more}: {rate}."
        where = f"{_alone(best, advice)}{kind}{more}"
        return f"One {noun} is fastest: use {where}, {rate}."
    where = _machines(best, advice, " devices")
    if len(advice.cluster.nodes) == 1 and where == best.node_names[0]:
        where = f"{best.cluster.n_devices} devices of {where}"
    single = advice.single
    gain = (
        f"no {noun} holds the model alone"
        if single is None
        else f"{format_number(best.samples_per_s / single.samples_per_s, 2)} times one {noun}"
    )
    return f"Use {where} with {_in_words(best)}: {gain}, {rate}."


def _alone(one: Priced, advice: Advice) -> str:
    """The one device of a set: its node, or one of the node's."""
    (name,) = one.node_names
    if not are_first(one, advice):
        return f"{one.cluster.devices[0].name} alone"
    n_devices = next(len(node.devices) for node in advice.cluster.nodes if node.name == name)
    return f"{name} alone" if n_devices == 1 else f"one {device_word(advice)} of {name}"


def _in_words(one: Priced) -> str:
    """Its strategy within a sentence."""
    name = re.sub(r", (\d+ microbatch)", r" in \1", one.name)
    saved = one.label.removeprefix(one.name).removeprefix(", ")
    saved = saved.replace("sharded optimizer", "sharded optimizer state")
    saved = saved.replace("_in_node", " within nodes")
    return f"{name} ({saved})" if saved else name


def device_word(advice: Advice) -> str:
    """`GPU` where all devices are, else `device`."""
    kinds = [device.kind for device in advice.cluster.devices]
    return "GPU" if all(_GPU.search(kind) for kind in kinds) else "device"


def name_range(names: Sequence[str]) -> str:
    """Names in words; runs of three or more numbered ones as `node0 to node2`."""
    parts = []
    for prefix, numbers in numbered_runs(names):
        run = [prefix + number for number in numbers]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else run
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _left_out_line(one: LeftOut, advice: Advice) -> str:
    nodes = name_range(one.nodes)
    more = f"{nodes} too" if len(one.nodes) == 1 else f"one of {nodes} too"
    if one.with_it is None:
        return f"With {more}, no strategy of --strategies can train this batch."
    cost = advice.best.samples_per_s / one.with_it.samples_per_s
    carried = "" if one.rate is None else format_bandwidth(one.rate)
    if one.cause == "device":
        slowness = format_number(one.slowness, 2)
        reason = f"its {one.kind} takes {slowness} times as long as {one.fastest_kind}"
    elif one.cause == "link":
        its = "its link carries" if len(one.nodes) == 1 else "their links carry"
        reason = f"{its} {carried}"
    else:
        reason = f"communication at {carried} takes more than it saves"
    if cost < _LEAST_COST:
        return f"{nodes} would add nothing: {reason}."
    return f"With {more}, training takes {format_number(cost, 2)} times as long: {reason}."


def _larger(advice: Advice) -> Iterator[str]:
    """The fastest set, where a smaller one is about as fast."""
    fastest = advice.sets[0]
    if fastest is not advice.best:
        gain = fastest.samples_per_s / advice.best.samples_per_s
        yield (
            f"{_machines(fastest, advice, ' devices')} with {_in_words(fastest)} would be "
            f"{gain:.2f} times as fast, which is less than predictions are off."
        )


def _cheapest(advice: Advice) -> Iterator[str]:
    if (prices := advice.prices) is None:
        return
    known = [(money, one) for one in advice.sets if (money := money_of(one, prices)) is not None]
    if known:
        money, one = min(known, key=lambda item: item[0])
        words = f"{format_number(money, 3)} {prices.currency}".strip()
        is_one = one.cluster.n_devices == 1
        where = _alone(one, advice) if is_one else _machines(one, advice, " devices")
        more = "" if one.label == "single" else f" with {_in_words(one)}"
        yield f"Cheapest: {where}{more}, {words} per million samples."


def _faster_batch(advice: Advice, batches: Batches) -> Iterator[str]:
    """The batch that reaches the same loss first, if it gains more than predictions are off."""
    most = max(batches.choices, key=lambda one: one.gain)
    if NEARLY * most.gain > 1:
        where = _machines(most.best, advice, " devices")
        limit = "up to " if math.isinf(batches.noise.n_samples) else ""
        yield (
            f"A batch of {most.best.batch} on {where} with {_in_words(most.best)} would reach the "
            f"same loss {limit}{format_number(most.gain, 2)} times as fast, if its learning "
            "rate fits."
        )


def energy_kwh(one: Priced, prices: Prices) -> float | None:
    """Per million samples; None where a node's watts are not given."""
    watts = prices.joules_per_s(one.node_names)
    return None if watts is None else watts * _MILLION / one.samples_per_s / _J_PER_KWH


def money_of(one: Priced, prices: Prices) -> float | None:
    """Per million samples; None where a price is not given."""
    rate = prices.money_per_s(one.node_names)
    return None if rate is None else rate * _MILLION / one.samples_per_s


def _set_table(advice: Advice) -> list[str]:
    noun = device_word(advice)
    heads = ["machines", "strategy", "step", "range", "samples/s", f"times one {noun}", "memory"]
    prices, single = advice.prices, advice.single
    if prices is not None:
        heads += ["kWh/million", f"{prices.currency or 'money'}/million"]
    rows = []
    for one in advice.sets[:_MOST_ROWS]:
        row = [
            _machines(one, advice),
            one_line(one.label, _LONGEST_LABEL),
            format_duration(one.step_s),
            "measured"
            if one.is_measured
            else " to ".join(map(format_duration, _range_s(one, advice))),
            format_number(one.samples_per_s, 3),
            cell(None if single is None else one.samples_per_s / single.samples_per_s, ".2f"),
            " of ".join(format_bytes(n_bytes) for n_bytes in one.fullest[1:]),
        ]
        if prices is not None:
            costs = energy_kwh(one, prices), money_of(one, prices)
            row += [cell(cost, lambda cost: format_number(cost, 3)) for cost in costs]
        rows.append(row)
    lines = table(heads, rows)
    if len(advice.sets) > _MOST_ROWS:
        lines.append(f"... and {len(advice.sets) - _MOST_ROWS} slower sets (--json has all)")
    return lines


def _range_s(one: Priced, advice: Advice) -> tuple[float, float]:
    """Seconds that a step may take; of a measured one those that it took."""
    if one.is_measured:
        return one.step_s, one.step_s
    low, high = advice.uncertainty.of(one.family)
    return min(one.step_s, low * one.predicted_s), max(one.step_s, high * one.predicted_s)


def _machines(one: Priced, advice: Advice, noun: str = "") -> str:
    names = name_range(one.node_names)
    if not are_first(one, advice):
        return name_range([device.name for device in one.cluster.devices])
    whole = {node.name: len(node.devices) for node in advice.cluster.nodes}
    n_all = sum(whole[name] for name in one.node_names)
    n = one.cluster.n_devices
    return names if n_all == n else f"{n}{noun} of {names}"


def are_first(one: Priced, advice: Advice) -> bool:
    """Whether the devices of a set are the first of its nodes."""
    return all(ranks == list(range(len(ranks))) for ranks in local_ranks(one, advice))


def local_ranks(one: Priced, advice: Advice) -> list[list[int]]:
    """Positions of the devices of a set among those of each of its nodes."""
    all_names = {node.name: [d.name for d in node.devices] for node in advice.cluster.nodes}
    return [
        [all_names[node.name].index(device.name) for device in node.devices]
        for node in one.cluster.nodes
    ]


def _change_table(advice: Advice) -> list[str]:
    best = advice.best.samples_per_s
    rows = [
        [change.name, f"{gain:.2f}", _machines(change.best, advice), change.best.label]
        for change in advice.changes
        if (gain := change.best.samples_per_s / best) >= _LEAST_GAIN
    ]
    if not rows:
        return []
    return ["", *table(["with", "times today's best", "machines", "strategy"], rows)]


def _batch_table(advice: Advice) -> list[str]:
    def shown(batch: int | None) -> str:
        return cell(batch, lambda n: str(n or "does not fit"))

    rows = [
        [one.strategy, one.devices, shown(one.batch), shown(one.recomputed_batch)]
        for one in advice.largest
    ]
    return ["", *table(["strategy", "devices", "largest global batch", "recomputed"], rows)]


def _choice_table(advice: Advice, batches: Batches) -> list[str]:
    heads = ["global batch", "machines", "strategy", "samples/s", "samples needed",
             "times as fast to the same loss"]  # fmt: skip
    rows = [
        [
            str(one.best.batch),
            _machines(one.best, advice),
            one_line(one.best.label, _LONGEST_LABEL),
            format_number(one.best.samples_per_s, 3),
            needed_words(one.best.batch, batches.noise),
            f"{one.gain:.2f}",
        ]
        for one in batches.choices
    ]
    return ["", *table(heads, rows), f"gradient noise scale: {batches.noise} samples"]


def _notes(advice: Advice) -> Iterator[str]:
    yield f"range: {advice.uncertainty.source}"
    if not advice.request.overlap:
        yield "gradients are synchronised after the backward pass (--no-overlap)"
    if advice.n_unpriced:
        yield (
            f"{advice.n_unpriced} sets were not priced in the time given: raise --search-seconds"
        )


def advice_object(advice: Advice, batches: Batches | None = None) -> dict[str, Any]:
    """One JSON object, with the fields that docs/machines.md lists."""
    prices = advice.prices
    return {
        "sentence": first_sentence(advice),
        "why": [_left_out_line(one, advice) for one in advice.left_out],
        "sets": [
            {
                "nodes": one.node_names,
                "devices": [device.name for device in one.cluster.devices],
                "strategy": one.label,
                "batch": one.batch,
                "predicted_step_s": one.predicted_s,
                "is_measured": one.is_measured,
                "step_s": one.step_s,
                **dict(zip(("low_step_s", "high_step_s"), _range_s(one, advice), strict=True)),
                "samples_per_s": one.samples_per_s,
                "fullest_device": one.fullest[0],
                "memory_bytes": one.fullest[1],
                "memory_limit_bytes": one.fullest[2],
                "kwh_per_million": None if prices is None else energy_kwh(one, prices),
                "money_per_million": None if prices is None else money_of(one, prices),
            }
            for one in advice.sets
        ],
        "changes": [
            {
                "with": change.name,
                "times_best": change.best.samples_per_s / advice.best.samples_per_s,
                "nodes": change.best.node_names,
                "strategy": change.best.label,
            }
            for change in advice.changes
        ],
        "largest_batch": advice.largest,
        "noise_scale": batches and batches.noise,
        "batches": [
            {
                "batch": one.best.batch,
                "nodes": one.best.node_names,
                "strategy": one.best.label,
                "samples_per_s": one.best.samples_per_s,
                "samples_needed": one.needed,
                "times_best": one.gain,
            }
            for one in (batches.choices if batches else ())
        ],
        "uncertainty": advice.uncertainty.source,
        "n_unpriced": advice.n_unpriced,
    }
