"""Test TCP connections between all ordered pairs of hosts at once, by one program on each host.

Each program listens on a free port and reports it. Then it connects to all others by their names
in the hostfile, resolved on its host, and verifies the identity of each. The test finds firewalls,
names that a host resolves differently, and addresses of other machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from harness.nodes.session import Agent, AgentError, Session


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One ordered pair's outcome.

    Attributes:
        error: empty on success, else resolve, timeout, refused or impostor.
        detail: the address, or details of the error.
    """

    rtt_s: float | None = None
    error: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All outcomes.

    Attributes:
        connections: by (source, target).
        silent: hosts whose program did not start or report, with the reason.
    """

    connections: dict[tuple[str, str], Connection]
    silent: dict[str, str]

    def __or__(self, other: Pairs) -> Pairs:
        """The union of two sets of pairs that do not overlap."""
        return Pairs(
            connections=self.connections | other.connections, silent=self.silent | other.silent
        )


async def connect_pairs(
    sessions: Sequence[Session], new: Collection[str], *, pythons: list[str], timeout_s: float
) -> Pairs:
    """Test every ordered pair; a host that fails costs at most `timeout_s` per phase.

    Args:
        new: hosts of which each tested pair includes at least one.
    """
    silent: dict[str, str] = {}
    connections: dict[tuple[str, str], Connection] = {}
    limit_s = round(3 * timeout_s)
    agents = await asyncio.gather(
        *(session.start("connect.py", pythons=pythons, limit_s=limit_s) for session in sessions)
    )
    ports = await _gather(agents, timeout_s, silent)
    listening = [agent for agent in agents if agent.host in ports]
    for agent in listening:
        others = [
            peer
            for peer in listening
            if peer is not agent and (peer.host in new or agent.host in new)
        ]
        peers = [[peer.host, ports[peer.host]["port"]] for peer in others]
        await agent.send({"name": agent.host, "timeout_s": timeout_s / 2, "peers": peers})
    results = await _gather(listening, timeout_s, silent)
    await asyncio.gather(*(agent.finish() for agent in agents))
    for source, result in results.items():
        for name, outcome in result["peers"].items():
            connections[source, str(name)] = Connection(
                rtt_s=outcome.get("rtt_s"),
                error=str(outcome.get("error", "")),
                detail=str(outcome.get("detail", outcome.get("address", ""))),
            )
    return Pairs(connections=connections, silent=silent)


async def _gather(
    agents: Sequence[Agent], timeout_s: float, silent: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Receive one message from each agent, by host; adds the others to `silent`."""

    async def listen(agent: Agent) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await agent.receive()
        except TimeoutError:
            silent[agent.host] = f"no answer in {timeout_s:g} s"
        except AgentError as error:
            silent[agent.host] = str(error)
        return None

    messages = await asyncio.gather(*(listen(agent) for agent in agents))
    return {a.host: m for a, m in zip(agents, messages, strict=True) if m is not None}
