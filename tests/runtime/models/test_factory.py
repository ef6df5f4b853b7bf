"""A user's own model, also where it imports torchvision by itself, in a process of its own."""

import sys

import pytest
import torch
from launching import ROOT, completed
from nets import users_task
from torch import nn

from harness.errors import ModelError
from harness.runtime.models import fit_options
from harness.runtime.models.factory import task_from_factory, weights_on_meta
from harness.runtime.models.task import ModelOptions

OPTIONS = ModelOptions(n_classes=10, n_channels=3, image_size=32)
# Builds models by the names that it is given, each in a fork that has not imported torchvision.
BUILD = """
import os, sys
from harness.runtime.models.factory import task_from_factory
from harness.runtime.models.task import ModelOptions

for name in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    task = task_from_factory(name, ModelOptions(n_classes=10, n_channels=3, image_size=32))
    print(type(task.model).__name__, sum(p.numel() for p in task.model.parameters()), flush=True)
    os._exit(0)
"""
IN_THE_FACTORY = """
def net(n_classes):
    import torchvision; return torchvision.models.resnet18(weights=None, num_classes=n_classes)
"""
AT_THE_TOP = """
from torchvision.models import resnet18

def net(n_classes):
    return resnet18(num_classes=n_classes)
"""
BY_A_LIBRARY = """
import a_library

def net(n_classes):
    return a_library.resnet(n_classes)
"""
LIBRARY = """
import torchvision.transforms
from torchvision.ops import misc

def resnet(n):
    from torchvision import models
    return models.resnet18(num_classes=n)
"""


LAZY = """
from torch import nn

def net(n_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(n_classes))
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Writes modules of a user's own, which are forgotten afterwards."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)

    write("a_library", LIBRARY)
    yield write
    for name in set(sys.modules) - known:
        if name.startswith("users_"):
            del sys.modules[name]


def test_a_factory_may_import_torchvision_by_itself(tmp_path, user):
    texts = {"in_it": IN_THE_FACTORY, "at_the_top": AT_THE_TOP, "by_a_library": BY_A_LIBRARY}
    for name, text in texts.items():
        user(f"users_{name}", text)
    names, paths = [f"users_{name}:net" for name in texts], f"{ROOT}:{tmp_path}"
    done = completed(sys.executable, "-c", BUILD, *names, PYTHONPATH=paths)
    assert done.stdout.splitlines() == ["ResNet 11181642"] * 3, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("users_none:net", None, "No module named 'users_none'; start in the directory that"),
        ("users_.a:net", None, "No module named 'users_'; start in the directory that holds"),
        ("users_lib:net", "import no_such_lib", "no_such_lib'; users_lib needs it: install it"),
        ("users_sub:net", "import json.nothing", "nothing'; users_sub needs it: install it"),
        ("nets/users_x.py:net", None, "names a file: write nets.users_x:net, and start in the"),
        (
            "users_made:net",
            "from torch import nn\nnet = nn.Linear(1, 1)",
            "not a function that makes",
        ),
        (
            "users_still:net",
            "from torch import nn\ndef net(): return nn.Flatten()",
            "none of the model's 0 parameters is trained: set requires_grad",
        ),
        (
            "users_list:net",
            "def net(): return []",
            "is of type list, not an nn.Module: give the model, or",
        ),
        ("users_args:net", "def net(width): pass", "'width'; give its arguments defaults"),
        ("users_exit:net", "import sys\nsys.exit(3)", "exits with status 3: put what parses flags"),
        (
            "users_dtype:net",
            "import torch\ntorch.set_default_dtype(torch.float64)\ndef net(): pass",
            "changes torch's default dtype from torch.float32 to torch.float64 for all",
        ),
        (
            "users_mode:net",
            "import torch\ndef net(): torch.set_grad_enabled(False)",
            "changes torch's gradient mode from True to False",
        ),
        ("users_empty:", "", "does not name a factory"),
        ("users_empty:net", "", "has no callable 'net'"),
        ("users_lazy:net", LAZY, "module '1' (LazyLinear) has no weights before its first batch"),
    ],
)
def test_what_a_factory_lacks_is_said_with_its_remedy(name, text, message, user):
    if text is not None:
        user(name.partition(":")[0], text)
    with pytest.raises(ModelError) as caught:
        task_from_factory(name, OPTIONS)
    assert message in str(caught.value)
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)


@pytest.mark.parametrize(
    ("asked", "weight", "side"),
    [({}, (2, 3), 8), ({"n_classes": 5, "n_channels": 1, "image_size": 4}, (5, 1), 4)],
)
def test_a_factorys_defaults_count_where_flags_and_data_say_nothing(asked, weight, side, user):
    user(
        "users_default",
        "from torch import nn\ndef net(n_channels, n_classes=2, image_size=8):\n"
        "    pool = nn.AvgPool2d(image_size), nn.Flatten()\n"
        "    return nn.Sequential(*pool, nn.Linear(n_channels, n_classes))",
    )
    options = fit_options("users_default:net", ModelOptions(**asked))
    task = task_from_factory("users_default:net", options)
    assert task.n_classes == weight[0]
    assert [tuple(p.shape) for p in task.model.parameters()] == [weight, weight[:1]]
    assert [spec.shape for spec in task.inputs] == [(weight[1], side, side)]


def test_an_error_of_the_users_own_is_handed_on(user):
    user("users_wrong", "def net(n_classes):\n    return len(n_classes)")
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        task_from_factory("users_wrong:net", OPTIONS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.last.weight = self.embedding.weight
        self.token = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
        self.register_buffer("positions", torch.arange(3))


def test_parameters_are_on_meta_and_all_else_is_real():
    with weights_on_meta():
        net = Net()
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert net.last.weight is net.embedding.weight
    assert not net.token.requires_grad
    assert (net.rates, net.positions.tolist()) == ([0.0, 0.5, 1.0], [0, 1, 2])
    assert nn.Linear(2, 2).weight.device.type == "cpu"


class Looked(nn.Module):
    """Looks up columns in tables of their own, a view of one input, and a changed one."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in (3, 7, 9))

    def forward(self, columns, view, changed):
        few, many, others = self.tables
        found = few(columns[:, 0]) + many(columns[:, 1])
        return found + others(view.view(-1)).view(-1, 4) + others(changed.clamp(max=8))


def test_inputs_know_the_rows_of_the_embedding_that_looks_them_up():
    numbers = torch.arange(2)
    example = {"columns": torch.tensor([[1, 6], [2, 5]]), "view": numbers, "changed": numbers * 20}
    task = users_task(Looked(), example)
    assert [spec.n_rows for spec in task.inputs] == [None, 9, None]
    with pytest.raises(ModelError, match="has view up to 20, and the embedding has 9 rows"):
        users_task(Looked(), example | {"view": numbers * 20})


class Computed(nn.Module):
    """A layer, and what is computed of its output."""

    def __init__(self, compute):
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 3), compute

    def forward(self, x):
        return self.compute(self.layer(x))


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (None, r"'NoneType' object is not callable, as an attribute or an input that .* is None\)"),
        (lambda y: y.sum().detach(), "of shape .. for 2 samples: return one row of real logits"),
    ],
)
def test_a_forward_that_cannot_be_trained_is_refused_with_its_cause(compute, message):
    with pytest.raises(ModelError, match=message):
        users_task(Computed(compute), (torch.ones(2, 4),))


@pytest.mark.parametrize(
    ("compute", "construct"),
    [
        (lambda y: y if y.sum() > 0 else -y, "reads the value of a tensor"),
        (lambda y: y[y[:, 0] > 0], "the shape of a tensor depends on values"),
    ],
)
def test_a_forward_that_reads_values_is_refused_as_by_capture_where_weights_are_on_meta(
    compute, construct
):
    with weights_on_meta():
        net = Computed(compute)
    with pytest.raises(ModelError, match=f"cannot be captured: .*{construct}.* --engine torch"):
        users_task(net, (torch.ones(2, 4),))


def test_a_mean_of_all_batches_asks_for_no_count_of_them_where_weights_are_on_meta():
    with weights_on_meta():
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    assert users_task(net, (torch.ones(2, 4),)).n_classes == 3


def test_an_attribute_that_copies_a_weight_is_as_fake_as_the_weight_on_meta():
    class Anchored(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.first = self.weight.detach().clone()

        def forward(self, x):
            return super().forward(x) + x @ self.first.t()

    with weights_on_meta():
        net = Anchored()
    assert users_task(net, (torch.ones(2, 4),)).n_classes == 3
