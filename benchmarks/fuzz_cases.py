"""The readers of the harness, each with valid files to mutate, for `fuzz_readers.py` and tests."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import torch
from safetensors.torch import save

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.hostfile import load_hostfile
from harness.domain.prediction import PREDICTION_FILE
from harness.domain.profile import Profile
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.errors import ConfigError, PlanError
from harness.inputs import decode_text
from harness.measure.derive.prediction import read_prediction
from harness.measure.store import find_runs
from harness.nodes.mpi import explain_mpirun, parse_hello
from harness.nodes.parse import parse_facts
from harness.plan.advise.prices import load_prices
from harness.plan.cli import parse_topology
from harness.plan.costs import COSTS
from harness.plan.estimates import dlrm_graph, estimate_profile, parse_dlrm
from harness.plan.fit import OperatorTimes
from harness.plan.formats.detect import convert, read_strategy_file
from harness.plan.formats.flexflow import parse_console, parse_text, print_console, print_text
from harness.plan.formats.flexflow_protobuf import parse_protobuf, print_protobuf
from harness.plan.formats.pipedream import PipeDreamPlan, parse_graph_txt
from harness.plan.importing.curves import read_collectives
from harness.plan.importing.times import read_layer_times, read_operators
from harness.plan.layouts.degrees import parse_layout
from harness.plan.show import show_file
from harness.plan.validation.command import READERS as PUBLISHED
from harness.plan.validation.command import judge
from harness.plot.imports import ImportFacts, import_logs
from harness.plot.numbers import derive_numbers
from harness.runtime.data.dlrm_hdf5 import DlrmHdf5
from harness.runtime.data.text.formats import _read, _read_sentences
from harness.runtime.data.text.sequences import Vocabulary
from harness.runtime.executor.state.files import load_sharded
from harness.runtime.models.task import DlrmOptions
from harness.runtime.ranks.environment import read_launch
from harness.units import parse_bandwidth, parse_bytes, parse_duration
from harness.virtual import state
from harness.virtual.plan import make_plan
from harness.virtual.state import Saved, State
from harness.workloads.train.requests import REQUEST_FILE, read_request

_ROOT = Path(__file__).resolve().parents[1]
_SEEDS = Path(__file__).resolve().parent / "fuzz_seeds"
_MOST_PREDICTED = 20  # steps of a set, because a prediction takes milliseconds


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        seeds: returns valid files.
        read: reads a file, in a working folder; raises HarnessError.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], object]


@cache
def _graph() -> Graph:
    return Graph.load(_SEEDS / "graph.json")


@cache
def _cluster() -> Cluster:
    return Cluster.load(_SEEDS / "cluster.json")


def _profile(data: bytes, _: Path) -> None:
    profile, graph = Profile.from_json(data), _graph()
    times = OperatorTimes(profile)
    for operator in graph.operators[1:]:
        for kind in profile.device_kinds:
            profile.calibration_of(graph.content_hash(), kind, 10)
            with suppress(PlanError):
                times.lookup(operator, kind)


def _strategy(data: bytes, _: Path) -> None:
    strategy = Strategy.from_json(data)
    validate(strategy, _graph(), _cluster())
    check_fresh(strategy, _graph(), _cluster())


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A reader of bytes, which writes them to a file and passes its path."""

    def read_it(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return read_it


def _text(read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: read(decode_text(data, "text"))


def _any_text(read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    return lambda data, _: read(data.decode(errors="replace"))


def _converted(path: Path) -> None:
    imported = read_strategy_file(path)
    imported.describe()
    to = {"flexflow": "flexflow-text", "pipedream": "pipedream"}.get(imported.format.split()[0])
    convert(imported, to or "harness", batch=None)


def _quantities(text: str) -> None:
    for line in text.splitlines()[:8]:
        value, _, kind = line.rpartition(" ")
        {"bytes": parse_bytes, "rate": parse_bandwidth}.get(kind, parse_duration)(value)


def _flags(text: str) -> None:
    for line in text.splitlines()[:8]:
        flag, *values = line.split(" ")
        if flag == "topology":
            parse_topology(" ".join(values), COSTS["simulator"].most_devices)
        elif flag == "layout":
            parse_layout(" ".join(values))
        elif flag == "dlrm":
            dlrm_graph(parse_dlrm(*[*values, "", "", ""][:3], batch=1024))
        else:
            names = ("bandwidth", "cpu", "memory", "latency")
            make_plan(n_nodes=2, n_cores=2, **dict(zip(names, values, strict=False)))


def _environment(text: str) -> None:
    pairs = (line.partition("=")[::2] for line in text.splitlines() if "\0" not in line)
    read_launch(dict(pairs))


def _settings(path: Path) -> None:
    """Read settings by entry.sh, which refuses by exit code 2 and one line."""
    function = re.search(
        r"^read_settings\(\) \{$.*?^\}$", (_ROOT / "entry.sh").read_text(), re.DOTALL | re.MULTILINE
    )
    assert function is not None
    script = f"set -euo pipefail\n{function[0]}\nread_settings {path}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    if done.returncode == 2:
        raise ConfigError(done.stderr.decode(errors="replace").removesuffix("\n"))
    if done.returncode or done.stderr or done.stdout:
        raise RuntimeError(f"bash ended with {done.returncode}: {done.stderr[-200:]!r}")


def _shard_seeds() -> list[bytes]:
    tensors = {
        "model 0:4,0:2 w": torch.ones(4, 2),
        "optimizer m 0:4,0:2 w": torch.ones(4, 2),
        "optimizer step - w": torch.tensor(3.0),
    }
    state = {
        "n_ranks": 1, "step": 3, "names": {"w": "w"}, "parameters": ["w"], "is_survivors": False,
        "shapes": {"w": [4, 2]}, "trained": ["w"],
    }  # fmt: skip
    return [save(tensors, metadata={"format": "state shards 2", "state": json.dumps(state)})]


def _clicks(path: Path) -> None:
    data = DlrmHdf5(path, DlrmOptions(bottom_mlp=(3, 4), table_rows=(10, 10)))
    data.__getitems__(list(range(min(2, len(data)))))


def _click_seeds() -> list[bytes]:
    file = io.BytesIO()
    with h5py.File(file, "w") as written:
        written["X_int"] = np.ones((6, 3), np.float32)
        written["X_cat"] = np.ones((6, 2), np.int64)
        written["y"] = np.ones(6, np.float32)
    return [file.getvalue()]


def _virtual_seeds() -> list[bytes]:
    plan = make_plan(n_nodes=2, n_cores=2, bandwidth="1gbit", cpu="0.4", latency="1ms")
    with tempfile.TemporaryDirectory() as folder:
        place = State(Path(folder), "virtual")
        place.directory.mkdir()
        state.save(place, Saved(plan=plan, hostfile=Path("h.txt"), project=Path("/p")))
        return [place.plan_file.read_bytes()]


def _run(name: str) -> Callable[[bytes, Path], object]:
    """A reader of one file of a run's directory, with the other files unchanged."""
    sample = _ROOT / "results" / "sample-train-single-r0"

    def read(data: bytes, folder: Path) -> None:
        run = folder / "run"
        run.mkdir(exist_ok=True)
        for path in sample.glob("*"):
            (run / path.name).write_bytes(path.read_bytes())
        (run / name).write_bytes(data)
        for run_dir, header in find_runs(folder)[0]:
            _, problems = derive_numbers(run_dir, header)
            assert not [why for _, why in problems if "cannot be derived" in why]

    return read


def _imported(name: str) -> Callable[[bytes, Path], object]:
    return _file(name, lambda path: import_logs([path], path.parent / "results", ImportFacts()))


def _probe_of_smi(text: str) -> None:
    parse_facts(f"@harness:nvidia_cards\na\n@harness:nvidia_smi\n{text}\n@rc=0\n@harness:end\n")


def _seed(*names: str) -> Callable[[], list[bytes]]:
    return lambda: [(_SEEDS / name).read_bytes() for name in names]


def _sample(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(_ROOT / "results" / "sample-train-single-r0" / name).read_bytes()]


def _literal(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _protobufs() -> list[bytes]:
    entries = parse_console((_SEEDS / "console.txt").read_text())
    return [print_protobuf(entries, "v1"), print_protobuf(entries, "r21")]


def _layer_seconds() -> dict[str, bytes]:
    """What AMP's trials need beside them."""
    file = io.BytesIO()
    np.save(file, np.full(6, 0.01))
    return {"known_cost/gpt2_G4_1.npy": file.getvalue()}


def _sailor_profiles() -> dict[str, bytes]:
    """What Sailor's plans need beside them."""
    layers = ("embedding", "layer", "head")
    shape = {"params_bytes": 4000, "act_output_bytes": 400, "act_mem_bytes": 800}
    fits = {"A": {"1": [[1.0], 1e10], "2": [[1.0], 1e11], "4": [[1.0], 2e10]}}
    values = {
        "llm_info.json": {"M": {"1": dict.fromkeys(layers, shape)}},
        "profiles/M/A/profile.json": {"1": {"4": dict.fromkeys(layers, (0.01, 0.02, 0.001))}},
        "providers/intra_node_bandwidths.json": fits,
        "providers/network_coeffs_all_homo.json": {"inter": fits},
    }
    return {name: json.dumps(value).encode() for name, value in values.items()}


def _published(
    name: str, seed: str, place: str = "", beside: Callable[[], dict[str, bytes]] = dict
) -> Reader:
    """The reader of a published set, of which one file is given, and predictions of its steps.

    Args:
        place: directory of the file in the set.
        beside: the set's other files.
    """

    def read(data: bytes, folder: Path) -> None:
        for where, content in {**beside(), f"{place}/{seed}".lstrip("/"): data}.items():
            path = folder / where
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if PUBLISHED[name].matches(folder):
            published = PUBLISHED[name].read(folder)
            judge(name, replace(published, points=published.points[:_MOST_PREDICTED]))

    return Reader(_seed(seed), read)


READERS: dict[str, Reader] = {
    "cluster": Reader(
        _seed("cluster.json"),
        lambda d, _: estimate_profile(_graph(), Cluster.from_json(d)),
    ),
    "graph": Reader(
        _seed("graph.json"),
        lambda d, _: estimate_profile(Graph.from_json(d), _cluster()),
    ),
    "profile": Reader(_seed("profile.json"), _profile),
    "strategy": Reader(_seed("strategy.json"), _strategy),
    "prediction": Reader(
        _seed("prediction.json"),
        _file(PREDICTION_FILE, lambda path: read_prediction(path.parent)),
    ),
    "graph_txt": Reader(_seed("graph.txt"), _text(lambda t: parse_graph_txt(t, name="t"))),
    "flexflow_text": Reader(_seed("flexflow.txt"), _text(lambda t: print_text(parse_text(t)))),
    "flexflow_console": Reader(
        _seed("console.txt"), _text(lambda t: print_console(parse_console(t)))
    ),
    "flexflow_protobuf": Reader(
        _protobufs, lambda data, _: print_protobuf(*parse_protobuf(data)[::-1])
    ),
    "pipedream_plan": Reader(_seed("plan.json"), lambda d, _: PipeDreamPlan.from_json(d)),
    "strategy_file": Reader(
        lambda: [*_seed("flexflow.txt", "console.txt", "plan.json")(), *_protobufs()],
        _file("strategy", _converted),
    ),
    "show": Reader(
        _seed("cluster.json", "graph.json", "profile.json", "strategy.json", "graph.txt"),
        _file("shown", show_file),
    ),
    "quantities": Reader(_literal("16MiB bytes\n1.25GB/s rate\n500us s"), _any_text(_quantities)),
    "flags": Reader(
        _literal(
            "topology 4x4",
            "layout tp=2,dp=4,cuts=6-12,shares=2-1",
            "dlrm 8x100x64 64-512-64 576-1024-1",
            "v 1gbit 0.4,1 2GiB 500us",
        ),
        _any_text(_flags),
    ),
    "environment": Reader(
        _literal(
            "RANK=0\nWORLD_SIZE=2\nMASTER_ADDR=a\nMASTER_PORT=29500\nLOCAL_RANK=0",
            "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0\n"
            "OMPI_COMM_WORLD_LOCAL_SIZE=1",
            "SLURM_STEP_ID=0\nSLURM_PROCID=1\nSLURM_NTASKS=2\nSLURM_STEP_TASKS_PER_NODE=2(x1)",
        ),
        _any_text(_environment),
    ),
    "settings": Reader(_seed("cluster.env"), _file("cluster.env", _settings)),
    "hostfile": Reader(_seed("hosts.txt"), _file("hosts.txt", load_hostfile)),
    "probe": Reader(_seed("probe.txt"), _any_text(parse_facts)),
    "nvidia_smi": Reader(_seed("nvidia_smi.xml"), _any_text(_probe_of_smi)),
    "mpirun": Reader(
        _literal('@harness:hello {"names": ["a", "b"]}\n', "ssh: connect to host a: refused\n"),
        _any_text(lambda text: (parse_hello(text), explain_mpirun(text))),
    ),
    "state_shards": Reader(
        _shard_seeds, _file("shard0.safetensors", lambda path: load_sharded(path.parent))
    ),
    "clicks": Reader(_click_seeds, _file("clicks.h5", _clicks)),
    "virtual_state": Reader(
        _virtual_seeds,
        _file("cluster.json", lambda path: state.load(State(path.parent.parent, path.parent.name))),
    ),
    "run_header": Reader(_sample("run.json"), _run("run.json")),
    "records": Reader(_sample("rank0.jsonl"), _run("rank0.jsonl")),
    "layer_times": Reader(
        _seed("layers.csv"), _file("l.csv", lambda path: read_layer_times(path, device_kind="a"))
    ),
    "operator_times": Reader(
        _seed("operators.csv"),
        _file("o.csv", lambda path: read_operators(path, device_kind="a", batch=8, n_layers=2)),
    ),
    "collectives": Reader(
        _seed("nccl_tests.txt", "curve.csv"), _file("all_reduce_2gpus.csv", read_collectives)
    ),
    "prices": Reader(_seed("prices.toml"), _file("prices.toml", load_prices)),
    "control": Reader(
        _seed("change.request.json"), _file(REQUEST_FILE, lambda path: read_request(path.parent))
    ),
    "questions": Reader(
        _seed("squad.json"), _file("train-v1.1.json", lambda path: list(_read(path)))
    ),
    "sentences": Reader(_seed("sst2.tsv"), _file("train.tsv", _read_sentences)),
    "vocabulary": Reader(_seed("vocab.txt"), _file("vocab.txt", Vocabulary)),
    "epoch_csv": Reader(_seed("epochs_2gpu.csv"), _imported("epochs_2gpu.csv")),
    "deepspeed_log": Reader(_seed("deepspeed.log"), _imported("deepspeed_2gpu.log")),
    "torchtitan_log": Reader(_seed("torchtitan.log"), _imported("titan.log")),
    "torchgpipe": _published("torchgpipe", "gpipe_points.csv"),
    "pipetransformer": _published("pipetransformer", "pipeline_rates.csv"),
    "pollux": _published("pollux", "placements.csv", "cifar10"),
    "vtrain": _published("vtrain", "iterations.csv"),
    "scalable_vit_dt": _published("scalable_vit_dt", "metrics.csv", "2_GPUs/p2_b16_e2"),
    "amp": _published("amp", "trials.csv", beside=_layer_seconds),
    "sailor": _published("sailor", "plans.csv", beside=_sailor_profiles),
    "neusight": _published("neusight", "bert_large-train-512-16.json", "label/Tesla_T4"),
}
