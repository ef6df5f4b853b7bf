"""A torch.distributed all-reduce over the hosts, started over ssh without any MPI.

The ranks' programs start as soon as a host has answered, so that importing torch overlaps with
waiting for slower hosts; they learn their ranks when it is known who takes part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.nodes.agent import Agent, AgentError
from harness.nodes.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The outcome.

    Attributes:
        hosts: that took part, in rank order.
        backend: nccl where every host has a GPU that torch can use, else gloo.
        errors: by host; empty when every rank got the right sum.
        left_out: hosts whose torch did not get ready, and why.
        duration_s: of the fastest of the last rank's repeats, 1 MiB.
    """

    hosts: tuple[str, ...]
    backend: str
    errors: dict[str, str]
    left_out: dict[str, str]
    duration_s: float | None = None


async def run_allreduce(
    agents: Sequence[Agent], facts: Mapping[str, Facts], *, timeout_s: float
) -> Reduction:
    """Reduce over all agents that get ready within the time; then as long again at most."""
    ready, left_out = await _receive_all(agents, timeout_s)
    ranks = [agent for agent in agents if agent.host in ready]
    if not ranks:
        return Reduction(hosts=(), backend="", errors={}, left_out=left_out)
    has_gpus = all(message.get("has_gpu") for message in ready.values())
    backend = "nccl" if has_gpus else "gloo"
    orders = rank_orders([agent.host for agent in ranks], facts, backend, timeout_s / 2)
    results, errors = await _reduce(ranks, orders, timeout_s)
    for host, message in results.items():
        if "error" in message:
            errors[host] = str(message["error"])
        elif not message.get("is_right"):
            errors[host] = "the sum is wrong"
    durations_s = [float(m["duration_s"]) for m in results.values() if "duration_s" in m]
    return Reduction(
        hosts=tuple(agent.host for agent in ranks),
        backend=backend,
        errors=errors,
        left_out=left_out,
        duration_s=max(durations_s, default=None),
    )


def rank_orders(
    hosts: Sequence[str], facts: Mapping[str, Facts], backend: str, timeout_s: float
) -> list[dict[str, object]]:
    """What each rank is told; the port is 0 until rank 0 has one."""
    is_alone = len(hosts) == 1
    address = "127.0.0.1" if is_alone else facts[hosts[0]].cluster_address or hosts[0]
    orders: list[dict[str, object]] = []
    for rank, host in enumerate(hosts):
        interface = None if is_alone else facts[host].cluster_interface
        orders.append(
            {
                "rank": rank,
                "size": len(hosts),
                "backend": backend,
                "interface": interface.name if interface else "",
                "address": address,
                "port": 0,
                "timeout_s": timeout_s,
            }
        )
    return orders


async def _reduce(
    ranks: Sequence[Agent], orders: Sequence[dict[str, object]], timeout_s: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    await ranks[0].send(orders[0])
    ports, errors = await _receive_all(ranks[:1], timeout_s)
    port = ports.get(ranks[0].host, {}).get("port")
    if port is None:
        message = ports.get(ranks[0].host, {}).get("error", "")
        return {}, errors or {ranks[0].host: str(message)}
    for agent, order in zip(ranks[1:], orders[1:], strict=True):
        await agent.send({**order, "port": port})
    return await _receive_all(ranks, timeout_s)


async def _receive_all(
    agents: Sequence[Agent], timeout_s: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """One message of each, and why there is none, both by host."""
    errors: dict[str, str] = {}

    async def receive(agent: Agent) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await agent.receive()
        except TimeoutError:
            errors[agent.host] = f"no answer in {timeout_s:g} s"
        except AgentError as error:
            errors[agent.host] = str(error)
        return None

    messages = await asyncio.gather(*(receive(agent) for agent in agents))
    found = {a.host: m for a, m in zip(agents, messages, strict=True) if m is not None}
    return found, errors
