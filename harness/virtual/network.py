"""The cluster's network: a switch (bridge in its own namespace), a link to each node, shaping.

    node0 [eth0 tbf]----[tbf port0]\\
    node1 [eth0 tbf]----[tbf port1]-- switch
    node2 [eth0 tbf]----[tbf port2]/

A link is a veth pair, or two taps joined by the relay if it has latency and the kernel has no
netem. Each end shapes its own traffic, so both directions are limited.
"""

from pathlib import Path

from harness.errors import EnvironmentSetupError
from harness.virtual.plan import ClusterPlan, NodePlan
from harness.virtual.system import in_network, run

NODE_INTERFACE = "eth0"
SWITCH = "switch0"
# The bucket holds 1 ms of traffic, the timer's granularity: with 16 KiB, 1 Gbit/s loses a quarter
# and 100 Mbit/s nothing. A larger bucket fills while a rank computes, so that its next message
# arrives too early: 128 KiB are 10 ms at 100 Mbit/s.
MIN_BURST_BYTES = 16 * 1024
BURST_S = 1.05e-3
# The longest wait of a frame in the queue; later frames are dropped, as by a full switch port.
QUEUE_S = 50e-3
# Frames that netem can hold: 1 s of full frames at 100 Mbit/s.
NETEM_LIMIT = 10_000


def port_name(index: int) -> str:
    return f"port{index}"


def mac_address(subnet_index: int, index: int) -> str:
    """A locally administered address, unique over all clusters."""
    return f"02:68:{subnet_index:02x}:00:00:{index + 1:02x}"


def shaping_commands(interface: str, node: NodePlan, *, netem: bool) -> list[str]:
    """The `tc` lines that limit and delay the traffic sent from one end of a node's link.

    Args:
        netem: the kernel delays; else the relay does, and only the rate is set.
    """
    delayed = netem and node.latency_s > 0
    delay = f"netem delay {node.latency_s * 1e6:.0f}us limit {NETEM_LIMIT}"
    if node.bandwidth_bytes_per_s is None:
        return [f"qdisc add dev {interface} root {delay}"] if delayed else []
    rate = node.bandwidth_bytes_per_s
    lines = [
        f"qdisc add dev {interface} root handle 1: tbf rate {rate * 8:.0f}bit "
        f"burst {max(MIN_BURST_BYTES, round(rate * BURST_S))} latency {QUEUE_S * 1e3:.0f}ms"
    ]
    if delayed:
        lines.append(f"qdisc add dev {interface} parent 1:1 handle 10: {delay}")
    return lines


def batch(tool: str, namespace: Path, lines: list[str]) -> None:
    """Run `ip` or `tc` lines in a network namespace.

    Raises:
        EnvironmentSetupError: a line failed; has the tool's message.
    """
    if lines:
        run([*in_network(namespace), tool, "-batch", "-"], stdin="\n".join(lines) + "\n")


def has_netem(namespace: Path) -> bool:
    """Whether this kernel has netem, by a trial on the namespace's idle loopback."""
    tc = [*in_network(namespace), "tc", "qdisc"]
    try:
        run([*tc, "add", "dev", "lo", "root", "netem", "delay", "1us"])
        run([*tc, "del", "dev", "lo", "root"])
    except EnvironmentSetupError:
        return False
    return True


def build_switch(namespace: Path) -> None:
    """Make the switch in its namespace, which must exist."""
    batch(
        "ip",
        namespace,
        [
            f"link add {SWITCH} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {SWITCH} addrgenmode none",
            f"link set {SWITCH} up",
        ],
    )


def build_pairs(switch: Path, node_namespaces: dict[int, Path]) -> None:
    """Make veth pairs for these nodes, by position; the others use the relay's taps."""
    lines = [
        f"link add {port_name(i)} type veth peer name {NODE_INTERFACE} netns {path}"
        for i, path in node_namespaces.items()
    ]
    batch("ip", switch, lines)


def configure(plan: ClusterPlan, switch: Path, node_namespaces: list[Path], *, netem: bool) -> None:
    """Set addresses and rates of all links, whose interfaces must exist."""
    ports: list[str] = []
    shaping: list[str] = []
    for index, (node, path) in enumerate(zip(plan.nodes, node_namespaces, strict=True)):
        port, own = port_name(index), NODE_INTERFACE
        ports += [f"link set {port} {word}" for word in ("addrgenmode none", f"master {SWITCH} up")]
        shaping += shaping_commands(port, node, netem=netem)
        address = [
            "link set lo up",
            f"link set {own} addrgenmode none",
            f"link set {own} address {mac_address(plan.subnet_index, index)}",
            f"addr add {node.address}/24 dev {own}",
            f"link set {own} up",
        ]
        batch("ip", path, address)
        batch("tc", path, shaping_commands(own, node, netem=netem))
    batch("ip", switch, ports)
    batch("tc", switch, shaping)


def set_link(switch: Path, index: int, *, up: bool) -> None:
    """Set a node's link up or down at the switch."""
    batch("ip", switch, [f"link set {port_name(index)} {'up' if up else 'down'}"])
