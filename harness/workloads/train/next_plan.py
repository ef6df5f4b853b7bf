"""Read, check and predict a training's next strategy on rank 0, and what the change will move."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from typing import IO

import msgspec

from harness.domain.fingerprint import MadeFor
from harness.domain.freezing import frozen_operators
from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE
from harness.domain.sharding import weight_dims
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.errors import StrategyError
from harness.plan.again import FoundAgain, SearchAgain, predict_change_s
from harness.plan.formats.detect import detect, strategy_from
from harness.plan.formats.pipedream import PipeDreamPlan, stages_by_modules, to_strategy
from harness.plan.simulate.simulator import Simulator
from harness.runtime.executor.change.transfer import PairBytes, Placement, find_migrations
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.ranks.world import Context
from harness.workloads.planning.inputs import Inputs, read_inputs
from harness.workloads.train.config import TrainCase
from harness.workloads.train.plan import Planned, device_flops, search_config_of
from harness.workloads.train.setup import executor_plan

# Seconds of a search beside training, while which the strategy of now goes on.
_MOST_BESIDE_S = 30.0


class NextPlanner:
    """Checks and predicts further strategies of one run; rank 0 only.

    Args:
        n_samples: of the data set.
    """

    def __init__(self, case: TrainCase, context: Context, n_samples: int) -> None:
        self._case, self._context, self._n_samples = case, context, n_samples
        # By the numbers of frozen layers and of those of them that are cached.
        self.simulator = cache(self._make_simulator)
        self._speeds: tuple[float, ...] = ()

    @cached_property
    def inputs(self) -> Inputs:
        """Graph, cluster and profile, as measured before training."""
        return read_inputs(search_config_of(self._case), self._context.run_dir)

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """Predict from now on for devices of these speeds, relative to the measured ones."""
        self._speeds = tuple(speeds)
        self.simulator.cache_clear()

    def _make_simulator(self, n_frozen: int, n_skipped: int) -> Simulator:
        inputs = self.inputs
        frozen, skipped = (frozen_operators(inputs.graph, n) for n in (n_frozen, n_skipped))
        if self._speeds:
            inputs = replace(inputs, cluster=inputs.cluster.scaled(self._speeds))
        return inputs.simulator(search_config_of(self._case), frozen, skipped)

    def search_again(
        self, n_frozen: int, start: Strategy | None = None, n_skipped: int = 0
    ) -> SearchAgain:
        """The request of a search beside training, for the devices' speeds of now."""
        simulator = self.simulator(n_frozen, n_skipped)
        config = search_config_of(self._case)
        if start is not None:  # without hashes, because the devices' speeds may differ
            start = msgspec.structs.replace(start, made_for=MadeFor())
        return SearchAgain(
            graph=simulator.graph,
            cluster=simulator.cluster,
            profile=simulator.profile,
            options=simulator.options,
            batch=config.batch_size,
            memory_bytes=config.memory_bytes,
            budget=config.search_budget,
            seconds=min(config.search_seconds, _MOST_BESIDE_S),
            seed=config.seed,
            start=start,
        )

    def plan(self, data: bytes, source: str) -> Planned:
        """Read a strategy file of any format.

        Args:
            source: its name, for errors.

        Raises:
            StrategyError, ConfigError: it is malformed, or for another model, batch or cluster.
            PlanError: it needs more memory than a device has.
        """
        graph, cluster = self.inputs.graph, self.inputs.cluster
        imported = detect(data, source=source)
        if isinstance(imported.content, PipeDreamPlan):
            stage_of = stages_by_modules(imported.content, graph)
            strategy = to_strategy(imported.content, graph, stage_of, batch=self._case.batch)
        else:
            strategy = strategy_from(imported, graph, None)
        if strategy.batch != self._case.batch:
            raise StrategyError(
                f"{source} is for a batch of {strategy.batch}, the run has {self._case.batch}: a "
                "change keeps the global batch"
            )
        check_fresh(strategy, graph, cluster)
        validate(strategy, graph, cluster)
        executor_plan(self._case, strategy).check_schedule()
        return self.planned(strategy)

    def planned(self, strategy: Strategy, n_frozen: int = 0) -> Planned:
        """The plan of a valid strategy of this run.

        Raises:
            PlanError: it needs more memory than a device has.
        """
        simulation = self.simulator(n_frozen, 0).simulate(strategy)
        simulation.check_memory()
        return Planned(
            strategy=msgspec.structs.replace(strategy, made_for=self.inputs.made_for),
            predicted_step_s=simulation.step_s,
            flops=tuple(device_flops(self.inputs.graph, strategy, self._context.world.size)),
        )

    def step_s(self, strategy: Strategy, n_frozen: int, n_skipped: int = 0) -> float:
        """The predicted step of a strategy with so many frozen layers."""
        return self.simulator(n_frozen, n_skipped).simulate(strategy).step_s

    def estimate_change_s(
        self, before: Strategy, after: Strategy, n_frozen: int, n_skipped: int
    ) -> float:
        """Seconds in which the slowest link moves its bytes, from the strategies alone."""
        moved = estimate_moved_bytes(self.simulator(n_frozen, 0), before, after)
        graph, n_samples = self.inputs.graph, self._n_samples
        cached = estimate_cached_bytes(graph, n_skipped, before, after, n_samples)
        return self.predict_change_s(Counter(moved) + Counter(cached))

    def predict_change_s(self, pair_bytes: PairBytes) -> float:
        """Seconds in which the slowest link moves its bytes."""
        return predict_change_s(self.inputs.cluster, pair_bytes)


def estimate_moved_bytes(simulator: Simulator, before: Strategy, after: Strategy) -> PairBytes:
    """Bytes that a change moves.

    An engine, once built, says it exactly (`ElasticExecutor.predict_bytes`). Here the weights of an
    operator count as one tensor, and sharded state as replicated.

    Args:
        simulator: of the model with the layers frozen that are after the change.
    """
    options, operators = simulator.options, simulator.graph.operators

    def n_bytes(operator: Operator) -> float:
        trained = 0.0 if operator.name in options.frozen else operator.trained_share
        return operator.parameter_bytes * (1 + options.n_optimizer_states * trained)

    bytes_of = {operator.name: n_bytes(operator) for operator in operators}
    shapes = _weight_shapes(simulator)
    found: Counter[tuple[int, int]] = Counter()
    placed_before, placed_after = (_placement(simulator, one, shapes) for one in (before, after))
    for one in find_migrations(placed_before, placed_after):
        if one.source != one.target:
            name = one.region.name
            share = one.region.n_elements / math.prod(shapes[name].values())
            found[one.source, one.target] += round(bytes_of[name] * share)
    return dict(found)


def estimate_cached_bytes(
    graph: Graph, n_skipped: int, before: Strategy, after: Strategy, n_samples: int
) -> PairBytes:
    """Bytes of cached outputs that a change moves: each device that begins to read them receives
    the rows of all samples.

    Args:
        n_skipped: layers that the cache replaces.
    """
    skipped = frozen_operators(graph, n_skipped)
    found: Counter[tuple[int, int]] = Counter()
    for operator, consumers in zip(graph.operators, graph.consumers(), strict=True):
        names = {graph.operators[at].name for at in consumers} - skipped
        if operator.name not in skipped or not names:
            continue
        had, reads = (
            {device for name in names for device in strategy.operators[name].devices}
            for strategy in (before, after)
        )
        for device in reads - had:
            n_bytes = operator.activation_bytes * n_samples / operator.shape[SAMPLE]
            found[min(had), device] += round(n_bytes)
    return dict(found)


def _weight_shapes(simulator: Simulator) -> dict[str, dict[str, int]]:
    """Sizes of the dims that cut the weights, of each operator with weights."""
    shapes = simulator.costs(1).shapes
    operators = [(op, simulator.graph.operators[op]) for op in simulator.placed]
    return {
        operator.name: {dim: shapes[op][dim] for dim in weight_dims(operator) if dim in shapes[op]}
        for op, operator in operators
        if operator.parameter_bytes
    }


def _placement(
    simulator: Simulator, strategy: Strategy, shapes: dict[str, dict[str, int]]
) -> Placement:
    """The devices of each slice of each operator's weights."""
    costs, index = simulator.costs(max(strategy.microbatch_sizes())), simulator.graph.index()
    found: defaultdict[WeightSlice, set[int]] = defaultdict(set)
    for name, sizes in shapes.items():
        op, plan = index[name], strategy.operators[name]
        for block, device in zip(costs.blocks(op, plan), plan.devices, strict=True):
            intervals = dict(zip(costs.shapes[op], block, strict=True))
            found[WeightSlice(name, tuple(intervals[dim] for dim in sizes))].add(device)
    return {piece: tuple(sorted(devices)) for piece, devices in found.items()}


_COMMAND = (sys.executable, "-P", "-m", "harness.plan.again")


class BesideSearch:
    """At most one search at a time, in a process that stays for the next; used on rank 0 only."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: IO[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a search has been started whose answer was not taken."""
        return self._asked is not None

    def warm_up(self) -> None:
        """Start the process, because its imports take seconds of a busy core."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [*_COMMAND, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip

    def start(self, request: SearchAgain) -> None:
        """Start a search; one that still runs is ended."""
        if self.is_running:
            self.close()
        self.warm_up()
        assert self._process is not None
        assert self._process.stdin is not None
        # By a file, because a full pipe would stop training until the process reads.
        self._asked = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed with its answer)
        self._asked.write(msgspec.json.encode(request))
        self._asked.flush()
        with suppress(BrokenPipeError):  # it has died, as `poll` tells
            self._process.stdin.write(f"{self._asked.name}\n".encode())
            self._process.stdin.flush()

    def poll(self) -> FoundAgain | None:
        """The answer, once; None while the search runs, and if there is none."""
        if self._asked is None or self._process is None:
            return None
        answers = self._process.stdout
        assert answers is not None
        if not select.select([answers], [], [], 0)[0]:
            return None
        line = answers.readline()
        self._asked.close()
        self._asked = None
        if line.endswith(b"\n"):  # else it has died, perhaps within the answer
            return msgspec.json.decode(line, type=FoundAgain)
        code = self._process.wait()
        self.close()
        return FoundAgain(error=f"the search beside training ended with exit code {code}")

    def close(self) -> None:
        """End the process, and a search that still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._asked is not None:
            self._asked.close()
        self._process = self._asked = None
