"""Markov chain Monte Carlo over operators' plans (FlexFlow, MLSys'19), with better proposals.

FlexFlow proposes a random configuration of a random operator. Most such proposals tear one operator
out of its surroundings and only add transfers, so here half of them move several operators at once:

    operator   one operator, any plan of its menu
    copy       one operator takes the plan of a neighbour along an edge
    segment    a run of consecutive operators takes one plan
    kind       all operators of one kind take one plan
    pair       two linear operators in a row take a cut by feature and one by contraction, and what
               lies between them the first's
    experts    all operators of mixtures take a cut by experts; the products around them that or one
               by samples

A worse proposal is accepted with probability exp(-(s' - s) / (temperature * best)). The temperature
falls over the chain, from one of HOTTEST (chains take turns) to COLDEST: a cool one improves its
start, a hot one first wanders between valleys and then walks down one. In its colder half a chain
goes back to the best it has seen every few hundred proposals. A descent (`descend`) ends it: single
operators, then pairs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product

from harness.domain.partition import REPLICA, SAMPLE
from harness.domain.sharding import CONTRACTION
from harness.domain.strategy import OperatorPlan
from harness.plan.patterns import experts_of, linear_pairs
from harness.plan.search.objective import Objective
from harness.plan.search.space import Space
from harness.plan.simulate.simulator import Trial

# Relative to the best step: at 0.02, 2% worse is accepted with probability 1/e.
HOTTEST, COLDEST = (0.02, 0.3, 0.08), 0.005
RESET_EVERY = 300  # proposals, in the colder half
NEAR = 4  # operators apart, in topological order, that a descent still tries as a pair

Move = dict[int, OperatorPlan]


class Chain:
    """One chain over the plans of a trial; stages stay as they are (one)."""

    def __init__(
        self, trial: Trial, space: Space, objective: Objective, *, seed: int, turn: int
    ) -> None:
        self.trial, self.space, self.objective = trial, space, objective
        self._random = random.Random(seed)
        self._hottest = HOTTEST[turn % len(HOTTEST)]
        graph = objective.simulator.graph
        self._ops = list(space.menus)
        allowed = set(self._ops)
        self._neighbours: dict[int, list[int]] = {op: [] for op in self._ops}
        for a, b in trial.tables.edges:
            if a in allowed and b in allowed:
                self._neighbours[a].append(b)
                self._neighbours[b].append(a)
        kinds: dict[str, list[int]] = {}
        for op in self._ops:
            kinds.setdefault(graph.operators[op].kind, []).append(op)
        self._kinds = list(kinds.values())
        self._pairs = [
            pair
            for pair in linear_pairs(graph)
            if allowed.issuperset((pair.first, *pair.between, pair.second, *pair.after))
        ]
        index = graph.index()
        self._inside, self._around = (
            {index[name]: dim for name, dim in dims.items() if index[name] in allowed}
            for dims in experts_of(graph)
        )

    def run(self, start: Mapping[int, OperatorPlan]) -> Move:
        """Walk from a start until the objective's budget is used up; the best plans seen."""
        plans = dict(start)
        apply_plans(self.trial, plans)
        score = best_score = self.objective.judge(self.trial)
        best = dict(plans)
        since = 0
        while not self.objective.is_over():
            move = self._propose(plans)
            since += 1
            spent = self.objective.spent
            temperature = self._hottest * (COLDEST / self._hottest) ** spent
            if spent > 0.5 and since >= RESET_EVERY and score > best_score:
                apply_plans(self.trial, best)
                plans, score, since = dict(best), best_score, 0
                continue
            if not move:
                self.objective.n_proposals += 1
                continue
            before = {op: plans[op] for op in move}
            apply_plans(self.trial, move)
            found = self.objective.judge(self.trial)
            if found <= score or self._random.random() < math.exp(
                (score - found) / (temperature * best_score)
            ):
                plans.update(move)
                score = found
                if score < best_score:
                    best_score, best, since = score, dict(plans), 0
            else:
                apply_plans(self.trial, before)
        return best

    def _propose(self, plans: Mapping[int, OperatorPlan]) -> Move:
        """A move that changes something, or nothing when the draw has no effect."""
        draw = self._random.random()
        if draw < 0.45:
            op = self._random.choice(self._ops)
            move = {op: self._random.choice(self.space.menus[op])}
        elif draw < 0.65:
            move = self._copy(plans)
        elif draw < 0.72 and (self._pairs or self._inside):
            is_pair = bool(self._pairs) and (not self._inside or self._random.random() < 0.5)
            move = self._pair() if is_pair else self._experts()
        elif draw < 0.9:
            a = self._random.randrange(len(self._ops))
            length = 1 + int(self._random.expovariate(4 / len(self._ops)))
            move = self._spread(self._ops[a : a + length])
        else:
            move = self._spread(self._random.choice(self._kinds))
        move |= self._tied(move, plans)
        return {op: plan for op, plan in move.items() if plan != plans[op]}

    def _tied(self, move: Move, plans: Mapping[int, OperatorPlan]) -> Move:
        """Plans, on the same devices, that cut a weight as a moved operator that shares it does."""
        found: Move = {}
        cuts_of = self.objective.cuts_of
        for users in self.trial.tables.tied.values():
            moved = next((op for op in users if op in move), None)
            if moved is None:
                continue
            cuts, used = cuts_of(moved, move[moved]), set(move[moved].devices)
            for op in users:
                if op in move or op not in plans or cuts_of(op, plans[op]) == cuts:
                    continue
                on_same = (plan for plan in self.space.menus[op] if set(plan.devices) == used)
                alike = (plan for plan in on_same if cuts_of(op, plan) == cuts)
                found[op] = next(alike, plans[op])
        return found

    def _copy(self, plans: Mapping[int, OperatorPlan]) -> Move:
        op = self._random.choice(self._ops)
        if not self._neighbours[op]:
            return {}
        source = plans[self._random.choice(self._neighbours[op])]
        return {op: closest(self.space.menus[op], source)}

    def _pair(self) -> Move:
        """Features of the first, contraction of the second, copies of what follows, over the same
        devices."""
        pair = self._random.choice(self._pairs)
        rows = [p for p in self.space.menus[pair.second] if CONTRACTION in p.partition]
        if not rows:
            return {}
        row = self._random.choice(rows)
        cuts = {"feature" if d == CONTRACTION else d: cut for d, cut in row.partition.items()}
        column = OperatorPlan(cuts, row.devices)
        copies = {REPLICA if d == CONTRACTION else d: cut for d, cut in row.partition.items()}
        copied = OperatorPlan(copies, row.devices)
        return {
            **{op: closest(self.space.menus[op], column) for op in (pair.first, *pair.between)},
            pair.second: row,
            **{op: closest(self.space.menus[op], copied) for op in pair.after},
        }

    def _experts(self) -> Move:
        """A cut by experts inside mixtures; around them the same or, on the same devices, one by
        samples."""
        op, dim = self._random.choice(list(self._inside.items()))
        cut = [plan for plan in self.space.menus[op] if dim in plan.partition]
        if not cut:
            return {}
        drawn = self._random.choice(cut)
        dims = self._inside | self._around
        if self._random.random() < 0.5:
            dims |= dict.fromkeys(self._around, SAMPLE)
        move: Move = {}
        for op, to in dims.items():
            cuts = {to if d == dim else d: cut for d, cut in drawn.partition.items()}
            move[op] = closest(self.space.menus[op], OperatorPlan(cuts, drawn.devices))
        return move

    def _spread(self, ops: Sequence[int]) -> Move:
        """One operator's draw for all."""
        source = self._random.choice(self.space.menus[self._random.choice(ops)])
        return {op: closest(self.space.menus[op], source) for op in ops}


def closest(menu: Sequence[OperatorPlan], source: OperatorPlan) -> OperatorPlan:
    """The plan of a menu that is most like another operator's.

    The same; else the same cut dims and devices (shares differ by operator); else by samples on
    the same devices; else whole on the first of them.
    """
    used = set(source.devices)
    for plan in menu:
        if plan == source:
            return plan
    for plan in menu:
        if list(plan.partition) == list(source.partition) and plan.devices == source.devices:
            return plan
    for plan in menu:
        if list(plan.partition) == [SAMPLE] and set(plan.devices) == used:
            return plan
    return next(plan for plan in menu if plan.devices == [min(used)])


def apply_plans(trial: Trial, plans: Mapping[int, OperatorPlan]) -> None:
    """Replace the plans that differ, and with them those of operators that are planned alike."""
    pairs = trial.simulator.alike
    tied = {other: plans[first] for first, other in pairs if first in plans}
    for op, plan in (*plans.items(), *tied.items()):
        if trial.tables.plans[op] != plan:
            trial.replace(op, plan)


def descend(
    trial: Trial, space: Space, objective: Objective, start: Mapping[int, OperatorPlan]
) -> None:
    """Walk to a local optimum: no other plan of one operator, nor of two, is better.

    Pairs are tried once no single operator improves, as far as the objective's budget goes: those
    along edges first, then other near ones (branches that share a device are not joined).
    """
    plans = dict(start)
    apply_plans(trial, plans)
    score = objective.judge(trial)
    moves = _joint_moves(trial, space)
    k = n_failed = 0
    while n_failed < len(moves):
        ops = moves[k]
        before = score
        for choice in product(*(space.menus[op] for op in ops)):
            if objective.is_over():
                return
            move = {op: plan for op, plan in zip(ops, choice, strict=True) if plan != plans[op]}
            if len(move) < len(ops):
                continue
            apply_plans(trial, move)
            found = objective.judge(trial)
            if found < score:
                score = found
                plans.update(move)
            else:
                apply_plans(trial, {op: plans[op] for op in move})
        n_failed = 0 if score < before else n_failed + 1
        # After a pair has improved, single operators come first again.
        k = 0 if score < before and len(ops) > 1 else (k + 1) % len(moves)


def _joint_moves(trial: Trial, space: Space) -> list[tuple[int, ...]]:
    """Operators to change together: one, two along an edge, two near ones."""
    ops = list(space.menus)
    edges = [(a, b) for a, b in trial.tables.edges if a in space.menus and b in space.menus]
    joined = set(edges)
    windows = [ops[i : i + 1 + NEAR] for i in range(len(ops))]
    near = [(w[0], b) for w in windows for b in w[1:] if (w[0], b) not in joined]
    return [*((op,) for op in ops), *edges, *near]
