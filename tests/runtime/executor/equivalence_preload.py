"""What the server that ranks are forked from does for them: imports, first steps and captures."""

from __future__ import annotations

import logging
import tempfile
from contextlib import suppress

import torch.distributed as dist
import torch.utils.serialization  # noqa: F401 - of each rank's result
from equivalence_cases import Case
from equivalence_models import small_graph
from equivalence_ranks import local_world
from equivalence_strategies import named_strategies
from equivalence_training import CAPTURED, key_of, train_by_strategy
from zoo.training import ZooCase

from harness.runtime.capture.capture import capture
from harness.runtime.executor.geometry.values import MetaModel

_MOST = 40  # captured models that are kept

logging.getLogger("harness").setLevel(logging.ERROR)  # operators that are gathered, by name
# Imports much of torch, and sympy, which happens only when it traces and steps.
with tempfile.TemporaryDirectory() as directory:
    store = dist.FileStore(f"{directory}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    alone = named_strategies(small_graph("vit"), 1, 4)["single"]
    train_by_strategy(Case(name="first", model="vit", n_ranks=1, strategy=alone), local_world(0, 1))
    dist.destroy_process_group()


def prepare(argument: object) -> None:
    """Capture the model of a case, and infer its shapes, once for all of its ranks."""
    case = getattr(argument, "case", argument)
    if not isinstance(case, ZooCase | Case):
        return
    if getattr(case, "backend", ""):
        import torch._inductor.pattern_matcher  # noqa: F401 - takes each rank a second
    key = case.key if isinstance(case, ZooCase) else key_of(case)
    with suppress(Exception):  # which each rank raises itself
        if key not in CAPTURED:
            if len(CAPTURED) == _MOST:
                del CAPTURED[next(iter(CAPTURED))]
            task = case.make_task()
            CAPTURED[key] = task, capture(task, case.strategy.batch, "model")
        task, captured = CAPTURED[key]  # not frozen, because ranks may compare model and graph
        meta = MetaModel.of(captured, task.inputs, local_world(0, 1).device)
        for size in set(case.strategy.microbatch_sizes()):
            meta.at(size)
            meta.at_twice(size)
