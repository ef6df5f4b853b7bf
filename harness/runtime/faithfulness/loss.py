"""Compare the loss that is split off a model with that of the model itself.

Repeating torch's calls loses what they do not show: changes of memory through numpy, `.data` or
`set_`, numbers that were values, and what forward keeps beside the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from harness.errors import ModelError
from harness.runtime.data.batch import Batch
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.devices.precision import repeatable
from harness.runtime.devices.random_sources import seed_all
from harness.runtime.faithfulness.outcomes import bits_of, rounding_of
from harness.runtime.faithfulness.state import preserved
from harness.runtime.models.example import BoundInputs
from harness.runtime.models.loss_split import loss_name
from harness.runtime.models.own_loss import LabelledTask
from harness.runtime.models.task import Task, logits_of, named_outputs

_SIZES = (3, 2)
_SEED = 20
_REMEDY = (
    "compute the loss without numpy, .data, set_ and numbers read from tensors, keep no state "
    "beside it, or let forward return the loss alone"
)


def hold_own_loss(task: Task, name: str) -> None:
    """Compare losses and buffers of two batches in a row; a model that does not take random labels,
    or computes another loss each time, is not compared. Costs four forward passes, of two or three
    samples. Restores the model.

    Raises:
        ModelError: they differ.
    """
    model = task.model
    if not isinstance(task, LabelledTask) or not isinstance(model, BoundInputs):
        return
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    batches = [draw_batch(task, n_samples, k, device) for k, n_samples in enumerate(_SIZES)]
    own, names = task.own_loss, [spec.name for spec in task.inputs]

    def labels_of(batch: Batch) -> dict[str, Tensor]:
        drawn = zip([spec.name for spec in own.labels], own.labels_of(batch.targets), strict=True)
        given = dict(zip(names, batch.inputs, strict=True))
        return {key: given.get(key, label) for key, label in drawn}

    def of_model(batch: Batch) -> Tensor:
        unkept = [x for key, x in labels_of(batch).items() if key not in names]
        output = model.call(batch.inputs, dict(zip(model.left_out, unkept, strict=True)))
        found: Tensor = named_outputs(output)[loss_name(output) or ""]
        return found

    def split(batch: Batch) -> Tensor:
        targets = own.join_labels([*labels_of(batch).values()]) if own.labels else batch.targets
        return own.sum(logits_of(model(*batch.inputs)), targets) / own.count(targets)

    buffers = dict(model.named_buffers())

    def outcome(loss_of: Callable[[Batch], Tensor]) -> tuple[list[float], dict[str, Tensor]]:
        with preserved(model), repeatable(device), torch.no_grad():
            losses = []
            for batch in batches:
                seed_all(_SEED)
                losses.append(float(loss_of(batch.each(torch.clone))))
            now = dict(model.named_buffers())
            return losses, {key: bits_of(now[key]).clone() for key in buffers}

    try:
        expected, kept = outcome(of_model)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return
    found, changed = outcome(split)
    tolerance = rounding_of(model, "fp32")
    difference = ""
    for batch, mine, models in zip(batches, found, expected, strict=True):
        if not math.isclose(mine, models, rel_tol=tolerance, abs_tol=tolerance):
            difference = difference or (
                f"the loss of {name} for {len(batch.targets)} samples is {models:.6g}, and "
                f"{mine:.6g} from its outputs and labels: {_REMEDY}"
            )
    for key, bits in kept.items():
        if not torch.equal(changed[key], bits):
            difference = difference or (
                f"the forward of {name} writes the buffer {key.removeprefix(task.prefix)!r} "
                f"where it gets labels, and the loss is computed apart from it: {_REMEDY}"
            )
    # A model with a random generator of its own computes another loss each time, or NaN.
    if difference and outcome(of_model)[0] == expected:
        raise ModelError(difference)
