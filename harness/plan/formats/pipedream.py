"""PipeDream's files: graph.txt, a profile of one minibatch, and hybrid_conf.json, a plan.

    node12 -- Conv2d(128, 256, ...) -- forward_compute_time=10.814, backward_compute_time=18.335,
        activation_size=411041792.000, parameter_size=1180672.000[ -- stage_id=0]     (one line)
    <TAB>node11 -- node12

Times are milliseconds, sizes bytes; an activation may be a list `[a; b]`. Also read: edges
indented by spaces, integers, trailing blanks (DAPPLE's files).

    {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]},
     "stage_to_depth_map": {"0": 1, "1": 0}}

A module is one of the files that PipeDream generates from a plan (the last is the loss), so the
file alone does not say which operators a stage has: `to_strategy` needs that from elsewhere, such
as the stage_id of a profile. PipeDream's replicas take whole minibatches in turn; here they share
each microbatch, which has the same weights and no staleness.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from harness.domain.files import Count, decode, encode
from harness.domain.graph import Attribute, Graph, Operator
from harness.domain.partition import SAMPLE
from harness.domain.profile import Measurement, Profile
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import GraphError, StrategyError, naming
from harness.inputs import MOST_COUNT, MOST_S, parse_int, parse_number, shorten


class PipeDreamPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file's content.

    Attributes:
        stage_to_depth_map: stages after each one, which bounds its in-flight minibatches; optional.
    """

    module_to_stage_map: list[Count]
    stage_to_rank_map: dict[str, list[Count]]
    stage_to_depth_map: dict[str, Count] | None = None

    def __post_init__(self) -> None:
        stages = set(self.module_to_stage_map)
        if not stages or stages != set(range(len(stages))):
            raise StrategyError(
                f"module_to_stage_map has stages {shorten(sorted(stages))}: they must count from 0 "
                "without gaps"
            )
        if set(self.stage_to_rank_map) != {str(stage) for stage in stages}:
            raise StrategyError(
                f"module_to_stage_map has stages {shorten(sorted(stages))}, stage_to_rank_map has "
                f"{shorten(list(self.stage_to_rank_map))}: they must be the same"
            )
        stage_of: dict[int, str] = {}
        for stage, ranks in self.stage_to_rank_map.items():
            if not ranks or min(ranks) < 0:
                raise StrategyError(
                    f"stage {stage} of stage_to_rank_map has ranks {shorten(ranks)}: name one or "
                    "more, from 0"
                )
            for rank in ranks:
                if rank in stage_of:
                    raise StrategyError(
                        f"rank {rank} is in stages {stage_of[rank]} and {stage} of "
                        "stage_to_rank_map, PipeDream runs one stage on a rank: give every stage "
                        "ranks of its own"
                    )
                stage_of[rank] = stage

    def ranks(self) -> list[list[int]]:
        """Ranks of each stage, by stage."""
        return [self.stage_to_rank_map[str(i)] for i in range(len(self.stage_to_rank_map))]

    def to_json(self) -> bytes:
        return encode(self, indent=4)

    @classmethod
    def from_json(cls, data: bytes, *, source: str = "PipeDream plan") -> PipeDreamPlan:
        """Parse and validate.

        Raises:
            StrategyError: malformed or inconsistent; names `source`.
        """
        return decode(data, cls, source=source, error=StrategyError)


def stages_by_modules(plan: PipeDreamPlan, graph: Graph) -> dict[str, int]:
    """The stage of each operator, where the plan's modules are modules of the captured model.

    These are its children (`layer1`), or theirs (`features.3`), in order of use; the loss may
    follow them. An operator that is no module belongs to the module before it.

    Raises:
        StrategyError: the model has another number of modules.
    """
    names = [op.name for op in graph.operators if has_tasks(op)]
    paths = {op.name: str(op.attrs.get("module", "")).split(".") for op in graph.operators}
    counts = []
    for depth in (1, 2):
        found: list[list[str]] = []
        module_of: dict[str, int] = {}
        for name in names:
            path = paths[name][:depth]
            if path != [""] and path not in found:
                found.append(path)
            module_of[name] = max(0, len(found) - 1)
        counts.append(len(found))
        if len(plan.module_to_stage_map) in (len(found), len(found) + 1):
            return {name: plan.module_to_stage_map[at] for name, at in module_of.items()}
    raise StrategyError(
        f"module_to_stage_map has {len(plan.module_to_stage_map)} modules, model {graph.name!r} "
        f"has {counts[0]} children and {counts[1]} modules below them: write one entry for each, "
        "or give a strategy file"
    )


def to_strategy(
    plan: PipeDreamPlan, graph: Graph, stage_of: Mapping[str, int], *, batch: int
) -> Strategy:
    """The plan as a 1F1B strategy, with as many microbatches as keep every rank busy: one each.

    Raises:
        StrategyError: an operator without a stage.
    """
    ranks = plan.ranks()
    operators = {}
    for operator in graph.operators:
        if not has_tasks(operator):
            continue
        stage = stage_of.get(operator.name)
        if stage is None or not 0 <= stage < len(ranks):
            raise StrategyError(
                f"operator {operator.name!r} has stage {stage}, the plan has stages 0 to "
                f"{len(ranks) - 1}: give a graph with stage_id, as PipeDream's optimizer writes it"
            )
        operators[operator.name] = OperatorPlan({SAMPLE: len(ranks[stage])}, ranks[stage], stage)
    return Strategy(
        name=f"pipedream {'-'.join(str(len(r)) for r in ranks)}",
        batch=batch,
        operators=operators,
        n_microbatches=sum(map(len, ranks)),
        schedule="1f1b",
        stages=[Stage() for _ in ranks],
    )


def from_strategy(strategy: Strategy) -> PipeDreamPlan:
    """One module per stage and one for the loss, as PipeDream generates them.

    Raises:
        StrategyError: a stage that is more than replicated, or in unequal shares, which the format
            cannot hold, or one without operators.
    """
    ranks: dict[int, list[int]] = {}
    for name, plan in strategy.operators.items():
        cut = plan.partition.get(SAMPLE, 1)
        if isinstance(cut, list):
            raise StrategyError(
                f"operator {name!r} is cut into shares {cut}: a PipeDream plan holds equal "
                "replicas only"
            )
        if cut != len(plan.devices) or len(set(plan.devices)) != len(plan.devices):
            raise StrategyError(
                f"operator {name!r} is cut into {plan.partition}: a PipeDream plan holds "
                "replicas only"
            )
        if ranks.setdefault(plan.stage, plan.devices) != plan.devices:
            raise StrategyError(
                f"operator {name!r} is on devices {plan.devices}, its stage {plan.stage} on "
                f"{ranks[plan.stage]}: a PipeDream plan has one set per stage"
            )
    n_stages = len(strategy.stages)
    if sorted(ranks) != list(range(n_stages)):
        raise StrategyError(
            f"strategy {strategy.name!r} has {n_stages} stages and operators in {sorted(ranks)}: "
            "each stage needs some, counting from 0"
        )
    return PipeDreamPlan(
        module_to_stage_map=[*range(n_stages), n_stages - 1],
        stage_to_rank_map={str(i): list(ranks[i]) for i in range(n_stages)},
        stage_to_depth_map={str(i): n_stages - 1 - i for i in range(n_stages)},
    )


_KINDS = {
    "Input": "input",
    "Conv2d": "conv2d",
    "Linear": "linear",
    "BatchNorm2d": "batch_norm",
    "ReLU": "elementwise",
    "Dropout": "elementwise",
    "Sigmoid": "elementwise",
    "Tanh": "elementwise",
    "Add": "add",
    "Concat": "cat",
    "View": "flatten",
    "Flatten": "flatten",
    "Embedding": "embedding",
    "LSTM": "lstm",
    "EmuBidirLSTM": "lstm",
    "RecurrentAttention": "attention",
    "Softmax": "softmax",
    "MaxPool2d": "pool",
    "AvgPool2d": "pool",
    "AdaptiveAvgPool2d": "pool",
}
_NAME = re.compile(r"[A-Za-z_]\w*")
_LINEAR = re.compile(r"in_features=(\w+), out_features=(\w+)")
_LIST = re.compile(r"\[[^\[\]]*\]")
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def parse_graph_txt(
    text: str,
    *,
    name: str,
    batch: int | None = None,
    device_kind: str = "device",
    source: str = "profile",
) -> tuple[Graph, Profile]:
    """Read a profile into the graph and its times on one kind of device.

    Args:
        batch: samples in the minibatch that was profiled; None when unknown.
        device_kind: of the profile; `Cluster.uniform` uses the same default.

    Raises:
        GraphError: names the line or the operators, and the error.
    """
    shape = {} if batch is None else {"sample": batch}
    operators: dict[str, Operator] = {}
    points: list[Measurement] = []
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}:{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            ends = [part.strip() for part in line.split("--")]
            if len(ends) != 2 or not all(ends):
                raise GraphError(
                    f"{where}: {shorten(line.strip())} is not an edge `producer -- consumer`"
                )
            edges.append((ends[0], ends[1], where))
            continue
        with naming(where):
            operator, forward_s, backward_s = _parse_node(line, where, shape)
        if operator.name in operators:
            raise GraphError(
                f"{where}: {shorten(operator.name)} is described twice: remove one line"
            )
        operators[operator.name] = operator
        points.append(
            Measurement(
                device_kind=device_kind,
                operator=operator.name,
                shape=shape,
                forward_s=forward_s,
                backward_s=backward_s,
            )
        )
    for producer, consumer, where in edges:
        for end in (producer, consumer):
            if end not in operators:
                raise GraphError(f"{where}: an edge names unknown operator {shorten(end)}")
        operators[consumer].inputs.append(producer)
    with naming(source):
        graph = Graph.from_unordered(name, operators.values(), batch=batch)
        return graph, Profile(model=name, measurements=points, provenance={"source": source})


def _parse_node(line: str, where: str, shape: dict[str, int]) -> tuple[Operator, float, float]:
    """An operator without its inputs, and its forward and backward seconds."""
    parts = [part.strip() for part in line.strip().split(" -- ")]
    if len(parts) not in (3, 4):
        raise GraphError(
            f"{where}: a node line has 3 or 4 fields parted by ` -- `, this has {len(parts)}"
        )
    name, description = parts[:2]
    values = _values(parts[2], name, where)
    forward_ms, backward_ms, activation_bytes, parameter_bytes = (
        sum(
            _parse_number(item, key, name, where)
            for item in values[key].strip().strip("[]").split(";")
        )
        for key in _FIELDS
    )
    attrs: dict[str, Attribute] = {"description": description}
    stage_id = _parse_stage(parts[3], where) if len(parts) == 4 else None
    if stage_id is not None:
        attrs["stage_id"] = stage_id
    if linear := _LINEAR.search(description):
        for feature, number in zip(("in_features", "out_features"), linear.groups(), strict=True):
            what = f"{feature} of {shorten(name)}"
            attrs[feature] = parse_int(number, what, at_least=1, error=GraphError)
    match = _NAME.match(description)
    word = match.group() if match else ""
    operator = Operator(
        name=name,
        kind="input" if word.startswith("Input") else _KINDS.get(word, "other"),
        inputs=[],
        shape=shape,
        parameter_bytes=round(parameter_bytes),
        activation_bytes=round(activation_bytes),
        attrs=attrs,
    )
    return operator, forward_ms / 1e3, backward_ms / 1e3


def _values(text: str, node: str, where: str) -> dict[str, str]:
    """The text of each of `_FIELDS`; a list's own commas are no ends of fields."""
    joined = _LIST.sub(lambda found: found[0].replace(",", ";"), text)
    parts = (item.partition("=") for item in joined.split(","))
    pairs = [(key.strip(), value) for key, _, value in parts]
    keys = [key for key, _ in pairs]
    missing = [key for key in _FIELDS if key not in keys]
    if missing:
        raise GraphError(f"{where}: {shorten(node)} lacks {', '.join(missing)}")
    other = next((key for key in keys if key not in _FIELDS or keys.count(key) > 1), None)
    if other is not None:
        raise GraphError(
            f"{where}: {shorten(node)} has {shorten(other)} beside, or more than once among, "
            f"{', '.join(_FIELDS)}: keep one of each, and no other"
        )
    return dict(pairs)


def _parse_number(text: str, key: str, node: str, where: str) -> float:
    is_time = key.endswith("time")
    return parse_number(
        text,
        f"{where}: {key} of {shorten(node)}",
        at_most=MOST_S if is_time else MOST_COUNT,
        error=GraphError,
        remedy="a time is in milliseconds" if is_time else "a size is in bytes",
    )


def _parse_stage(text: str, where: str) -> int | None:
    key, _, value = text.partition("=")
    if key.strip() != "stage_id":
        raise GraphError(
            f"{where}: after the sizes comes stage_id=<number>, this line has {shorten(text)}: "
            "remove it, with sizes that are the bytes which are sent"
        )
    if value.strip() == "None":
        return None
    return parse_int(value, f"{where}: stage_id", error=GraphError)
