"""A shard of an operator's weights, timed in place of the operator."""

from __future__ import annotations

from harness.runtime.capture.capture import Captured
from harness.runtime.profiling.shards import OperatorShard, operator_shard
from harness.runtime.profiling.subgraph import OperatorCall
from harness.workloads.planning.profile_points import Point


class ShardCall:
    """Replaces an operator's call by its shard's call.

    The shard is made at its first call, so that few shards are in memory at a time.
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
        assert self._shard is not None, "verification has made this shard before"
        return self._shard.call(call)
