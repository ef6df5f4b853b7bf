"""Run the benchmarks of the planner, section by section.

    python benchmarks/planner.py [--quick] [--json] [--pipedream CLONE] [SECTION ...]

A section is a program planner_<section>.py in this folder, which also runs by itself. Each section
runs in a separate process, so that they share neither compiled code nor peak memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def sections() -> dict[str, Path]:
    """Programs by section; excludes shared modules, which have no main."""
    return {
        path.stem.removeprefix("planner_"): path
        for path in sorted(HERE.glob("planner_*.py"))
        if "def main(" in path.read_text()
    }


def main() -> int:
    found = sections()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", nargs="*", help=f"default: all of {', '.join(found)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and seeds")
    parser.add_argument("--json", action="store_true", help="one object per comparison")
    parser.add_argument("--pipedream", type=Path, help="a clone of PipeDream, to time it too")
    args = parser.parse_args()
    unknown = [name for name in args.section if name not in found]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}: use {', '.join(found)}")
    flags = [flag for flag in ("--quick", "--json") if getattr(args, flag[2:])]
    # So that a clone works without installation.
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"}
    failed = []
    for name in args.section or found:
        print(f"\n=== {name}: {found[name].name} ===", file=sys.stderr, flush=True)
        own = list(flags)
        if name == "pipedream" and args.pipedream is not None:
            own += ["--pipedream", str(args.pipedream)]
        done = subprocess.run([sys.executable, str(found[name]), *own], env=env, check=False)
        if done.returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
