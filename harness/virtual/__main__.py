"""The virtual cluster's command line: `bash setup/virtual_cluster.sh --help`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import run_command
from harness.inputs import CommandParser
from harness.units import format_bandwidth, format_bytes, format_duration
from harness.virtual import lifecycle, limits, node, plan, state
from harness.virtual.state import Saved, State
from harness.virtual.system import check_rights, check_tools

_EPILOG = """examples:
  up --nodes 5 --bandwidth 1gbit --cpu 0.36        five equal nodes
  up --nodes 3 --cpu 0.8,0.4,0.2 --bandwidth 1gbit,1gbit,100mbit
  up --nodes 2 --name second --latency 500us       a second cluster
  run -- mpirun -np 5 --hostfile hosts/virtual.txt hostname
  exec node3 -- ip address
  fault node3 --kind off                           switch it off; --kind heal starts it again
  down

Nodes see this machine's files and environment at the same paths. hosts/virtual.txt is the hostfile
(hosts/virtual-NAME.txt for --name NAME); hosts/virtual.json describes the cluster.
Needs root. Exit codes: 0 done, 1 status found a node that is not up, 2 refused, with a remedy;
exec and run return the command's exit code."""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="setup/virtual_cluster.sh",
        description="A virtual cluster on this machine. Each node has its own host name, "
        "address, sshd, shaped link, CPU quota and memory limit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = CommandParser(add_help=False)
    common.add_argument(
        "--name", default=plan.DEFAULT_NAME, help="name of the cluster (default: virtual)"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands.add_parser("up", parents=[common], help="build a cluster"))
    commands.add_parser("down", parents=[common], help="remove a cluster and its processes")
    status = commands.add_parser("status", parents=[common], help="show the nodes and their state")
    status.add_argument("--json", action="store_true", help="print JSON")
    execute = commands.add_parser("exec", parents=[common], help="run a command on a node")
    execute.add_argument("node", help="name or position of a node")
    execute.add_argument("argv", nargs="+", metavar="CMD", help="the command, after --")
    run = commands.add_parser("run", parents=[common], help="run a command on the first node")
    run.add_argument("argv", nargs="+", metavar="CMD", help="the command, after --")
    fault = commands.add_parser("fault", parents=[common], help="inject a fault, or heal it")
    fault.add_argument("node", help="name or position of a node")
    fault.add_argument(
        "--kind",
        choices=lifecycle.KINDS,
        required=True,
        help="off: link down, all processes ended; wrong-key: all processes ended, then an sshd "
        "with another host key; hang: sshd stopped; cut: link down; freeze: all processes stopped; "
        "slow: a third of the CPU quota; heal: as built",
    )
    return parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    each = "one value for all nodes, or a comma-separated list with one per node"
    parser.add_argument("--nodes", type=int, default=5, help="number of nodes (default: 5)")
    parser.add_argument("--bandwidth", help=f"of a link, per direction, like 1gbit; {each}")
    parser.add_argument("--latency", help=f"of a link, one way, like 500us; {each}")
    parser.add_argument("--cpu", help=f"CPU quota of a node in cores, like 0.4; {each}")
    parser.add_argument("--memory", help=f"memory limit of a node, like 2GiB; {each}")
    parser.add_argument("--replace", action="store_true", help="remove one of this name first")
    parser.add_argument("--hosts-dir", type=Path, help="folder of the hostfile (default: hosts/)")


def _project() -> Path:
    return Path(__file__).resolve().parents[2]


def _hosts_dir(arguments: argparse.Namespace) -> Path:
    chosen: Path | None = getattr(arguments, "hosts_dir", None)
    return (chosen or _project() / "hosts").resolve()


def _up(place: State, arguments: argparse.Namespace) -> int:
    hostfile = plan.hostfile_path(_hosts_dir(arguments), place.name)
    n_cores = os.cpu_count() or 1
    check_tools()
    check_rights()
    with state.locked(place.root):
        if arguments.replace:
            lifecycle.down(place, hostfile)
        made = plan.make_plan(
            name=place.name,
            n_nodes=arguments.nodes,
            n_cores=n_cores,
            bandwidth=arguments.bandwidth,
            cpu=arguments.cpu,
            memory=arguments.memory,
            latency=arguments.latency,
            taken_subnets=state.taken_subnets(place.root),
        )
        lifecycle.up(place, Saved(plan=made, hostfile=hostfile, project=_project()))
    quota = sum(one.cpu or 0.0 for one in made.nodes)
    if quota > 0.9 * n_cores:
        # Beyond 90 % the nodes compete for cores, and step times vary.
        print(
            f"note: the nodes' --cpu sum to {quota:.2g} of {n_cores} cores: timings hold below 90%"
        )
    print(f"{len(made.nodes)} nodes up on {made.subnet}: {hostfile}")
    return 0


def _down(place: State, arguments: argparse.Namespace) -> int:
    hostfile = plan.hostfile_path(_hosts_dir(arguments), place.name)
    with state.locked(place.root):
        existed = lifecycle.down(place, hostfile)
    print(f"cluster {place.name} {'is down' if existed else 'was not up: nothing to do'}")
    return 0


def _status(place: State, arguments: argparse.Namespace) -> int:
    rows = lifecycle.status(place)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        cells = [_cells(row) for row in rows]
        widths = {key: max(len(key), *(len(row[key]) for row in cells)) for key in cells[0]}
        for line in [{key: key for key in widths}, *cells]:
            print("  ".join(line[key].ljust(width) for key, width in widths.items()).rstrip())
    return 0 if all(row["condition"] == "up" for row in rows) else 1


def _cells(row: dict[str, Any]) -> dict[str, str]:
    def shown(value: float | None, text: str) -> str:
        return text if value is not None else "unlimited"

    bandwidth, memory, cpu = (row[key] for key in ("bandwidth_bytes_per_s", "memory_bytes", "cpu"))
    return {
        "node": row["name"],
        "address": row["address"],
        "link each way": shown(bandwidth, format_bandwidth(bandwidth or 0)),
        "link latency": format_duration(row["latency_s"]) if row["latency_s"] else "-",
        "cores": shown(cpu, f"{cpu}"),
        "memory": shown(memory, format_bytes(memory or 0)),
        "out of memory": str(row["n_oom_kills"]),
        "condition": row["condition"],
    }


def _execute(place: State, arguments: argparse.Namespace) -> int:
    """Replace this process by the command, which keeps terminal and working directory."""
    saved = state.load(place)
    name = saved.plan.node(getattr(arguments, "node", "0")).name
    argv = node.command_on(place, name, arguments.argv, Path.cwd())
    limits.join(limits.join_files(place.name, name))
    variables = node.environment(saved.project, os.environ.get("PATH", node.SYSTEM_PATH))
    os.execvpe(argv[0], argv, os.environ | variables)


def _fault(place: State, arguments: argparse.Namespace) -> int:
    name = state.load(place).plan.node(arguments.node).name
    with state.locked(place.root):
        lifecycle.inject(place, name, arguments.kind)
    print(f"{name}: {lifecycle.condition(place, name)}")
    return 0


_COMMANDS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "exec": _execute,
    "run": _execute,
    "fault": _fault,
}


def main(argv: Sequence[str]) -> int:
    def run() -> int:
        arguments = _parser().parse_args(argv)
        place = State(state.state_root(), plan.check_name(arguments.name))
        return _COMMANDS[arguments.command](place, arguments)

    return run_command("error", run)


if __name__ == "__main__":
    # A user's PATH may lack the directories of ip, tc and sshd.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    sys.exit(main(sys.argv[1:]))
