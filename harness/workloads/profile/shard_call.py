"""The part of an operator's weights that is timed in the operator's place."""

from __future__ import annotations

from harness.runtime.capture.capture import Captured
from harness.runtime.profiling.shards import OperatorShard, operator_shard
from harness.runtime.profiling.stretch import OperatorCall
from harness.workloads.planning.profile_points import Point


class ShardCall:
    """Replaces a call of an operator by a call of a part of its weights.

    The part is made when it is first called, so that few parts are in memory at a time.
    """

    def __init__(self, captured: Captured, point: Point) -> None:
        self._captured, self._point = captured, point
        self._shard: OperatorShard | None = None

    def __call__(self, call: OperatorCall) -> OperatorCall:
        point = self._point
        if self._shard is None:
            self._shard = operator_shard(
                self._captured, point.operator, point.dim, point.size, call
            )
        assert self._shard is not None, "it was cut before"
        return self._shard.call(call)
