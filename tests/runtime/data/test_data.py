"""Batches over ranks and every data set through a real DataLoader."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.errors import DataError
from harness.runtime.data import DataOptions, load_batches, open_data, open_held_out
from harness.runtime.data.batch import BatchPlan, split_by_weight
from harness.runtime.data.images import class_names
from harness.runtime.models.task import DlrmOptions, InputSpec, Task
from harness.runtime.models.torchvision_import import import_torchvision

CPU = torch.device("cpu")
IMAGES = Task(
    model=nn.Identity(), inputs=(InputSpec(name="images", shape=(3, 32, 32)),), n_classes=100
)


@given(st.integers(0, 500), st.lists(st.floats(0.1, 50), min_size=1, max_size=6))
def test_parts_sum_to_the_whole_and_are_within_one_of_exact(total, weights):
    parts = split_by_weight(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1


def test_the_largest_remainders_are_rounded_up():
    assert split_by_weight(10, [3, 1, 1.5]) == [5, 2, 3]  # 5.45, 1.82, 2.73
    assert split_by_weight(3, [1.0, 1.0]) == [2, 1]


@given(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_every_epoch_gives_every_sample_to_one_rank(n_samples, shares, is_shuffled):
    plan = BatchPlan(n_samples=n_samples, shares=tuple(shares), is_shuffled=is_shuffled)
    seen: list[int] = []
    for rank in range(len(shares)):
        steps = islice(plan.indices(rank), 2 * plan.n_steps_per_epoch)
        for step, indices in enumerate(steps):
            size = plan.sizes(step)[rank]
            assert len(indices) == max(1, size)
            seen += indices[:size]
    assert sorted(seen) == sorted([*range(n_samples)] * 2)


def test_the_global_batch_does_not_depend_on_the_ranks():
    one = BatchPlan(n_samples=40, shares=(17,), is_shuffled=True, seed=3)
    three = BatchPlan(n_samples=40, shares=(6, 6, 5), is_shuffled=True, seed=3)
    by_rank = [list(islice(three.indices(rank), 6)) for rank in range(3)]
    for step, whole in enumerate(islice(one.indices(0), 6)):
        assert [i for parts in by_rank for i in parts[step]] == whole


def test_given_positions_are_taken_in_their_order():
    """Two microbatches of three: rank 0 feeds both halves of a pipeline's first stage, rank 2 its
    targets; rank 1 is fed nothing. Seven samples: one is dropped in each epoch."""
    positions = ((0, 3, 1, 4), (), (5, 2))
    plan = BatchPlan(n_samples=13, shares=(6, 0, 0), positions=positions)
    assert plan.n_steps_per_epoch == 2
    assert plan.n_dropped == 1
    assert plan.sizes(1) == [6, 0, 0]
    assert list(islice(plan.indices(0), 3)) == [[0, 3, 1, 4], [6, 9, 7, 10], [0, 3, 1, 4]]
    assert list(islice(plan.indices(2), 2)) == [[5, 2], [11, 8]]
    assert [plan.n_fed(rank) for rank in range(3)] == [4, 0, 2]


def test_positions_are_places_in_the_batch_that_one_device_would_take():
    one = BatchPlan(n_samples=12, shares=(4,), is_shuffled=True, seed=3)
    placed = BatchPlan(
        n_samples=12, shares=(0, 4), positions=((3, 0), (1, 2, 3)), is_shuffled=True, seed=3
    )
    for whole, first, last in zip(
        islice(one.indices(0), 7), placed.indices(0), placed.indices(1), strict=False
    ):
        assert first == [whole[3], whole[0]]
        assert last == whole[1:]


def test_too_few_samples_for_a_whole_batch_are_refused():
    with pytest.raises(DataError, match=r"holds 5 samples, one batch of this strategy takes 6"):
        BatchPlan(n_samples=5, shares=(6,), positions=((0,),))


def test_a_rank_that_needs_no_data_loads_none(tmp_path, monkeypatch):
    data = open_data("synthetic", options(tmp_path, n_samples=8), IMAGES, 4)
    monkeypatch.setattr(data, "prepare", lambda *_, **__: pytest.fail("drew samples"))
    plan = BatchPlan(n_samples=8, shares=(4, 0), positions=((0, 1, 2, 3), ()))
    batches = load_batches(data, plan, 1, n_workers=0, device=CPU)
    for batch in islice(batches, 3):
        assert batch.inputs[0].shape == (0, 3, 32, 32)
        assert batch.targets.shape == (0,)


def options(data_dir, **others):
    return DataOptions(data_dir=data_dir, **{"dlrm": DlrmOptions(), **others})


def first_batch(name, data_dir, task, n_workers=0, **others):
    data = open_data(name, options(data_dir, **others), task, 4)
    plan = BatchPlan(n_samples=len(data), shares=(4,))
    return len(data), next(load_batches(data, plan, 0, n_workers=n_workers, device=CPU))


def test_a_synthetic_sample_depends_on_its_index_alone(tmp_path):
    data = open_data("synthetic", options(tmp_path, n_samples=20), IMAGES, 4)
    again = open_data("synthetic", options(tmp_path, n_samples=20), IMAGES, 9)
    together, apart = data.__getitems__([3, 7]), again.__getitems__([7])
    assert torch.equal(together.inputs[0][1], apart.inputs[0][0])
    assert together.targets[1] == apart.targets[0]
    other_seed = open_data("synthetic", options(tmp_path, n_samples=20, seed=1), IMAGES, 4)
    assert not torch.equal(other_seed.__getitems__([7]).inputs[0], apart.inputs[0])


def test_consecutive_samples_are_lent_and_others_copied(tmp_path):
    data = open_data("synthetic", options(tmp_path, n_samples=8), IMAGES, 4)
    wanted = [data.__getitems__(indices) for indices in ([2, 3, 4], [4, 2])]
    data.prepare(range(8), is_lent=True)
    memory = [data.__getitems__(indices) for indices in ([2, 3, 4], [4, 2], [0])]
    for found, batch in zip(memory, wanted, strict=False):
        assert torch.equal(found.inputs[0], batch.inputs[0])
        assert torch.equal(found.targets, batch.targets)
    first, copied, other = (batch.inputs[0].untyped_storage().data_ptr() for batch in memory)
    assert first == other != copied


def test_samples_that_do_not_fit_in_the_host_run_out_of_memory(tmp_path):
    task = Task(model=nn.Identity(), inputs=(InputSpec(name="x", shape=(1 << 40,)),))
    data = open_data("synthetic", options(tmp_path, n_samples=8), task, 4)
    with pytest.raises(MemoryError, match="8 synthetic samples need 32 TiB"):
        data.prepare(range(8))


def test_workers_read_the_same_batches(tmp_path):
    """Also where processes are started by a server, as in a rank, and the data are no pickle."""
    task = replace(IMAGES, model=nn.Sequential(nn.Identity()))
    task.model.hook = lambda: None
    _, here = first_batch("synthetic", tmp_path, task)
    server = multiprocessing.get_context("forkserver")
    with mock.patch.object(multiprocessing.context._default_context, "_actual_context", server):
        _, there = first_batch("synthetic", tmp_path, task, n_workers=1)
    assert torch.equal(here.inputs[0], there.inputs[0])


def write_cifar10(root):
    """Five training files of two images each, in the layout of the authors' archive."""
    base = root / "cifar-10-batches-py"
    base.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        data = np.full((2, 3072), 10 * number, dtype=np.uint8)
        (base / name).write_bytes(pickle.dumps({"data": data, "labels": [number, 9 - number]}))
    meta = {"label_names": [f"class{i}" for i in range(10)]}
    (base / "batches.meta").write_bytes(pickle.dumps(meta))


def test_cifar10_is_read_from_its_files(tmp_path, monkeypatch):
    write_cifar10(tmp_path)
    cifar = import_torchvision("datasets.cifar")
    # The real check compares hashes of the real files, which these are not.
    monkeypatch.setattr(cifar, "check_integrity", lambda path, md5=None: Path(path).exists())
    n_samples, batch = first_batch("cifar10", tmp_path, IMAGES)
    assert n_samples == 10
    assert batch.inputs[0].shape == (4, 3, 32, 32)
    assert batch.targets.tolist() == [0, 9, 1, 8]
    assert float(batch.inputs[0][0, 0, 0, 0]) == pytest.approx((0 - 0.485) / 0.229)
    held_out = open_held_out("cifar10", options(tmp_path), IMAGES, 4)
    assert held_out.__getitems__([0, 1]).targets.tolist() == [5, 4]
    small = replace(IMAGES, inputs=(InputSpec(name="images", shape=(3, 8, 8)),))
    assert first_batch("cifar10", tmp_path, small)[1].inputs[0].shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("cifar10", ".", "should hold cifar-10-"),
        ("cifar100", ".", "should hold cifar-100-"),
        ("imagefolder", ".", "one directory per class"),
        ("dlrm_hdf5", "other.txt", "not an HDF5 file"),
    ],
)
def test_missing_or_other_files_are_refused_with_their_layout(tmp_path, name, path, message):
    (tmp_path / "other.txt").write_text("no")
    with pytest.raises(DataError, match=message):
        open_data(name, options(tmp_path / path), IMAGES, 4)


def test_a_folder_of_images_is_read(tmp_path):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (50, 40), color=(i, 0, 255)).save(tmp_path / name / f"{i}.png")
    n_samples, batch = first_batch("imagefolder", tmp_path, IMAGES)
    assert n_samples == 6
    assert batch.inputs[0].shape == (4, 3, 32, 32)
    assert batch.targets.tolist() == [0, 0, 0, 1]
    assert class_names(tmp_path) == ["cat", "dog"]
    both = replace(options(tmp_path), held_out_dir=tmp_path.parent / f"{tmp_path.name}val")
    shutil.copytree(tmp_path, both.held_out_dir)
    assert len(open_held_out("imagefolder", both, IMAGES, 4)) == 6
    shutil.rmtree(both.held_out_dir / "cat")  # so that dogs would get its number
    with pytest.raises(DataError, match=r"has 1 classes, --data-dir .* has 2, and 'cat' is in one"):
        open_held_out("imagefolder", both, IMAGES, 4)
    (tmp_path / "cat" / "1.png").write_bytes((tmp_path / "cat" / "1.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"cat/1\.png cannot be decoded .*save it again"):
        first_batch("imagefolder", tmp_path, IMAGES)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_an_image_is_read_in_each_mode_that_rgb_does_not_clip(tmp_path, mode):
    from PIL import Image

    (tmp_path / "cat").mkdir()
    Image.new(mode, (32, 32), 1).save(tmp_path / "cat" / "1.tif")
    if mode[0] in "IF":
        with pytest.raises(DataError, match=rf"cat/1\.tif .*mode {mode}.* over 8 bits a channel"):
            first_batch("imagefolder", tmp_path, IMAGES)
    else:
        assert first_batch("imagefolder", tmp_path, IMAGES)[0] == 1


SMALL_DLRM = DlrmOptions(bottom_mlp=(3, 2), top_mlp=(6, 1), table_rows=(4, 5))


def write_hdf5(path, **changes):
    arrays = {
        "X_int": np.arange(18, dtype=np.float32).reshape(6, 3),
        "X_cat": np.array([[0, 4], [1, 3], [2, 2], [3, 1], [0, 0], [1, 4]]),
        "y": np.array([0, 1, 0, 1, 1, 0], dtype=np.float32),
        **changes,
    }
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file[name] = array
    return path


def test_hdf5_rows_come_in_the_order_asked_for(tmp_path):
    data = open_data(
        "dlrm_hdf5", options(write_hdf5(tmp_path / "a.h5"), dlrm=SMALL_DLRM), IMAGES, 4
    )
    batch = data.__getitems__([5, 0, 3, 0])  # a sample that fills a batch comes twice
    assert batch.inputs[0].tolist() == [[15, 16, 17], [0, 1, 2], [9, 10, 11], [0, 1, 2]]
    assert batch.inputs[1].tolist() == [[1, 4], [0, 4], [3, 1], [0, 4]]
    assert batch.targets.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "has no y"),
        (
            {"X_int": np.zeros((6, 2))},
            r"X_int is \(6, 2\), but y and the model's flags ask for \(6, 3\)",
        ),
        ({"X_cat": np.full((6, 2), 4)}, "X_cat column 0 goes from 4 to 4, its table has 4 rows"),
        ({"y": np.float32(0)}, r"y is \(\): it should be"),
        ({"y": np.zeros((6, 2), np.float32)}, r"y is \(6, 2\): it should be \(samples,\)"),
        ({"y": np.array([0, 1, 1, -1, 1, -1])}, "y of sample 3 is -1, and the loss takes clicks"),
        ({"X_cat": np.zeros((6, 2), np.float32)}, "X_cat holds float32 or nothing"),
        ({"X_int": np.full((6, 3), b"x")}, "X_int holds .*: it should hold numbers"),
    ],
)
def test_an_hdf5_file_that_does_not_fit_is_refused(tmp_path, changes, message):
    path = write_hdf5(tmp_path / "a.h5", **changes)
    with pytest.raises(DataError, match=message):
        open_data("dlrm_hdf5", options(path, dlrm=SMALL_DLRM), IMAGES, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_classes": 5}, "has 10 classes, and the model returns 5 logits"),
        ({"target_shape": (8, 8)}, r"takes targets of shape \(8, 8\): use --data synthetic"),
        ({"loss": "binary_cross_entropy"}, r"\(binary_cross_entropy\) takes targets"),
    ],
)
def test_classes_that_are_no_targets_of_the_model_are_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        open_data("digits", options(tmp_path), replace(IMAGES, **changes), 4)


@pytest.mark.parametrize(
    ("data", "shapes"),
    [
        ("imagefolder", [(3, 24, 16)]),
        ("imagefolder", [(1, 16, 16)]),
        ("cifar10", [(3, 8, 8), ()]),
        ("digits", [(64,)]),
    ],
)
def test_a_model_that_takes_no_images_of_the_data_is_refused(tmp_path, data, shapes):
    inputs = tuple(replace(IMAGES.inputs[0], shape=shape) for shape in shapes)
    taken = re.escape(", ".join(map(str, shapes)))
    with pytest.raises(DataError, match=f"{data} gives square images .* the model takes {taken}:"):
        open_data(data, options(tmp_path), replace(IMAGES, inputs=inputs), 4)
