"""Delay frames in user space if the kernel has no netem, by a process between two taps per link.

    node0 [eth0]--tap--> due time = arrival + latency --tap--[port0] switch

Taps carry whole offloaded segments (up to 64 KiB with their vnet header), so a few thousand
reads per second suffice for 1 Gbit/s. tbf on the taps does the shaping.
"""

import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import EnvironmentSetupError
from harness.virtual.network import NODE_INTERFACE, port_name
from harness.virtual.plan import ClusterPlan
from harness.virtual.state import SWITCH, State

READY = "ready\n"
START_TIMEOUT_S = 10.0
# From linux/if_tun.h and linux/sched.h, linux/prctl.h.
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_OFFLOAD_CHECKSUM, _OFFLOAD_TSO4, _OFFLOAD_TSO6 = 1, 2, 4
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_MAX_FRAME_BYTES = 10 + 14 + 65536
_FRAMES_PER_TURN = 64


@dataclass
class Direction:
    """A queue of frames for one direction of a link.

    Frames leave in the order of arrival, because all wait equally long.
    """

    source: int
    target: int
    latency_s: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)

    def accept(self, frame: bytes, now_s: float) -> None:
        self.waiting.append((now_s + self.latency_s, frame))

    def release(self, now_s: float) -> list[bytes]:
        """Remove and return the frames that are due."""
        due = []
        while self.waiting and self.waiting[0][0] <= now_s:
            due.append(self.waiting.popleft()[1])
        return due


def wait_s(directions: Iterable[Direction], now_s: float) -> float | None:
    """Seconds until the next frame is due; None if the queues are empty."""
    due = [direction.waiting[0][0] for direction in directions if direction.waiting]
    return max(0.0, min(due) - now_s) if due else None


def _enter(libc: ctypes.CDLL, namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(descriptor)


def _open_tap(name: str) -> int:
    """Make a tap in this process's network namespace; closing the descriptor removes it."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TSO4 | _OFFLOAD_TSO6)
    return descriptor


def _receive(direction: Direction) -> None:
    for _ in range(_FRAMES_PER_TURN):
        try:
            frame = os.read(direction.source, _MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        direction.accept(frame, time.monotonic())


def _send(direction: Direction) -> None:
    for frame in direction.release(time.monotonic()):
        try:
            os.write(direction.target, frame)
        except OSError:
            continue  # the far end is down or full, so the frame is lost as on a wire


def relay(directions: list[Direction]) -> None:
    """Move frames; never returns."""
    by_source = {direction.source: direction for direction in directions}
    while True:
        readable, _, _ = select.select(
            list(by_source), [], [], wait_s(directions, time.monotonic())
        )
        for source in readable:
            _receive(by_source[source])
        for direction in directions:
            _send(direction)


def _open_links(links: list[dict[str, object]], switch: str) -> list[Direction]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # 1 us; the default of 50 us adds to every hop
    node_taps = []
    for link in links:
        _enter(libc, str(link["namespace"]))
        node_taps.append(_open_tap(NODE_INTERFACE))
    _enter(libc, switch)  # last, so that `down` finds this process in the switch's namespace
    directions = []
    for link, node_tap in zip(links, node_taps, strict=True):
        port, latency_s = _open_tap(str(link["port"])), float(str(link["latency_s"]))
        directions += [Direction(node_tap, port, latency_s), Direction(port, node_tap, latency_s)]
    return directions


def start(place: State, plan: ClusterPlan) -> None:
    """Start the relay for the nodes with latency and wait until their interfaces exist.

    Raises:
        EnvironmentSetupError: the relay could not make its taps; has its message.
    """
    links = [
        {
            "namespace": str(place.namespace(node.name)),
            "port": port_name(index),
            "latency_s": node.latency_s,
        }
        for index, node in enumerate(plan.nodes)
        if node.latency_s > 0
    ]
    log = place.directory / "relay.log"
    package_root = str(Path(__file__).resolve().parents[2])
    with log.open("ab") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(links), str(place.namespace(SWITCH))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": package_root},
            start_new_session=True,
            cwd="/",
        )
    assert child.stdout is not None, "piped above"
    readable, _, _ = select.select([child.stdout], [], [], START_TIMEOUT_S)
    if not readable or child.stdout.readline().decode() != READY:
        child.kill()
        lines = log.read_text().strip().splitlines() or ["it left no message"]
        raise EnvironmentSetupError(
            f"the latency relay did not start ({lines[-1]}): it needs /dev/net/tun; "
            "leave --latency away"
        )


def main(argv: list[str]) -> None:
    """Run the relay; arguments: links as JSON, namespace of the switch."""
    directions = _open_links(json.loads(argv[0]), argv[1])
    sys.stdout.write(READY)
    sys.stdout.close()
    relay(directions)


if __name__ == "__main__":
    main(sys.argv[1:])
