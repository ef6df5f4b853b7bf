"""`python -m harness.plan advise`: flags, files in, words out."""

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from harness.domain.checkpoints import MOST_OF_STAGE
from harness.domain.cluster import CLUSTER_FILE
from harness.domain.fingerprint import fingerprint
from harness.domain.profile import OPTIMIZER_STEPS, default_profile, graph_beside
from harness.errors import ConfigError
from harness.measure.derive.noise import NoiseScale
from harness.measure.store import write_atomically
from harness.plan.advise.advice import Advice, Adviser
from harness.plan.advise.batches import compare_batches, measured_noise
from harness.plan.advise.measured import known_plans, uncertainty_of
from harness.plan.advise.prices import Prices, find_prices, load_prices
from harness.plan.advise.pricing import AdviceRequest, Priced
from harness.plan.advise.words import advice_lines, advice_object, are_first, local_ranks
from harness.plan.cli import check_output, planned_for, request_from
from harness.plan.costs import FAMILIES, PlanRequest
from harness.plan.flags import MOMENTUM, add_cluster, add_model, add_optimizer, flag_of, size_flags
from harness.plan.notes import notes_of, print_notes
from harness.plan.report import ProgressLine

_EXAMPLES = """\
examples:
  python -m harness.plan advise results/ --model vgg16 --batch-size 160
  python -m harness.plan advise --profile vgg16.json --cluster cluster.json --per-device-batch 32 \\
      --strategies ddp pipeline --prices hosts/tesla.toml
"""

_SIMPLE = {
    "single": "single",
    "ddp": "ddp",
    "ddp by speed": "ddp --balance speed",
    "tensor parallel": "tensor",
    "hybrid": "hybrid",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = (
        "Say which machines to use for a model, with which strategy, what adding other machines "
        "would cost, what other hardware would gain, and which batch fits."
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "results",
        nargs="?",
        type=Path,
        metavar="RESULTS",
        help="results directory: gives cluster.json, the profile, and the errors of earlier "
        "predictions",
    )
    add_model(parser)
    parser.add_argument(
        "--per-device-batch",
        type=int,
        metavar="B",
        help="samples on each device, in place of a global batch that all sets share",
    )
    add_cluster(parser)
    how = parser.add_argument_group("advice")
    how.add_argument(
        "--strategies",
        nargs="+",
        default=list(FAMILIES),
        metavar="S",
        help=f"strategies that may be used (default: {' '.join(FAMILIES)})",
    )
    add_optimizer(how, "sgd")
    how.add_argument(
        "--no-overlap",
        action="store_true",
        help="gradients are synchronised after the backward pass, as by DeepSpeed with "
        "overlap_comm off",
    )
    how.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help="watts and prices of the nodes (default: the file in hosts/ that names these nodes)",
    )
    how.add_argument(
        "--search-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="processor seconds for all predictions and searches (default: %(default)s)",
    )
    how.add_argument(
        "--noise-scale",
        type=float,
        metavar="SAMPLES",
        help="gradient noise scale, to compare batches by their time to the same loss (default: "
        "that of the newest train --noise-steps in RESULTS)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument(
        "--output", type=Path, metavar="FILE", help="write the best set's strategy here"
    )
    parser.set_defaults(cost="simulator", search_budget=None, start=None, shard_state=None, seed=0)


def run(args: argparse.Namespace) -> None:
    """Print which machines to use.

    Raises:
        HarnessError: a file is missing or malformed, flags contradict each other, or the model fits
            nowhere.
    """
    check_output(args.output)
    _find_files(args)
    _check(args)
    request = request_from(args)
    names = [node.name for node in request.cluster.nodes]
    prices = find_prices(names) if args.prices is None else _given_prices(args.prices, names)
    line = ProgressLine()
    try:
        found = Adviser(
            _advice_request(args, request),
            request.cluster,
            seconds=args.search_seconds,
            progress=lambda done, of: line.show(f"{done} of {of} sets of machines priced"),
        ).advise()
    finally:
        line.clear()
    uncertainty = uncertainty_of(args.results, request.cluster)
    advice = replace(found, uncertainty=uncertainty, prices=prices)
    if args.output is not None:  # for a launch on the best set's machines alone
        graph, profile = request.model()
        made_for = fingerprint(graph, advice.best.cluster, profile)
        strategy = msgspec.structs.replace(advice.best.strategy, made_for=made_for)
        write_atomically(args.output, planned_for(args, strategy).to_json())
    graph, profile = advice.request.graph, advice.request.profile
    noise = _noise_scale(args, graph.name)
    batches = None if noise is None else compare_batches(advice, noise)
    strategy = advice.best.strategy
    print_notes(notes_of(graph, profile, request.cluster, strategy, is_searched=False))
    if args.json:
        print(msgspec.json.encode(advice_object(advice, batches)).decode())
        return
    sizes = "" if args.model else " (add the model's size flags, if any)"
    lines = advice_lines(advice, batches)
    print(*lines, f"train it{sizes}: {_train_command(args, advice)}", sep="\n")


def _noise_scale(args: argparse.Namespace, model: str) -> NoiseScale | None:
    given: float | None = args.noise_scale
    if given is None:
        return measured_noise(args.results, model)
    return NoiseScale(n_samples=given, low=given, high=given)


def _given_prices(path: Path, names: Sequence[str]) -> Prices:
    prices = load_prices(path)
    if not set(names) & set(prices.nodes):
        raise ConfigError(
            f"{path} has prices of {', '.join(prices.nodes) or 'no node'}, the cluster has the "
            f"nodes {', '.join(names)}: name them so"
        )
    return prices


def _find_files(args: argparse.Namespace) -> None:
    """Fill in the files of a results directory, where no flag names others."""
    results: Path | None = args.results
    if results is None:
        return
    if args.cluster is None and args.topology is None:
        args.cluster = results / CLUSTER_FILE
    if args.profile is not None or args.rates is not None:
        return
    if args.model is None and args.graph is None:
        paths = sorted(results.glob("profile-*.json"))
        found = [path for path in paths if not path.name.endswith(".graph.json")]
        if not results.is_dir():
            raise ConfigError(f"{results} is not a directory: give the results of ./entry.sh")
        if len(found) != 1:
            names = ", ".join(path.stem.removeprefix("profile-") for path in found) or "none"
            raise ConfigError(f"{results} has profiles of {names}: name one with --model")
        args.profile = found[0]
    elif args.model is not None and not size_flags(args):
        path = default_profile(args.model, args.dtype or "fp32", results)
        if path.is_file() and graph_beside(path).is_file():
            args.profile, args.model = path, None


def _check(args: argparse.Namespace) -> None:
    if args.batch_size is not None and args.per_device_batch is not None:
        raise ConfigError(
            "--batch-size is the global batch and --per-device-batch the batch of each device: "
            "give one of them"
        )
    if args.per_device_batch is not None and args.per_device_batch < 1:
        raise ConfigError(f"--per-device-batch {args.per_device_batch} must be above 0")
    if args.noise_scale is not None and not 0 < args.noise_scale < math.inf:
        raise ConfigError(f"--noise-scale {args.noise_scale:g} must be a number of samples above 0")
    unknown = [name for name in args.strategies if name not in FAMILIES]
    if unknown:
        raise ConfigError(f"--strategies {unknown[0]} is unknown: use {', '.join(FAMILIES)}")
    if args.model is not None and args.batch_size is None:
        args.batch_size = args.per_device_batch  # to capture the model with


def _advice_request(args: argparse.Namespace, request: PlanRequest) -> AdviceRequest:
    graph, profile = request.model()
    batch = request.batch
    if batch is None and args.per_device_batch is None:
        raise ConfigError(f"graph {graph.name!r} has no batch: give --batch-size")
    if graph.batch is None:
        graph = msgspec.structs.replace(graph, batch=batch or args.per_device_batch)
    optimizer = request.optimizer or "momentum"
    found = AdviceRequest(
        graph=graph,
        profile=profile,
        batch=None if args.per_device_batch is not None else batch,
        per_device_batch=args.per_device_batch,
        memory_bytes=request.memory_bytes,
        families=tuple(args.strategies),
        optimizer=optimizer,
        overlap=not args.no_overlap,
        reduce_dtype=request.reduce_dtype,
        known=known_plans(args.results, graph, request.cluster, profile, optimizer),
    )
    is_as_run = found.overlap and found.reduce_dtype == "fp32"
    return found if is_as_run else found.untried()


def _train_command(args: argparse.Namespace, advice: Advice) -> str:
    """The command that trains by the best strategy on its machines alone."""
    best = advice.best
    hosts = ",".join(f"{node.name}:{len(node.devices)}" for node in best.cluster.nodes)
    is_here = best.node_names == [advice.cluster.nodes[0].name]  # where commands are given
    words = [] if is_here and best.cluster.n_devices == 1 else [
        "mpirun", "-np", str(best.cluster.n_devices), "--host", hosts
    ]  # fmt: skip
    if not are_first(best, advice):  # within one node
        (ranks,) = local_ranks(best, advice)
        visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, ranks))}"
        words = [*words[:1], "-x", visible, *words[1:]] if words else [visible]
    words += ["./entry.sh", "train", "--model", advice.request.graph.name]
    words += [str(word) for pair in size_flags(args).items() for word in pair]
    words += ["--batch-size", str(best.batch), *OPTIMIZER_STEPS[advice.request.optimizer].flags]
    has_momentum = args.momentum not in (None, 0, MOMENTUM)
    words += ["--momentum", f"{args.momentum:g}"] if has_momentum else []
    for flag in ("dtype", "reduce_dtype"):
        words += [flag_of(flag), value] if (value := getattr(args, flag)) else []
    if args.results not in (None, Path("results")):  # where train finds the measurements
        words += ["--results", str(args.results)]
    return shlex.join([*words, "--strategy", *_strategy_words(args, best)])


def _strategy_words(args: argparse.Namespace, best: Priced) -> list[str]:
    strategy, stages = best.strategy, best.strategy.stages
    saved = ["--recompute"] if any(stage.recompute for stage in stages) else []
    if len(stages) > 1 and any(stage.segments > 1 for stage in stages):
        saved += ["--recompute-segments", str(MOST_OF_STAGE)]
    if strategy.shard_state != "none":
        saved += ["--shard-state", strategy.shard_state]
    if best.name in _SIMPLE:
        return [*_SIMPLE[best.name].split(), *saved]
    if args.output is not None:
        return [str(args.output)]
    if best.family not in ("single", "pipeline"):
        return ["searched", *(["--memory", args.memory] if args.memory else [])]
    flow = ["--schedule", strategy.schedule, "--microbatches", str(strategy.n_microbatches)]
    return ["tp=1" if best.family == "single" else "pipeline", *flow, *saved]
