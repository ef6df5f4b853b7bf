"""The MODELS table: published sizes, image sizes, DLRM's shapes."""

from __future__ import annotations

import pytest
import torch

from harness.errors import ModelError
from harness.runtime.models import (
    MODELS,
    DlrmOptions,
    ModelOptions,
    Task,
    build_task,
    fit_options,
)


def on_meta(name: str, **options) -> Task:
    with torch.device("meta"):
        return build_task(name, fit_options(name, ModelOptions(**options)))


@pytest.mark.parametrize(
    ("name", "n_parameters"),
    [
        ("lenet", 61_706),
        ("alexnet", 61_100_840),
        ("vgg16", 138_357_544),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
        ("vit_b_16", 86_567_656),
    ],
)
def test_models_have_their_published_number_of_parameters(name, n_parameters):
    model = on_meta(name).model
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("lenet", "dlrm")])
def test_small_images_go_through(name):
    task = on_meta(name, image_size=64, n_classes=7)
    images = torch.empty((2, *task.inputs[0].shape), device="meta")
    assert task.inputs[0].shape == (3, 64, 64)
    assert task.model(images).shape == (2, 7)


@pytest.mark.parametrize("side", [28, 32])
def test_lenet_takes_mnist_and_cifar_images(side):
    task = on_meta("lenet", image_size=side, n_channels=3)
    assert task.model(torch.empty((2, 3, side, side), device="meta")).shape == (2, 10)


def test_the_datas_image_size_is_used_where_the_model_takes_it():
    assert fit_options("resnet50", ModelOptions(), 32, 3).image_size == 32
    assert fit_options("alexnet", ModelOptions(), 32, 3).image_size == 224
    assert fit_options("lenet", ModelOptions(), 32, 3).n_channels == 3


def test_equal_seeds_draw_equal_weights():
    options = fit_options("lenet", ModelOptions())
    one, two = (build_task("lenet", options, seed=4).model for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = build_task("lenet", options, seed=5).model
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_dropout_can_be_turned_off():
    options = fit_options("alexnet", ModelOptions(dropout=0.0, image_size=64))
    with torch.device("meta"):
        model = build_task("alexnet", options).model
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.0, 0.0]


def test_dlrm_concatenates_its_vectors_by_default():
    task = build_task("dlrm", ModelOptions())
    dense, indices = torch.randn(3, 64), torch.randint(10_000, (3, 8))
    assert task.model(dense, indices).shape == (3, 1)
    assert sum(p.numel() for p in task.model.tables.parameters()) == 8 * 10_000 * 64


def test_dlrm_dot_interaction_multiplies_every_pair_once():
    options = DlrmOptions(bottom_mlp=(4, 2), top_mlp=(5, 1), table_rows=(3, 3), interaction="dot")
    model = build_task("dlrm", ModelOptions(dlrm=options)).model
    vectors = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
    # the dense vector, then 2.1, 3.1 and 3.2
    assert model._interact(vectors).tolist() == [[1.0, 2.0, 11.0, 17.0, 39.0]]


def test_dlrm_sums_several_lookups_of_a_table():
    options = DlrmOptions(bottom_mlp=(1, 2), top_mlp=(4, 1), table_rows=(5,), n_lookups=2)
    model = build_task("dlrm", ModelOptions(dlrm=options)).model
    table = model.tables[0].weight
    found = model.tables[0](torch.tensor([[1, 3]]))
    assert torch.allclose(found[0], table[1] + table[3])
    assert model(torch.zeros(1, 1), torch.tensor([[1, 3]])).shape == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DlrmOptions(top_mlp=(500, 1)), "starts with 500, but 8 tables of width 64"),
        (DlrmOptions(top_mlp=(576, 2)), "ends with 2 outputs"),
        (DlrmOptions(table_rows=()), "0 tables"),
    ],
)
def test_dlrm_refuses_widths_that_do_not_fit(options, message):
    with pytest.raises(ModelError, match=message):
        fit_options("dlrm", ModelOptions(dlrm=options))


def test_losses_are_sums_over_samples():
    task = build_task("lenet", fit_options("lenet", ModelOptions()))
    outputs, targets = torch.zeros(6, 10), torch.arange(6)
    assert float(task.sum_loss(outputs, targets)) == pytest.approx(6 * 2.302585, rel=1e-6)
