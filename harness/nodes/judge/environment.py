"""Verdicts on the software: Python, packages, MPI and harness must be the same on all hosts."""

from __future__ import annotations

from collections import Counter

from harness.nodes.facts import Facts
from harness.nodes.findings import Judgement, critical, ok, unknown, warn
from harness.nodes.survey import HostReport, Survey

_REQUIRED = {"torch": "torch", "mpi4py": "mpi4py"}


def judge_environment(report: HostReport, survey: Survey) -> list[Judgement]:
    """The environment exists at the common path, is complete, and equals that of other hosts."""
    facts, path = report.facts, survey.order.env_dir
    remedy = f"bash setup/sync_env.sh {survey.order.hostfile}"
    if facts.python is None and facts.python_error:
        return [critical(f"its Python fails: {facts.python_error}", remedy)]
    if not facts.environment:
        if not any(other.facts.environment for other in survey.answered):
            remedy = f"bash setup/install.sh, then {remedy}"
        system = f" (its own Python is {facts.python.version})" if facts.python else ""
        return [critical(f"no environment at {path}{system}", remedy)]
    if facts.python is None:
        return [unknown("its Python did not answer", f"ssh {report.name} {path}/bin/python -V")]
    missing = [name for name in _REQUIRED if not facts.has_package(name)]
    if not facts.mpi:
        missing.append("mpirun")
    if missing:
        return [critical(f"lacks {', '.join(missing)}", remedy)]
    return _judge_versions(report, survey, remedy) or [ok(_describe(facts))]


def versions(facts: Facts) -> dict[str, str]:
    """Versions that must be equal on all hosts, by name; unknown ones are left out."""
    python = facts.python
    if python is None or not facts.environment:
        return {}
    found = {
        "Python": ".".join(python.version.split(".")[:2]),
        # Hosts with and without GPUs work together: `+cpu` and `+cu130` of one release match.
        "torch": python.packages.get("torch", "").split("+")[0],
        "mpi4py": python.packages.get("mpi4py", ""),
        "MPI": facts.mpi,
        "harness": python.packages.get("training-harness", ""),
        "harness source": python.harness_hash or "",
    }
    return {name: value for name, value in found.items() if value}


def _judge_versions(report: HostReport, survey: Survey, remedy: str) -> list[Judgement]:
    """Compare with the version that most hosts have, or in a tie the first host's."""
    verdicts = []
    for name, value in versions(report.facts).items():
        values = [v[name] for o in survey.answered if name in (v := versions(o.facts))]
        usual, n_usual = Counter(values).most_common(1)[0]
        if value == usual:
            continue
        text = f"{name} {value}, while {n_usual} of {len(values)} hosts have {usual}"
        severe = warn if name == "Python" else critical
        verdicts.append(severe(text, remedy))
    return verdicts


def _describe(facts: Facts) -> str:
    assert facts.python is not None
    packages = facts.python.packages
    source = f" ({facts.python.harness_hash})" if facts.python.harness_hash else ""
    return (
        f"Python {facts.python.version}, torch {packages['torch']}, mpi4py {packages['mpi4py']}, "
        f"{facts.mpi}, harness {packages.get('training-harness', 'not installed')}{source}"
    )
