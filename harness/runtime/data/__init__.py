"""The DATA table of data sets, each loaded by a PyTorch DataLoader."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from harness.errors import ConfigError, DataError, first_line
from harness.inputs import shorten
from harness.runtime.data.batch import Batch, BatchPlan, MemoryData
from harness.runtime.data.dlrm_hdf5 import DlrmHdf5
from harness.runtime.data.images import class_names, open_cifar, open_digits, open_folder
from harness.runtime.data.own import OwnData, factory_of, open_own
from harness.runtime.data.synthetic import SyntheticData, default_n_samples
from harness.runtime.data.text import formats
from harness.runtime.data.text.sequences import Vocabulary, check_vocabulary
from harness.runtime.models import InputKind, fit_options, input_kind
from harness.runtime.models.task import DlrmOptions, HeadName, ModelOptions, Task
from harness.runtime.ranks.isolate import die_with_parent


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of a data set.

    Attributes:
        n_samples: number of synthetic samples; 0: a few global batches.
        held_out_dir: has samples that are not trained by, laid out as in `data_dir`.
        vocabulary: file of the tokens that text is cut into.
    """

    data_dir: Path
    held_out_dir: Path | None = None
    n_samples: int = 0
    seed: int = 0
    dlrm: DlrmOptions
    vocabulary: Path | None = None

    def read_vocabulary(self) -> Vocabulary:
        """Read the vocabulary file.

        Raises:
            DataError: there is none, or it has another layout.
        """
        if self.vocabulary is None:
            raise DataError("text is cut into tokens by a vocabulary: give --vocabulary vocab.txt")
        return Vocabulary(self.vocabulary)


Open = Callable[[DataOptions, Task, int], Dataset[Batch]]


@dataclass(frozen=True, kw_only=True)
class DataEntry:
    """One row of DATA.

    Attributes:
        open: opens a BatchedData for a task and a global batch; raises DataError.
        check: raises DataError if the data are missing; needs no task.
        classes: reads their names, in order, from the directory; empty: the model's.
        image_size, n_channels: of the stored images; 0: the model's.
        is_shuffled: whether each epoch has a new order.
        held_out: opens samples that are not trained by; None: another directory may have them.
        feeds: kind of models that it feeds; None: any.
        head: what a model of text predicts from it.
        holds: the contents of its files, for --help.
    """

    open: Open
    check: Callable[[DataOptions], object] = lambda _: None
    classes: Callable[[Path], Sequence[str]] = lambda _: ()
    image_size: int = 0
    n_channels: int = 0
    is_shuffled: bool = True
    held_out: Open | None = None
    feeds: InputKind | None = "images"
    head: HeadName | None = None
    holds: str = ""


def _numbered(n_classes: int) -> Callable[[Path], Sequence[str]]:
    """Classes of which the files have no names."""
    return lambda _: tuple(map(str, range(n_classes)))


def _cifar(name: str, n_classes: int) -> DataEntry:
    def open_it(
        options: DataOptions, task: Task, _: int, *, is_held_out: bool = False
    ) -> Dataset[Batch]:
        size = task.inputs[0].shape[-1]
        return open_cifar(name, options.data_dir, size, is_held_out=is_held_out)

    return DataEntry(
        open=open_it,
        held_out=partial(open_it, is_held_out=True),
        check=lambda options: open_cifar(name, options.data_dir, 32),
        classes=_numbered(n_classes),
        image_size=32,
        n_channels=3,
    )


OpenText = Callable[[Path, Vocabulary, Task], MemoryData]


def _text(
    head: HeadName, open_text: OpenText, find: Callable[[Path], list[Path]], **more: Any
) -> DataEntry:
    def check(options: DataOptions) -> None:
        vocabulary, held_out = options.read_vocabulary(), options.held_out_dir
        vocabulary.tokenizer()
        trained = {path.resolve() for path in find(options.data_dir)} - {vocabulary.path.resolve()}
        for path in find(held_out) if held_out is not None else ():
            if path.resolve() in trained:
                raise DataError(
                    f"{path} of --held-out-dir is among the files of --data-dir "
                    f"{options.data_dir}: move it to another directory, because it would be "
                    "trained by"
                )

    def open_it(options: DataOptions, task: Task, global_batch: int) -> Dataset[Batch]:
        vocabulary = options.read_vocabulary()
        check_vocabulary(len(vocabulary), task, vocabulary.path)
        return open_text(options.data_dir, vocabulary, task)

    return DataEntry(open=open_it, check=check, feeds="text", head=head, **more)


DATA: dict[str, DataEntry] = {
    "synthetic": DataEntry(
        open=lambda options, task, global_batch: SyntheticData(
            task, options.n_samples or default_n_samples(task, global_batch), options.seed
        ),
        is_shuffled=False,
        feeds=None,
    ),
    "cifar10": _cifar("cifar10", 10),
    "cifar100": _cifar("cifar100", 100),
    "digits": DataEntry(
        open=lambda _, task, __: open_digits(task.inputs[0].shape),
        held_out=lambda _, task, __: open_digits(task.inputs[0].shape, is_held_out=True),
        classes=_numbered(10),
        image_size=8,
        n_channels=1,
        holds="scikit-learn's 1797 images",
    ),
    "imagefolder": DataEntry(
        open=lambda options, task, _: open_folder(options.data_dir, task.inputs[0].shape[-1]),
        check=lambda options: class_names(options.data_dir),
        classes=class_names,
        n_channels=3,
    ),
    "dlrm_hdf5": DataEntry(
        open=lambda options, *_: DlrmHdf5(options.data_dir, options.dlrm),
        check=lambda options: DlrmHdf5(options.data_dir, options.dlrm),
        feeds="dlrm",
        holds="X_int, X_cat, y",
    ),
    "sst2": _text("classes", formats.open_sst2, formats.sst2_file, classes=_numbered(2)),
    "squad": _text("span", formats.open_squad, formats.squad_file),
    "text": _text("tokens", formats.open_text, formats.text_files, holds="*.txt"),
    "pairs": _text(
        "tokens", formats.open_pairs, formats.pair_files, holds="*.tsv of source and target"
    ),
}
OF_TEXT = tuple(name for name, row in DATA.items() if row.feeds == "text")


def described_data() -> str:
    """The names of DATA, with what their files hold."""
    return ", ".join(f"{name} ({row.holds})" if row.holds else name for name, row in DATA.items())


def _own_entry(name: str) -> DataEntry:
    """The entry of a user's data set."""

    def open_it(
        options: DataOptions, task: Task, global_batch: int, *, is_held_out: bool = False
    ) -> Dataset[Batch]:
        offered = {"data_dir": options.data_dir, "seed": options.seed}
        return open_own(name, offered, task, is_held_out=is_held_out)

    return DataEntry(
        open=open_it,
        check=lambda _: factory_of(name).check(),
        held_out=partial(open_it, is_held_out=True),
        feeds=None,
    )


def entry_of(data: str) -> DataEntry:
    """Look up a data set.

    Raises:
        ConfigError: there is none of this name.
    """
    if ":" in data:
        return _own_entry(data)
    if data not in DATA:
        raise ConfigError(
            f"there is no data {data!r}: choose one of {', '.join(DATA)}, or write your own as "
            "package.module:factory"
        )
    return DATA[data]


def entry_for(data: str, model: str) -> DataEntry:
    """Look up a data set and check that it fits the model.

    Raises:
        ConfigError: the data set is unknown or does not fit the model.
    """
    entry = entry_of(data)
    if entry.feeds == "text" and ":" in model:
        return entry  # the factory may return a Task of text
    if entry.feeds is not None and entry.feeds != input_kind(model):
        raise ConfigError(f"--data {data} cannot feed --model {model}: choose one that it can")
    return entry


def fit_to_data(model: str, options: ModelOptions, data: str, given: DataOptions) -> ModelOptions:
    """Fill in a model's missing options from the data, else from the model.

    Raises:
        ConfigError, ModelError, DataError: data and model do not fit each other, or the data are
            missing.
    """
    entry = entry_for(data, model)
    if not options.n_classes:
        options = replace(options, n_classes=len(entry.classes(given.data_dir)))
    if entry.feeds == "text":
        text = options.text
        size = text.vocabulary_size or len(given.read_vocabulary())
        text = replace(text, head=text.head or entry.head, vocabulary_size=size)
        options = replace(options, text=text)
    return fit_options(model, options, entry.image_size, entry.n_channels)


def open_data(name: str, options: DataOptions, task: Task, global_batch: int) -> Any:
    """Open a data set; its length is its number of samples.

    Raises:
        DataError: the data set is missing, empty, or has another layout, or its classes are no
            targets of the task.
    """
    entry = entry_of(name)
    if entry.feeds == "images":
        _check_images(name, entry, task)
    data: Any = entry.open(options, task, global_batch)
    if entry.feeds == "images":
        _check_classes(name, len(entry.classes(options.data_dir)), task)
    if len(data) < 1:
        where = "" if ":" in name else f" in {options.data_dir}"
        raise DataError(f"--data {name}{where} holds no sample")
    return data


def open_held_out(name: str, options: DataOptions, task: Task, global_batch: int) -> Any:
    """Open samples that are not trained by.

    Raises:
        DataError: they are missing, have another layout, or other classes than the data.
    """
    entry = entry_of(name)
    data: Any = (entry.held_out or entry.open)(held_out_options(name, options), task, global_batch)
    if not len(data):
        where = options.held_out_dir or f"--data {name}"
        raise DataError(f"{where} holds out no sample: leave out --evaluate")
    return data


def held_out_options(name: str, options: DataOptions) -> DataOptions:
    """The options that held-out samples are opened with; raises DataError as `open_held_out`."""
    entry, held_out_dir = entry_of(name), options.held_out_dir
    if entry.held_out is not None or held_out_dir is None:
        return options
    if held_out_dir.resolve() == options.data_dir.resolve():
        raise DataError(f"--held-out-dir is --data-dir {options.data_dir}: give data of its own")
    trained, held_out = entry.classes(options.data_dir), entry.classes(held_out_dir)
    if unlike := sorted({*trained} ^ {*held_out}):
        raise DataError(
            f"--held-out-dir {held_out_dir} has {len(held_out)} classes, --data-dir "
            f"{options.data_dir} has {len(trained)}, and {shorten(unlike[0])} is in one of them: "
            "give both the same, because they are numbered in order"
        )
    return replace(options, data_dir=held_out_dir, held_out_dir=None)


def _check_images(name: str, entry: DataEntry, task: Task) -> None:
    """Refuse a task whose inputs are not the images: those of one channel are made to fit."""
    shapes = [spec.shape for spec in task.inputs]
    is_fitting = entry.n_channels == 1 or shapes == [(3, *shapes[0][-1:] * 2)]
    if len(shapes) != 1 or len(shapes[0]) != 3 or not is_fitting:
        raise DataError(
            f"--data {name} gives square images of {entry.n_channels} channels, and the model "
            f"takes {', '.join(map(str, shapes))}: change the model's example, or give your own "
            "data as package.module:factory"
        )


def _check_classes(name: str, n_classes: int, task: Task) -> None:
    """Refuse a task whose targets are not the classes of images."""
    is_class = task.target_dtype == torch.int64 and task.loss != "binary_cross_entropy"
    if task.target_shape or not is_class:
        raise DataError(
            f"--data {name} has one class for each image, and the model's loss ({task.loss}) takes "
            f"targets of shape {task.target_shape}: use --data synthetic, or return logits "
            "(samples, classes)"
        )
    if task.loss == "cross_entropy" and n_classes > task.n_classes:
        raise DataError(
            f"--data {name} has {n_classes} classes, and the model returns {task.n_classes} "
            "logits: let the factory take n_classes"
        )


def count_targets(data: Any, task: Task, indices: Sequence[int]) -> tuple[int, ...]:
    """Number of targets that count for the loss, of each sample of an epoch (`BatchPlan.indices`);
    all of them where the data mask none. Every rank knows all samples, so that none must
    communicate."""
    if hasattr(data, "count_targets"):
        found: tuple[int, ...] = data.count_targets(indices)
        return found
    return (task.n_targets,) * len(indices)


def load_batches(
    data: Any,
    plan: BatchPlan,
    rank: int,
    *,
    n_workers: int,
    device: torch.device,
    first_step: int = 0,
) -> Iterator[Batch]:
    """Iterate over this rank's batches from a step on, step by step, without end.

    Synthetic samples of the first epoch are drawn before the function returns. A rank that is fed
    no samples gets empty batches.
    """
    if plan.n_fed(rank) == 0 and plan.positions is not None:
        return itertools.repeat(data[0].each(lambda column: column[:0]))
    if isinstance(data, SyntheticData):
        epoch = itertools.islice(plan.indices(rank), plan.n_steps_per_epoch)
        wanted = sorted({index for indices in epoch for index in indices})
        # Not in forks, which may not read pinned memory.
        data.prepare(wanted, is_lent=device.type == "cuda" and not n_workers)
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=plan.indices(rank, first_step, has_epochs=isinstance(data, OwnData)),
        num_workers=n_workers,
        # Forks share cached activations; a rank's default is a server, which would import torch.
        multiprocessing_context="fork" if n_workers else None,
        worker_init_fn=_begin_worker,
        collate_fn=lambda batch: batch,  # because __getitems__ returns whole batches
        pin_memory=device.type == "cuda",
    )
    if n_workers:
        gc.collect()  # a fork that frees an earlier engine's process groups waits for their threads
    batches: Iterator[Batch] = _told(iter(loader)) if n_workers else iter(loader)
    if isinstance(data, OwnData):
        return data.checked(batches, plan.indices(rank, first_step))
    return batches


def _begin_worker(number: int) -> None:
    die_with_parent()  # workers hold sockets that peers wait for
    queues: Any = Queue
    queues._on_queue_feeder_error = _send_error


def _send_error(queue: Any, error: Exception, item: tuple[int, Any]) -> None:
    """In place of a batch that a worker cannot send, which Python forgets and torch waits for."""
    told = DataError(
        f"a worker cannot hand over its batch ({first_line(error)}): make /dev/shm of this host "
        "larger (docker run --shm-size), or lower --n-workers or the batch"
    )
    queue.put((item[0], ExceptionWrapper((DataError, told, None))))


def _told(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches of worker processes, before whose errors torch puts a traceback."""
    try:
        yield from batches
    except DataError as error:
        raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error
