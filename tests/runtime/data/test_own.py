"""A user's own data set, for models without a loss, and with one of their own."""

import gc
import logging
import os
import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_runs import world_of
from nets import users_task
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from harness.errors import DataError
from harness.runtime.data import load_batches
from harness.runtime.data.agreement import changed_columns, check_read_once
from harness.runtime.data.batch import BatchPlan
from harness.runtime.data.own import OwnData, open_own
from harness.runtime.devices.random_sources import RandomSources, seed_all

N = 6
WORDS, NUMBERS = torch.arange(4 * N).view(N, 4) % 5, torch.rand(N, 3)


class Tagger(nn.Module):
    """Classes of words, and a loss of labels that it shifts."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, words, labels=None):
        logits = self.last(self.words(words))
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


def classifier():
    return users_task(nn.Linear(3, 2), torch.rand(2, 3))


def tagger(*, has_loss):
    return users_task(Tagger(), {"words": WORDS[:2]} | ({"labels": WORDS[:2]} if has_loss else {}))


def test_samples_are_tuples_or_dicts_of_anything_that_makes_tensors():
    labels = torch.arange(N) % 2
    pairs = OwnData("own", TensorDataset(NUMBERS, labels), classifier())
    named = [
        {"input_0": row.numpy(), "class": int(label)}
        for row, label in zip(NUMBERS, labels, strict=True)
    ]
    halves = [({"input_0": row}, int(label)) for row, label in zip(NUMBERS, labels, strict=True)]
    for data in (pairs, *(OwnData("own", each, classifier()) for each in (named, halves))):
        assert len(data) == N
        batch = data.__getitems__([4, 1])
        assert torch.equal(batch.inputs[0], NUMBERS[[4, 1]])
        assert batch.targets.tolist() == [0, 1]
        assert data.count_targets([0, 5]) == (1, 1)


class Endless(list[object]):
    def __len__(self):
        raise RuntimeError("count\nthem")


def test_samples_that_do_not_tell_their_number_are_refused():
    message = r"own does not tell its length \(RuntimeError: count\): mend it"
    with pytest.raises(DataError, match=message):
        OwnData("own", Endless(), classifier())


def test_an_error_in_a_worker_is_the_one_line_of_the_sample():
    plan = BatchPlan(n_samples=N, shares=(2,))
    data = OwnData("own", TensorDataset(NUMBERS, torch.full((N,), 7)), classifier())
    batches = load_batches(data, plan, 0, n_workers=1, device=torch.device("cpu"))
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == (
        "sample 0 of own has label 7, and the model has 2 classes: give labels from 0 to 1"
    )


class Unsendable:
    """Stands in for a tensor that finds /dev/shm full."""

    def __reduce__(self):
        raise RuntimeError("No space left on device (28)")


@pytest.mark.timeout(20)
def test_a_batch_that_a_worker_cannot_hand_over_is_an_error():
    plan = BatchPlan(n_samples=N, shares=(2,))
    data = SimpleNamespace(__getitems__=lambda indices: Unsendable())
    batches = load_batches(data, plan, 0, n_workers=1, device=torch.device("cpu"))
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == (
        "a worker cannot hand over its batch (No space left on device (28)): make /dev/shm of this "
        "host larger (docker run --shm-size), or lower --n-workers or the batch"
    )


class Group:
    """Tells which process frees it, as no worker may a closed Trainer's process group."""

    def __init__(self, freed):
        self.itself, self.freed = self, freed

    def __del__(self):
        self.freed.write_text(str(os.getpid()))


class Collecting(list[object]):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


def test_a_worker_frees_nothing_of_the_process_that_it_is_forked_from(tmp_path):
    plan = BatchPlan(n_samples=N, shares=(2,))
    samples = Collecting(zip(NUMBERS, torch.zeros(N, dtype=torch.int64), strict=True))
    data = OwnData("own", samples, classifier())
    Group(tmp_path / "freed")
    next(load_batches(data, plan, 0, n_workers=1, device=torch.device("cpu")))
    assert (tmp_path / "freed").read_text() == str(os.getpid())


def test_labels_of_one_logit_are_0_and_1_of_any_dtype():
    task = users_task(nn.Linear(3, 1), torch.rand(2, 3))
    for labels in (torch.tensor([0.0, 1.0]), torch.tensor([0, 1]), torch.tensor([False, True])):
        data = OwnData("own", TensorDataset(NUMBERS[:2], labels), task)
        assert data.__getitems__([0, 1]).targets.tolist() == [0, 1]
    for label in (7, 0.5):
        with pytest.raises(DataError, match=r"label .*, and the loss of one logit is the binary"):
            OwnData("own", [(NUMBERS[0], label)], task)


class TargetFirst(nn.Linear):
    def forward(self, target, x):
        out = super().forward(x)
        return {"out": out, "loss": nn.functional.mse_loss(out, target)}


def test_a_tuple_has_the_order_of_an_example_that_is_one():
    task = users_task(TargetFirst(3, 3), (NUMBERS, 2 * NUMBERS))
    found = OwnData("own", [(3 * NUMBERS[0], NUMBERS[0])], task).__getitems__([0])
    assert torch.equal(found.inputs[0], NUMBERS[:1])
    assert torch.equal(found.targets, 3 * NUMBERS[:1])


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, batch):
        first, second = batch["pair"]
        return self.last(batch["x"] + first - second)


def test_a_sample_nests_its_inputs_as_the_example_does():
    example = {"batch": {"x": NUMBERS, "pair": (2 * NUMBERS, 3 * NUMBERS)}}
    task = users_task(Nested(), example)
    names = ["batch_x", "batch_pair_0", "batch_pair_1"]
    assert [spec.name for spec in task.inputs] == names
    nested = [{"y": 1, "batch": {"pair": [2 * x, 3 * x], "x": x.tolist()}} for x in NUMBERS]
    flat = [{"y": 1, **dict(zip(names, (x, 2 * x, 3 * x), strict=True))} for x in NUMBERS]
    for samples in (nested, flat):
        inputs = OwnData("own", samples, task).__getitems__([2]).inputs
        assert [torch.equal(x, k * NUMBERS[2:3]) for k, x in enumerate(inputs, 1)] == [True] * 3


@pytest.mark.parametrize("has_loss", [False, True])
def test_targets_that_do_not_count_are_left_out_of_their_number(has_loss, caplog):
    labels = WORDS.clone()
    labels[1, 2:] = -100
    samples = [{"words": x, "labels": y} for x, y in zip(WORDS.tolist(), labels, strict=True)]
    with caplog.at_level(logging.WARNING):
        data = OwnData("own", samples, tagger(has_loss=has_loss))
    # A loss of the model's own is computed from labels that it shifts.
    assert data.count_targets([0, 1, 0]) == ((3, 1, 3) if has_loss else (4, 2, 4))
    assert ("add labels to the example" in caplog.text) != has_loss
    assert torch.equal(data.__getitems__([1]).targets, labels[[1]])


@pytest.mark.parametrize(
    ("column", "number", "problem"),
    [
        ("words", 5, "has 5 in words, and the model's embedding has 5 rows"),
        ("words", -1, "has -1 in words, and the model's embedding has 5 rows"),
        ("labels", 5, "has label 5, and the model has 5 classes"),
    ],
)
@pytest.mark.parametrize("has_loss", [False, True])
def test_the_sample_with_a_number_that_embedding_or_logits_lack_is_named(
    column, number, problem, has_loss
):
    columns = {"words": WORDS.clone(), "labels": WORDS.clone()}
    columns[column][3, 2] = number
    samples = list(zip(*columns.values(), strict=True))
    with pytest.raises(DataError, match=f"sample 3 of own {problem}"):
        OwnData("own", samples, tagger(has_loss=has_loss)).__getitems__([1, 3])


def test_a_label_that_does_not_count_in_a_mean_over_samples_is_refused():
    class Alone(nn.Linear):
        def forward(self, x, y):
            return functional.cross_entropy(super().forward(x), y)

    example = {"x": NUMBERS[:2], "y": torch.tensor([1, 0])}
    samples = [{"x": NUMBERS[0], "y": label} for label in (1, -100)]
    data = OwnData("own", samples, users_task(Alone(3, 2), example))
    with pytest.raises(DataError, match="has y of -100, and the example of the model has none"):
        data.__getitems__([0, 1])


@pytest.mark.parametrize(("dtype", "number"), [(torch.uint8, -100), (torch.int16, 40_000)])
def test_an_integer_that_the_examples_dtype_cannot_hold_is_refused(dtype, number):
    class Real(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    task = users_task(Real(2, 2), {"x": torch.zeros(2, 2, dtype=dtype)})
    with pytest.raises(DataError, match=f"sample 0 of own has x {number}, which {dtype} of"):
        OwnData("own", [([1, number], 0)], task)


def test_what_the_model_does_not_read_is_told(caplog):
    sample = {"words": WORDS[0], "labels": WORDS[1], "mask": WORDS[0], "text": "a b"}
    OwnData("own", [sample], tagger(has_loss=False))
    assert "the model does not read mask, text" in caplog.text


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (
            (torch.rand(3),),
            "is of type tuple of length 1, and the model takes 2 \\(input_0, label\\)",
        ),
        ({"x": torch.rand(3), "y": 1}, "has x, y, and the model takes input_0, y: add input_0"),
        ((torch.rand(4), 1), "has input_0 of shape \\(4,\\), and the model takes \\(3,\\)"),
        ((torch.rand(3), 1.5), "has label of torch.float32 \\(1.5\\), and .* return a loss"),
        ((torch.rand(3), torch.ones(2)), "\\(2,\\), and the model takes \\(\\): .* return a loss"),
        ((torch.rand(3), "cat"), "has label of type str, which makes no tensor"),
        ((np.ones(3, ">f4"), 1), "return a tensor, numbers or an array of native byte order"),
        ((torch.rand(3), -100), "has a label that does not count: drop the sample"),
        ((torch.rand(3), 2), "has label 2, and the model has 2 classes: give labels from 0 to 1"),
        ((torch.rand(3), -1), "has label -1, and the model has 2 classes"),
        (None, "is of type NoneType, and the model takes 2"),
    ],
)
def test_samples_that_do_not_fit_are_refused(sample, problem):
    with pytest.raises(DataError, match=problem):
        OwnData("own", [sample], classifier()).__getitems__([0])


FACTORIES = """
import random
import numpy
from torch.utils.data import ChainDataset, TensorDataset
import torch

def data(seed, data_dir):
    numbers = torch.rand(6, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, torch.zeros(6, dtype=torch.int64))

def pair():
    return [(torch.rand(3), 0)], [(torch.rand(3), 1)] * 2

def split():
    order = torch.randperm(50).tolist(), random.sample(range(50), 50), numpy.random.permutation(50)
    rows = [(torch.tensor([k, j, n]).float(), 0) for k, j, n in zip(*order)]
    return rows[:40], rows[40:]

def endless():
    return iter([1])

def counted():
    return ChainDataset([])  # has a length, and a __getitem__ that torch lets fail

def forgotten():
    data(3, None)

def broken():
    class Broken:
        def __len__(self): return 3
        def __getitem__(self, index): raise OSError(f"no file {index}")
    return Broken()
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    (tmp_path / "users_data.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, **options):
        offered = {"seed": 3, "data_dir": tmp_path}
        return open_own(f"users_data:{name}", offered, classifier(), **options)

    return make


def test_a_factory_gets_the_flags_that_it_takes(made):
    wanted = torch.rand(6, 3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(made("data", is_held_out=False).__getitems__([2]).inputs[0], wanted[[2]])
    assert [len(made("pair", is_held_out=is_held)) for is_held in (False, True)] == [1, 2]


def test_a_random_split_is_the_same_on_all_ranks_and_for_evaluation(made):
    rows = []
    for seed, is_held_out in ((0, False), (1, True)):  # as on another rank
        torch.manual_seed(seed)
        data = made("split", is_held_out=is_held_out)
        assert torch.initial_seed() == seed
        rows += data.__getitems__(list(range(len(data)))).inputs[0].tolist()
    for column in zip(*rows, strict=True):
        assert sorted(column) == list(range(50))


@pytest.mark.parametrize(
    ("name", "is_held_out", "problem"),
    [
        ("nothing", False, "--data 'users_data:nothing': .*users_data.py has no callable"),
        ("endless", False, "is of type list_iterator, which has no length"),
        ("counted", False, "is of type ChainDataset, which has no length or no samples by index"),
        ("forgotten", False, "is of type NoneType, which has no length"),
        ("broken", False, "sample 0 .* cannot be read \\(OSError: no file 0\\)"),
        ("data", True, "returned an object of type TensorDataset: return a pair"),
    ],
)
def test_factories_that_make_no_data_set_are_refused(made, name, is_held_out, problem):
    with pytest.raises(DataError, match=problem):
        made(name, is_held_out=is_held_out)


class Noisy(list):
    """Adds random numbers to its inputs."""

    def __init__(self, samples, draw):
        super().__init__(samples)
        self._draw = draw

    def __getitem__(self, index):
        words, label = super().__getitem__(index)
        return words + self._draw(), label


TASK = classifier()


def noisy(draw, seed=0):
    return OwnData("data", Noisy(TensorDataset(NUMBERS, WORDS[:, 0] % 2), draw), TASK, seed)


@pytest.mark.parametrize("draw", [lambda: 0.0, random.random])
def test_the_sample_of_a_batch_that_cannot_be_read_is_named(draw):
    data = noisy(draw)
    data._samples[4] = (None, 1)
    with pytest.raises(DataError, match=r"^sample 4 of data cannot be read \(TypeError: unsupp"):
        data.__getitems__([1, N + 4, 2])


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_augmentation_depends_on_seed_epoch_and_sample_alone(draw):
    """Whatever a rank has read and drawn before; training's own numbers stay."""
    readings = []
    for rank, numbers in enumerate(([1, 2, N + 1], [N + 1, 2, 1])):
        seed_all(rank)
        before = RandomSources().digests()
        data = noisy(draw)
        read = data.__getitems__(numbers).inputs[0]
        assert RandomSources().digests() == before
        readings.append(dict(zip(numbers, read.tolist(), strict=True)))
    assert readings[0] == readings[1]
    assert readings[0][1] != readings[0][N + 1]
    other = noisy(draw, seed=1).__getitems__([1]).inputs[0].tolist()
    assert other != [readings[0][1]]


def test_loaded_batches_draw_anew_in_each_epoch_and_go_on_where_a_run_stopped():
    plan = BatchPlan(n_samples=N, shares=(N,))
    load = partial(load_batches, plan=plan, rank=0, n_workers=0, device=torch.device("cpu"))
    batches = load(noisy(random.random))
    first, second = (next(batches).inputs[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(next(load(noisy(random.random), first_step=1)).inputs[0], second)


def test_a_cache_sees_that_augmentation_differs_between_epochs():
    data = noisy(random.random)
    assert not changed_columns(data)
    assert changed_columns(data, is_next_epoch=True) == {0: 0}


class Masked(list):
    """Draws for each word whether its label counts."""

    def __init__(self, draw):
        super().__init__(zip(WORDS, WORDS, strict=True))
        self._draw = draw

    def __getitem__(self, index):
        words, labels = super().__getitem__(index)
        return words, torch.tensor([x if self._draw() < 0.5 else -100 for x in labels])


@pytest.mark.parametrize("is_global", [True, False])
def test_labels_that_are_drawn_anew_are_counted_anew_or_refused(is_global):
    plan = BatchPlan(n_samples=N, shares=(N,), is_shuffled=True)
    draw = random.random if is_global else random.Random(0).random
    data, cpu = OwnData("own", Masked(draw), tagger(has_loss=False)), torch.device("cpu")
    batches = load_batches(data, plan, 0, n_workers=0, device=cpu)
    refused = pytest.raises(DataError, match=r"sample \d of own has \d labels that count, and had")
    with nullcontext() if is_global else refused:
        for step in range(3):
            counts = data.count_targets(plan.global_indices(step, has_epochs=True))
            assert counts == tuple((next(batches).targets != -100).sum(1).tolist())


class Flipped(list):
    """Flips its inputs at every second reading."""

    n_read = 0

    def __getitem__(self, index):
        self.n_read += 1
        words, label = super().__getitem__(index)
        return (words.flip(0) if self.n_read % 2 else words), label


@pytest.mark.parametrize(
    ("inputs", "targets", "is_refused"),
    [
        ([(0, (0, 6)), (1, (0, 6))], [(0, (0, 6))], True),  # cut by features
        ([(0, (0, 4)), (1, (3, 6))], [(0, (0, 6))], True),  # with a halo
        ([(0, (0, 3)), (1, (3, 6))], [(0, (0, 3)), (1, (3, 6))], False),  # ddp
        ([(0, (0, 6))], [(1, (0, 6))], False),  # a pipeline, whose targets stay
    ],
)
def test_samples_that_change_are_refused_where_two_ranks_read_them(inputs, targets, is_refused):
    data = OwnData("data", Flipped(TensorDataset(NUMBERS, WORDS[:, 0] % 2)), classifier())
    with pytest.raises(DataError, match="ranks 0 and 1 would") if is_refused else nullcontext():
        check_read_once("data", data, [inputs, targets], world_of())
