"""The states of a whole model and its optimizer, as a plain PyTorch program saves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from harness.errors import ConfigError
from harness.runtime.executor.state.groups import OptimizerGroups, saved_values
from harness.runtime.executor.state.state import StateGatherer

T = TypeVar("T")
Factory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]


class PlainState:
    """Converts between a state and those of a plain program.

    Args:
        factory: makes the plain optimizer of the whole model's named parameters.
        prefix: of all names of the state, which the program's model has not.
    """

    def __init__(self, gatherer: StateGatherer, factory: Factory, prefix: str) -> None:
        self._gatherer, self._factory, self._prefix = gatherer, factory, prefix
        self._shapes = self.own_names(gatherer.parameter_shapes())
        trained = set(gatherer.trained_names())
        self._trained = [self._own(name) for name in gatherer.numbers if name in trained]

    def _own(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def own_names(self, values: Mapping[str, T]) -> dict[str, T]:
        """By the names of the program's model."""
        return {self._own(name): value for name, value in values.items()}

    def _grouped(self, names: Sequence[str]) -> tuple[list[list[str]], list[dict[str, Any]]]:
        """The names and values of each group of the plain optimizer of some parameters."""
        empty = torch.zeros(())  # all share its memory
        made = {
            nn.Parameter(
                empty.expand(self._shapes[name]), requires_grad=name in self._trained
            ): name
            for name in names
        }
        groups = self._factory([(name, p) for p, name in made.items()]).param_groups
        return [[made[p] for p in group["params"]] for group in groups], groups

    def of_optimizer(self, optimizer: Optimizer, groups: OptimizerGroups) -> dict[str, Any]:
        """The `state_dict` of the plain optimizer of all parameters; all ranks must call it.

        Raises:
            ConfigError: the state of a cut parameter cannot be cut likewise.
        """
        by_name = self.own_names(self._gatherer.optimizer_state(optimizer))
        names, made = self._grouped(list(self._shapes))
        numbers = {name: k for k, name in enumerate(n for group in names for n in group)}
        param_groups = [
            {
                **group,
                **next((groups.groups[name] for name in own if name in groups.groups), {}),
                "params": [numbers[name] for name in own],
            }
            for own, group in zip(names, made, strict=True)
        ]
        state = {k: by_name[name] for name, k in numbers.items() if name in by_name}
        return {"state": state, "param_groups": param_groups}

    def read(
        self, model: Mapping[str, Tensor], state: Mapping[str, Any], optimizer: Optimizer
    ) -> tuple[OptimizerGroups, dict[str, Any]]:
        """The groups' values, and the state as `open_sharded` gives it, without a step.

        Args:
            state: of the plain optimizer, of all trained or all parameters.
            optimizer: of this rank.

        Raises:
            ConfigError: the optimizer's state has other groups.
        """
        try:
            groups = [
                (saved_values(group), list(group["params"])) for group in state["param_groups"]
            ]
            of_number = dict(state["state"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(
                f"the optimizer's state, of type {type(state).__name__}, is no state_dict() of a "
                "torch optimizer: give the one that the plain program saved"
            ) from None
        sizes = [len(numbers) for _, numbers in groups]
        choices = [self._grouped(names)[0] for names in (self._trained, list(self._shapes))]
        fitting = [names for names in choices if [len(group) for group in names] == sizes]
        if not fitting:
            raise ConfigError(
                f"the optimizer's state has groups of {sizes} parameters, the optimizer that the "
                f"factory makes of the whole model has {[len(group) for group in choices[0]]}: "
                "save the state of that one, made of the model's named_parameters()"
            )
        of_group: dict[str, dict[str, Any]] = {}
        of_parameter: dict[int, Any] = {}
        index = self.own_names(self._gatherer.numbers)
        for (values, numbers), names in zip(groups, fitting[0], strict=True):
            of_group |= dict.fromkeys(names, values)
            of_parameter |= {
                index[name]: of_number[k]
                for name, k in zip(names, numbers, strict=True)
                if k in of_number
            }
        known = {self._own(name): name for name in self._gatherer.names}
        tensors = {
            known.get(name, name): tensor
            for name, tensor in model.items()
            if not name.endswith(_EXTRA_STATE_KEY_SUFFIX)
        }
        found = {"model": tensors, "optimizer": {"state": of_parameter}}
        return OptimizerGroups(type(optimizer).__name__, of_group), found
