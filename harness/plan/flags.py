"""The flags that commands of `python -m harness.plan` share."""

import argparse
from pathlib import Path
from typing import get_args

from harness.domain.profile import DTYPE_NAMES, OPTIMIZER_STEPS
from harness.domain.reduce_dtype import ReduceDtype
from harness.errors import ConfigError
from harness.inputs import MOST_COUNT, shorten
from harness.units import parse_bandwidth

SHARD_STATE = (
    "state that is sharded, so that each of the n devices that hold a weight keeps 1/n of it. "
    "optimizer: the optimizer's state (ZeRO-1). gradients: gradients, too (ZeRO-2, SHARD_GRAD_OP). "
    "parameters: parameters, too (ZeRO-3, FULL_SHARD). With _in_node, n counts the devices of one "
    "node (HSDP, HYBRID_SHARD)"
)
MOMENTUM = 0.9  # the default of train
DLRM_BOTTOM, DLRM_TOP = "64-512-512-64", "576-1024-1024-1024-1"

# By the kind of inputs of the models that have them.
MODEL_SIZES = {
    "images": {"image_size": "height and width of the images in pixels"},
    "text": {
        "sequence_length": "tokens of a sample",
        "vocabulary_size": "number of tokens",
        "n_layers": "layers (t5, nmt: of encoder and of decoder each)",
        "width": "features of a token between layers",
        "n_heads": "heads of an attention",
        "n_groups": "heads of keys and values",
        "mlp_width": "features inside an MLP",
        "n_experts": "llama: experts of the mixture that replaces each MLP",
        "n_experts_per_token": "llama: experts that compute a token",
    },
}


def size_flags(args: argparse.Namespace) -> dict[str, int]:
    """The given sizes of the model, by flag."""
    return {flag_of(name): size for name, size in _given(args).items()}


def model_sizes(args: argparse.Namespace, kind: str) -> dict[str, int]:
    """The given sizes of a model with this kind of inputs, by name.

    Raises:
        ConfigError: models of this kind have no such size, or it is not above 0.
    """
    found = _given(args)
    for name, size in found.items():
        own = next(own for own, names in MODEL_SIZES.items() if name in names)
        if own != kind:
            raise ConfigError(
                f"{flag_of(name)} is for built-in models of {own}, not for --model {args.model}: "
                "drop it, or change --model"
            )
        if not 0 < size <= MOST_COUNT:
            raise ConfigError(f"{flag_of(name)} {shorten(size)} must be above 0, and at most 2**53")
    return found


def _given(args: argparse.Namespace) -> dict[str, int]:
    names = [name for own in MODEL_SIZES.values() for name in own]
    return {name: size for name in names if (size := getattr(args, name)) is not None}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a model and its times."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        help="a built-in model, or your own as package.module:factory, to capture; times come from "
        "--profile, else from results/profile-MODEL.json, else they are estimated",
    )
    sizes = parser.add_argument_group(
        "sizes of a built-in --model", "default: the model's own, as for ./entry.sh"
    )
    for name, words in (one for own in MODEL_SIZES.values() for one in own.items()):
        sizes.add_argument(flag_of(name), type=int, metavar="N", help=words)
    model.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="times of operators: a profile of the harness, or a graph.txt of PipeDream",
    )
    model.add_argument(
        "--graph",
        type=Path,
        metavar="FILE",
        help="graph of a harness profile (default: the .graph.json beside the profile)",
    )
    model.add_argument(
        "--rates",
        metavar="FLOPS,BYTES",
        help="FLOP/s and memory bytes/s of devices that nobody has profiled, such as 9.3e12,549e9; "
        "times are estimated by this roofline, in place of --profile",
    )
    model.add_argument(
        "--dlrm-tables",
        metavar="NxROWSxCOLUMNS",
        help="plan a DLRM of these tables, such as 8x1000000x64, without capturing a model",
    )
    model.add_argument(
        "--dlrm-bottom-mlp",
        metavar="WIDTHS",
        help="widths of the bottom MLP of --dlrm-tables, from the dense features to the tables' "
        f"columns (default: {DLRM_BOTTOM})",
    )
    model.add_argument(
        "--dlrm-top-mlp",
        metavar="WIDTHS",
        help="widths of the top MLP of --dlrm-tables, from all columns and the bottom MLP's output "
        f"on (default: {DLRM_TOP})",
    )
    model.add_argument(
        "--dtype",
        choices=list(DTYPE_NAMES),
        help="dtype of training, which selects times of the profile (default: the profile's)",
    )
    model.add_argument(
        "--reduce-dtype",
        choices=get_args(ReduceDtype),
        help="dtype in which gradients are summed over devices (default: fp32)",
    )
    model.add_argument("--batch-size", type=int, metavar="B", help="global batch, samples")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("cluster")
    where.add_argument("--cluster", type=Path, metavar="FILE", help="nodes, devices and links")
    where.add_argument("--topology", metavar="NODESxDEVICES", help="equal devices, such as 4x4")
    where.add_argument(
        "--bandwidth",
        metavar="INSIDE[,BETWEEN]",
        help="bandwidth of the links of --topology inside and between nodes: bytes/s "
        "(1e10,1.25e9) or bits/s (10gbit). All devices of a node share BETWEEN: add up the node's "
        "NICs. These links have no latency",
    )
    where.add_argument(
        "--memory",
        metavar="BYTES",
        help="limit per device, such as 12GB (default: the cluster file's; --topology needs one, "
        "but for a published cost)",
    )
    where.add_argument(
        "--device-kind",
        metavar="KIND",
        help="kind of the devices of --topology (default: the profile's first kind), or of the "
        "times in a graph.txt (default: the cluster's first kind)",
    )


def bandwidths_of(text: str) -> tuple[float, float | None]:
    """Bytes/s of `--bandwidth INSIDE[,BETWEEN]`.

    Raises:
        ConfigError: not of that form.
    """
    values = [parse_bandwidth(part) for part in text.split(",")]
    if len(values) > 2 or not all(value > 0 for value in values):
        raise ConfigError(
            f"--bandwidth {shorten(text)} is not INSIDE[,BETWEEN] above 0: write 1e10,1.25e9"
        )
    return values[0], values[1] if len(values) == 2 else None


def add_optimizer(
    group: argparse._ArgumentGroup, default: str = "the one that the profile has timed, else sgd"
) -> None:
    group.add_argument(
        "--optimizer",
        choices=[name for name in OPTIMIZER_STEPS if name != "momentum"],
        help=f"of train; its state needs memory and its step needs time (default: {default})",
    )
    group.add_argument(
        "--momentum",
        type=float,
        metavar="M",
        help=f"of sgd, as of train; 0 keeps no state (default: {MOMENTUM})",
    )


def optimizer_of(args: argparse.Namespace) -> str | None:
    """One of OPTIMIZER_STEPS; None where no flag says.

    Raises:
        ConfigError: the momentum is negative, or the optimizer has none.
    """
    momentum: float | None = args.momentum
    if momentum is not None and not momentum >= 0:
        raise ConfigError(f"--momentum {momentum:g} must be at least 0")
    if momentum is not None and args.optimizer not in (None, "sgd"):
        raise ConfigError(f"--momentum is of sgd, not of {args.optimizer}: drop one of them")
    if momentum is None and args.optimizer is None:
        return None
    if args.optimizer in (None, "sgd"):
        return "sgd" if momentum == 0 else "momentum"
    return str(args.optimizer)
