"""TCP between every ordered pair of hosts, by real connections: n programs, all pairs at once.

Each host listens on a free port and tells it; then each connects to all others by the names of
the hostfile, resolved there, and makes sure who answers. So a firewall, a name that a host
resolves differently, and an address that leads to another machine all come to light.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from harness.nodes.agent import Agent, AgentError
from harness.nodes.session import Session


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One ordered pair's outcome.

    Attributes:
        error: empty when it works, else resolve, timeout, refused or impostor.
        detail: the address, or what exactly went wrong.
    """

    rtt_s: float | None = None
    error: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All outcomes.

    Attributes:
        connections: by (source, target).
        silent: hosts whose program did not start or report, and why.
    """

    connections: dict[tuple[str, str], Connection]
    silent: dict[str, str]

    def __or__(self, other: Pairs) -> Pairs:
        """Both, of unlike pairs."""
        return Pairs(
            connections=self.connections | other.connections, silent=self.silent | other.silent
        )


async def connect_pairs(
    sessions: Sequence[Session], new: Collection[str], *, pythons: list[str], timeout_s: float
) -> Pairs:
    """Try every ordered pair; a host that fails costs at most `timeout_s` per phase.

    Args:
        new: hosts that one end of a pair must be among.
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
    """One message of each, by host; those that have none are noted."""

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
