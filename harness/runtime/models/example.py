"""A batch of example inputs: how a model is called with tensors like those of the example.

An example is a dict of forward's keyword arguments or a tuple of positional ones. Its tensors may
be nested in dicts and tuples; the first dim of each is the samples. Other values, such as a flag,
are passed as they are.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from harness.errors import ModelError
from harness.runtime.devices.precision import has_gradients
from harness.runtime.models.own_loss import join
from harness.runtime.models.task import InputSpec, Wrapper, named_outputs


class Example:
    """An example's tensors and their places among a model's arguments.

    Attributes:
        specs: of the tensors. Real values of synthetic samples lie between 0 and 1 where those of a
            user's example do. Integers of one are those of one of the example's samples; any from 0
            to the largest without `has_rows`, or where some are negative, which do not count as
            labels.

    Raises:
        ModelError: it has no tensors, or one without samples.
    """

    def __init__(self, name: str, example: Any, *, has_rows: bool) -> None:
        args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
        args = tuple(args) if isinstance(args, tuple | list) else (args,)
        leaves, self.structure = pytree.tree_flatten_with_path((args, kwargs))
        self.leaves = [leaf for _, leaf in leaves]
        self.places = [k for k, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        # Copies, because one tensor may be several inputs, such as tokens that are also labels.
        self.tensors: list[Tensor] = [self.leaves[k].clone() for k in self.places]
        if not self.tensors or not all(tensor.dim() and len(tensor) for tensor in self.tensors):
            raise ModelError(
                f"{name}: its example holds {_kinds(self.leaves)}: give tensors of "
                "several samples, and leave out what has a default"
            )
        self.specs = tuple(
            _spec(_name_of(leaves[k][0], k), self.leaves[k], has_rows) for k in self.places
        )
        sizes = {len(x): spec.name for x, spec in zip(self.tensors, self.specs, strict=True)}
        if len(sizes) > 1:
            (n, one), (n_other, other), *_ = sizes.items()
            raise ModelError(
                f"{name}: its example has {n} samples of {one} and {n_other} of {other}, and the "
                "first dim of every tensor counts samples: give each sample its own, and keep what "
                "all samples share in a buffer of the model"
            )
        self._n_positional, self._keywords = len(args), list(kwargs)

    def fits(self, model: nn.Module) -> bool:
        """Whether forward takes the tensors in their order."""
        n_given = self._n_positional + len(self._keywords)
        if not n_given == len(self.tensors) == len(self.leaves):
            return False
        parameters = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return self._keywords == names[self._n_positional : n_given]


class BoundInputs(Wrapper):
    """Calls a model with tensors, in the order of an example's `specs`, among its arguments.

    Attributes:
        left_out: specs of the tensors that are not given, by their places.

    Args:
        kept: numbers of the tensors that are given, None for all; the others are None, or with
            `has_blanks` the largest integer of the example, and zeros.
        outputs: names of the outputs to return as one tensor; empty: all that the model returns.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        kept: Sequence[int] | None = None,
        outputs: Sequence[str] = (),
        *,
        has_blanks: bool = False,
    ) -> None:
        super().__init__(model)
        places, structure = example.places, example.structure
        kept = range(len(places)) if kept is None else kept
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in example.leaves]

        def arguments(leaves: list[Any]) -> Any:  # deepcopy of a structure warns, not of a function
            return pytree.tree_unflatten(leaves, structure)

        self._arguments = arguments
        self._positions, self._outputs = [places[k] for k in kept], tuple(outputs)
        self.left_out = {places[k]: s for k, s in enumerate(example.specs) if k not in kept}
        self._blanks = self.left_out if has_blanks else {}

    def call(self, tensors: Sequence[Tensor], others: Mapping[int, Tensor]) -> Any:
        """Call the model with further tensors, by their places in `left_out`."""
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        for position, tensor in others.items():
            leaves[position] = tensor
        args, kwargs = self._arguments(leaves)
        return self.model(*args, **kwargs)

    def forward(self, *tensors: Tensor) -> Any:
        blanks = {}
        for position, spec in self._blanks.items():
            size = (tensors[0].shape[0], *spec.shape)
            blanks[position] = tensors[0].new_full(size, (spec.n_values or 1) - 1, dtype=spec.dtype)
        output = self.call(tensors, blanks)
        if not self._outputs:
            return output
        outputs = named_outputs(output) or output  # a traced module's are read from its proxy
        return join([outputs[name] for name in self._outputs])


def _kinds(leaves: list[Any]) -> str:
    kinds = {
        f"a Tensor of shape {tuple(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in leaves
    }
    return ", ".join(sorted(kinds)) or "nothing"


def _name_of(path: tuple[Any, ...], position: int) -> str:
    """The key of a dict, and the keys and places inside it."""
    known = itertools.dropwhile(lambda entry: not isinstance(entry, pytree.MappingKey), path)
    words = [str(astuple(entry)[0]) for entry in known]
    return "_".join(words) or f"input_{position}"


def _spec(name: str, tensor: Tensor, has_rows: bool) -> InputSpec:
    shape, dtype = tuple(tensor.shape[1:]), tensor.dtype
    if has_gradients(tensor):
        is_fraction = False
        if has_rows and dtype.is_floating_point:  # equal values say nothing
            is_fraction = 0 <= float(tensor.min()) < float(tensor.max()) <= 1
        return InputSpec(name=name, shape=shape, dtype=dtype, is_fraction=is_fraction)
    lowest, highest = int(tensor.min()), int(tensor.max())
    return InputSpec(
        name=name,
        shape=shape,
        dtype=dtype,
        n_values=highest + 1,
        rows=tensor.clone() if has_rows and lowest >= 0 else None,
        ignored=lowest if lowest < 0 else None,
    )
