"""The groups of a user's optimizer, beside the shards of a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.domain.files import decode
from harness.errors import ConfigError, ResultsError
from harness.inputs import read_file, shorten
from harness.measure.store import write_atomically
from harness.runtime.engines.optimizers import DECAY
from harness.runtime.ranks.gather import gather_objects
from harness.runtime.ranks.world import World

Names = Mapping[nn.Parameter, str]

_FILE = "groups.json"
_NOT_SAVED = ("params", "param_names", DECAY)


class OptimizerGroups(msgspec.Struct, frozen=True):
    """The optimizer's class, and of each parameter the values of its group, such as `lr`."""

    optimizer: str
    groups: dict[str, dict[str, Any]]

    @classmethod
    def gathered(cls, optimizer: Optimizer, names: Names, world: World) -> Self:
        """Of all ranks' parameters; all ranks must call it.

        Args:
            names: of the parameters that this rank updates; empty if it updates none.

        Raises:
            ConfigError: a file cannot hold a value.
        """
        own: dict[str, dict[str, Any]] = {}
        for group in optimizer.param_groups if names else []:
            values = saved_values(group)
            own |= {names[parameter]: values for parameter in group["params"]}
        groups = {name: v for found in gather_objects(world, own) for name, v in found.items()}
        for name, values in groups.items():
            _check_values(name, values)
        return cls(type(optimizer).__name__, groups)

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read them; None if the directory has none. Raises ResultsError if they are malformed."""
        path = directory / _FILE
        if not path.exists():
            return None
        data = read_file(path, "optimizer's groups", ResultsError)
        return decode(data, cls, source=str(path), error=ResultsError)

    def write(self, directory: Path) -> None:
        """Write them; one rank must call it. Raises ResultsError if it cannot."""
        write_atomically(directory / _FILE, msgspec.json.encode(self))

    def check(self, optimizer: Optimizer, names: Names) -> None:
        """Refuse an optimizer of another class, or one with parameters of unlike groups in one, by
        ConfigError."""
        own = type(optimizer).__name__
        if self.optimizer != own:
            raise ConfigError(
                f"the state is of the optimizer {self.optimizer}, this one is {own}: train on by "
                "the one that saved it"
            )
        for group in optimizer.param_groups:
            found = [names[parameter] for parameter in group["params"]]
            self._check_alike([name for name in found if name in self.groups])

    def _check_alike(self, found: Sequence[str]) -> None:
        for name in found:
            own, other = self.groups[found[0]], self.groups[name]
            unlike = next((key for key in own if own[key] != other.get(key)), None)
            if unlike is not None:
                raise ConfigError(
                    f"the state has {unlike} {shorten(own[unlike])} of {found[0]} and "
                    f"{shorten(other.get(unlike))} of {name}, which are in one group of this "
                    "optimizer: give it the groups that saved the state"
                )

    def give(self, optimizer: Optimizer, names: Names) -> None:
        """Give the optimizer's groups the saved values of their parameters."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in self.groups.get(names[parameter], {}).items():
                    if isinstance(group.get(key), Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = value


def saved_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group's values those that a state keeps."""
    return {
        key: value.item() if isinstance(value, Tensor | np.generic) else value
        for key, value in group.items()
        if key not in _NOT_SAVED
    }


def _check_values(name: str, values: Mapping[str, Any]) -> None:
    """Refuse what JSON has no form for, or null, as for numbers that are not finite."""
    for key, value in values.items():
        try:
            parts = [part for part in pytree.tree_leaves(value) if part is not None]
            is_held = all(msgspec.json.encode(part) != b"null" for part in parts)
        except (TypeError, ValueError):
            is_held = False
        if not is_held:
            raise ConfigError(
                f"the optimizer's group of {name} has {key} of {shorten(value)}, which a file of a "
                "state cannot hold: keep it elsewhere than in the groups"
            )
