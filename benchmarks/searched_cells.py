"""The cells of `searched.py`: a model on a virtual cluster."""

from __future__ import annotations

from dataclasses import dataclass

_MODULE = "benchmarks.searched_models"
_BUILT_IN = ("resnet18", "dlrm", "gpt2", "bert_base")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, as flags of the train and profile workloads."""

    name: str
    batch: int
    flags: tuple[str, ...]

    @property
    def workload_flags(self) -> tuple[str, ...]:
        name = self.name if self.name in _BUILT_IN else f"{_MODULE}:{self.name}"
        # Otherwise strategies would differ in dropout masks and batch statistics.
        comparable = ("--dropout", "0", "--batch-norm", "frozen")
        return ("--model", name, *comparable, *self.flags, "--batch-size", str(self.batch))


def _images(side: int) -> tuple[str, ...]:
    return ("--image-size", str(side), "--n-classes", "10")


def _text(**sizes: int) -> tuple[str, ...]:
    flags = {"width": 256, "n_layers": 4, "n_heads": 4, "sequence_length": 64, **sizes}
    return tuple(
        word for name, n in flags.items() for word in (f"--{name.replace('_', '-')}", str(n))
    )


MODELS = {
    model.name: model
    for model in (
        Model(name="alexnet", batch=32, flags=_images(64)),
        Model(name="vgg16", batch=32, flags=_images(32)),
        Model(name="resnet18", batch=16, flags=_images(64)),
        Model(name="vit", batch=32, flags=_images(32)),
        Model(name="dlrm", batch=512, flags=("--dlrm-table-rows", *["20000"] * 8)),
        Model(name="deep_vit", batch=96, flags=("--optimizer", "adamw")),
        Model(name="gpt2", batch=8, flags=_text(vocabulary_size=4096)),
        Model(name="bert_base", batch=16, flags=_text(vocabulary_size=8192, mlp_width=1024)),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place:
    """A virtual cluster; nodes beyond the first have equal links.

    Attributes:
        cpu: CPU quota in cores, one value per node.
        bandwidth: of the nodes' links.
        n_each: ranks of each node.
    """

    cpu: tuple[float, ...]
    bandwidth: str
    n_each: int = 1

    @property
    def n_ranks(self) -> int:
        return len(self.cpu) * self.n_each

    @property
    def name(self) -> str:
        suffix = "" if len(set(self.cpu)) == 1 else "-unlike"
        return f"{len(self.cpu)}x{self.bandwidth}{suffix}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model on a virtual cluster."""

    model: Model
    place: Place

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.place.name}"

    @property
    def most_microbatches(self) -> int:
        """Four per rank, or fewer if the batch is smaller."""
        n_ranks = self.place.n_ranks
        return min(4, self.model.batch // n_ranks) * n_ranks

    @property
    def must_beat_ddp(self) -> bool:
        """Whether links are slow and parameters many, which is unfavourable for DDP."""
        return self.place.bandwidth == "100mbit" and self.model.name in ("alexnet", "vgg16", "dlrm")


# 0.3 of a core per node: five nodes leave half a core of two for everything else.
_SHARE = 0.3
_UNLIKE = (_SHARE, _SHARE, _SHARE / 2)


def _cells(places: list[Place], models: list[str]) -> list[Cell]:
    return [Cell(model=MODELS[name], place=place) for place in places for name in models]


def _uniform(n: int, bandwidth: str) -> Place:
    return Place(cpu=(_SHARE,) * n, bandwidth=bandwidth)


CELLS = {
    cell.name: cell
    for cell in (
        *_cells([_uniform(3, "100mbit")], ["alexnet", "dlrm", "vgg16", "resnet18", "vit"]),
        *_cells([_uniform(3, "1gbit")], ["alexnet", "dlrm", "vgg16", "resnet18", "vit"]),
        *_cells([Place(cpu=_UNLIKE, bandwidth="1gbit")], ["alexnet", "vit"]),
        *_cells([Place(cpu=_UNLIKE, bandwidth="100mbit")], ["alexnet", "dlrm"]),
        *_cells([_uniform(2, "100mbit"), _uniform(5, "1gbit")], ["alexnet", "dlrm", "vit"]),
        *_cells([_uniform(2, "1gbit"), _uniform(5, "100mbit")], ["vgg16", "resnet18"]),
        *_cells([_uniform(3, "100mbit"), _uniform(3, "1gbit")], ["gpt2", "bert_base"]),
        *_cells([_uniform(5, "100mbit"), _uniform(5, "1gbit")], ["gpt2", "bert_base"]),
        *_cells([_uniform(4, "1gbit"), _uniform(4, "100mbit")], ["alexnet", "vit"]),
    )
}
QUICK = ("alexnet-3x100mbit", "vit-3x1gbit")
