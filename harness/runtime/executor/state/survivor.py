"""The state of a rank whose step ended because another rank was lost.

It is that before or after the step, because the forward changes buffers, the optimizer weights, and
the step counter the rest:

    step 7 | forward          | optimizer | finish   | step 8
             weights of step 7, torn        weights of step 8
             buffers remembered             buffers of step 8
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from harness.errors import ResultsError
from harness.runtime.executor.state.shard import state_shard
from harness.runtime.ranks.world import World

if TYPE_CHECKING:
    from harness.runtime.executor.engine import ExecutorEngine


class Survivor:
    """Follows the steps of one engine, and saves this rank's slices of its last whole state.

    Args:
        engine: trains synchronously.
    """

    def __init__(self, engine: ExecutorEngine, world: World) -> None:
        engine.gathers.is_ahead = False  # else a lost rank's weights could be on their way
        self._held, self._world = engine.held_state(), world
        self._held.optimizer.register_step_pre_hook(lambda *_: self._note(begun=True))
        self._held.optimizer.register_step_post_hook(lambda *_: self._note(done=True))
        self._norms, self._scale = engine.layer_norms, engine.updating.scale
        held = self._held.weights.held.values()
        self._buffers = [tensor for tensor in held if not isinstance(tensor, nn.Parameter)]
        self.begin_step()

    def _note(self, *, begun: bool = False, done: bool = False) -> None:
        self._has_begun |= begun
        self._is_done |= done

    def begin_step(self) -> None:
        self._has_begun = self._is_done = False
        self._step = self._held.random.step
        self._sums = None if self._norms is None else self._norms.sums
        self._scaled = self._scale.state()
        self._before: list[Tensor] = [tensor.detach().clone() for tensor in self._buffers]

    def n_more_steps(self) -> int:
        """Steps since the last `begin_step` whose update the state contains: 0 or 1.

        Raises:
            ResultsError: the update was cut off.
        """
        if self._held.random.step > self._step:
            return 1
        is_spread = not self._held.owners.is_sharded  # else others' weights may be missing
        if self._has_begun and not (self._is_done and is_spread):
            raise ResultsError("the update of the weights was cut off")
        return int(self._is_done)

    def save(self, directory: Path, run: str) -> None:
        """Write all slices that this rank holds; no other rank takes part.

        Raises:
            ResultsError: the update was cut off, or the file cannot be written.
        """
        n_more = self.n_more_steps()
        sums = self._norms.sums if self._norms is not None and n_more else self._sums
        if n_more == 0:
            for tensor, before in zip(self._buffers, self._before, strict=True):
                tensor.detach().copy_(before)
        shard = state_shard(
            self._held.gatherer, self._held.optimizer, self._step + n_more, self._world,
            run=run, is_survivor=True, norms=sums,
            loss_scale=self._scale.state() if n_more else self._scaled,
        )  # fmt: skip
        shard.write(directory)
