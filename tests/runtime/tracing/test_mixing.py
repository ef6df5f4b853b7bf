"""What mixes the samples of a batch is found by running it, and nothing else is taken for it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from equivalence_models import small_task
from made_graphs import replicated_pipeline, small_cluster
from nets import task_on
from torch import nn
from zoo import ZOO
from zoo.base import WIDTH, Net
from zoo.samples import SAMPLES

import harness.runtime.tracing.mixing
from harness.domain.strategy import validate
from harness.errors import StrategyError
from harness.plan import builders
from harness.runtime.capture.capture import capture
from harness.runtime.models.attention import GroupedAttention


def mixing(function):
    class Made(Net):
        def middle(self, x):
            return function(self.second(x))

    task = ZOO["plain"].task()
    return mixing_of(replace(task, model=Made().double()))


def mixing_of(task, batch=8):
    graph = capture(task, batch, "model").graph
    found = [op for op in graph.operators if op.attrs.get("mixes_samples")]
    assert all(op.attrs["is_cut_by_samples"] is False for op in found)
    return [op.attrs["function"] for op in found]


MIXED = {
    "softmax_over_batch": ["softmax"],
    "roll_batch": ["roll"],
    "flip_batch": ["flip"],
    "cumsum_batch": ["cumsum"],
    "counted_batch": ["cumsum"],
    "sort_batch": ["sort"],
    "centred_batch": ["mean"],
    "mean_of_all": ["mean"],
    "largest_of_batch": ["amax"],
    "standardised_batch": ["mean", "var"],
    "attended_batch": ["matmul", "softmax", "matmul"],
    "half_detached": ["getitem", "detach", "getitem", "cat"],
    "thirds_of_batch": ["tensor_split", "mul", "mul", "mul", "cat"],
    "contrasted_batch": ["einsum", "mean"],
    "shuffled_batch": ["arange", "getitem"],
    "shifted_batch": ["getitem", "getitem", "cat"],
    "transposed_batch": ["reshape"],
    "scaled_by_batch": ["mul"],
    "time_folded": [],
    "functional_batch_norm": [],  # its statistics are the executor's concern
}


@pytest.mark.parametrize("name", MIXED)
def test_operators_that_mix_samples_are_marked(name):
    assert mixing_of(SAMPLES[name].task()) == MIXED[name]


def test_a_lookup_of_samples_in_integers_is_marked():
    def masked(x, order=lambda rows: rows):
        rows, columns = order(torch.arange(x.shape[0])).unsqueeze(1), torch.arange(WIDTH)
        return x * (x > 0).long()[rows, columns]

    assert mixing(lambda x: masked(x, torch.flipud)) == ["arange", "flipud", "getitem"]
    assert mixing(masked) == []  # each sample is looked up for itself


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x.softmax(0), ["softmax"]),
        (lambda x: x - x.mean(), ["mean"]),
        (lambda x: x.flatten(1) @ x.flatten(1).T @ x.flatten(1), ["matmul", "matmul"]),
        (lambda x: x.softmax(2), []),
        (lambda x: x - x.mean(1, keepdim=True), []),
        (lambda x: x.transpose(1, 2).reshape(x.shape[0], 4, -1, WIDTH), []),
    ],
)
def test_operators_on_too_many_elements_are_run_smaller(monkeypatch, function, found):
    monkeypatch.setattr(harness.runtime.tracing.mixing, "_MOST_ELEMENTS", 1000)

    def wide(x):
        return function(x.unsqueeze(2).expand(-1, -1, 64)).flatten(1)[:, :WIDTH]

    assert mixing(wide) == found


@pytest.mark.parametrize(
    ("name", "found"), [("habit_batchattention", ["MultiheadAttention"]), ("unet", [])]
)
def test_modules_on_too_many_elements_keep_the_sizes_of_their_weights(monkeypatch, name, found):
    monkeypatch.setattr(harness.runtime.tracing.mixing, "_MOST_ELEMENTS", 1)
    monkeypatch.setattr(harness.runtime.tracing.mixing, "_LARGEST_KEPT", 4)
    assert mixing_of(ZOO[name].task()) == found


@pytest.mark.parametrize("name", ["by_frequency", "normed_rows"])
def test_lookups_whose_rows_depend_on_the_batch_are_marked(name):
    assert mixing_of(small_task(name)) == ["Embedding"]


def test_lookups_by_a_function_whose_rows_depend_on_the_batch_are_marked():
    table = torch.randn(WIDTH, WIDTH, dtype=torch.float64)

    def look_up(x, **named):
        return F.embedding(x.abs().long().clamp(max=1), table, **named)

    assert mixing(lambda x: x + look_up(x, scale_grad_by_freq=True).sum(1)) == ["embedding"]
    assert mixing(lambda x: x + look_up(x, padding_idx=0).sum(1)) == []


def attend_to_samples(x):
    keys = x.view(1, 1, -1, WIDTH)
    return F.scaled_dot_product_attention(x.view(-1, 1, 1, WIDTH), keys, keys).flatten(1)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (attend_to_samples, ["scaled_dot_product_attention"]),
        (lambda x: x + F.embedding((x > 0).long()[:, :2], x).sum(1), ["embedding"]),
        (lambda x: x + F.embedding_bag((x > 0).long(), x), ["embedding_bag"]),
        (lambda x: F.layer_norm(x, x.shape), ["layer_norm"]),
        (lambda x: F.layer_norm(x, x.shape[1:]), []),
    ],
)
def test_known_kinds_mix_the_samples_of_their_other_arguments(function, found):
    assert mixing(function) == found


class Root(torch.autograd.Function):
    """Has a result for x of 0 and more."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.saved_tensors[0].clamp(min=0.01).sqrt() / 2


APART = {
    "function of a part of all numbers": lambda x: Root.apply(x.sigmoid()),
    "softmax of features": lambda x: torch.softmax(x, dim=-1),
    "flip of features": lambda x: x.flip(1),
    "cumsum of features": lambda x: x.cumsum(-1),
    "sort of features": lambda x: x.sort(dim=1)[0],
    "matmul by a constant": lambda x: x @ torch.ones(WIDTH, WIDTH, dtype=x.dtype),
    "outer product of each": lambda x: (x[:, :, None] @ x[:, None, :]).mean(1),
    "zeros of the batch's size": lambda x: x + x.new_zeros(x.shape[0], WIDTH),
    "mean of features": lambda x: x - x.mean(1, keepdim=True),
    "size of features": lambda x: x / x.shape[1] ** 0.5,
    "rows of parts": lambda x: x.reshape(-1, 3).tanh().reshape(-1, WIDTH),
    "turned and back": lambda x: F.softmax(x.t(), dim=0).t(),
    "split and joined": lambda x: torch.cat(x.chunk(2, dim=1), dim=1),
    "normalised": lambda x: F.normalize(x, dim=1),
    "one position of each": lambda x: x[:, None].expand(-1, 3, -1)[
        torch.arange(x.shape[0]), x[:, :3].argmax(1)
    ],
    "fields of a tuple": lambda x: x * x.max(dim=1, keepdim=True).values,
}


@pytest.mark.parametrize("name", APART)
def test_operators_that_keep_samples_apart_are_not_marked(name):
    assert mixing(APART[name]) == []


@pytest.mark.parametrize(
    "name", ["vit", "branchy", "lstm_time_first", "dlrm_dot", "merged_rows", "exported"]
)
def test_usual_models_keep_samples_apart(name):
    assert mixing_of(small_task(name)) == []


@pytest.mark.parametrize(("batch_first", "is_mixing"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("layer", "sizes", "n_read"),
    [
        (nn.MultiheadAttention, (4, 2), 3),
        (nn.LSTM, (4, 4, 2), 1),
        (nn.TransformerEncoderLayer, (4, 2, 4), 1),
    ],
)
def test_a_layer_that_takes_samples_for_steps_mixes_them(
    layer, sizes, n_read, batch_first, is_mixing
):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(*sizes, batch_first=batch_first, dropout=0.5)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            found = self.layer(*[x] * n_read)
            return self.head((found if isinstance(found, torch.Tensor) else found[0]).mean(1))

    assert bool(mixing_of(task_on(Steps(), 5, 4))) == is_mixing


class Heads(nn.Module):
    """An attention of one head, over samples or steps."""

    def __init__(self, *, is_turned, is_joined):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head, self.is_turned = nn.Linear(8, 3), is_turned
        self.n_heads = 2 if is_joined else 1  # an attention of one head is not joined

    def forward(self, x):
        x = x.transpose(0, 1) if self.is_turned else x
        sizes = (x.shape[0], -1, self.n_heads, 8 // self.n_heads)
        q, k, v = (part(x).view(sizes).transpose(1, 2) for part in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        y = self.out(made.transpose(1, 2).reshape(x.shape[0], -1, 8))
        return self.head((y.transpose(0, 1) if self.is_turned else y).mean(1))


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("is_joined", [False, True])
def test_attention_over_samples_mixes_them_also_where_it_drops_some(is_turned, is_joined):
    found = mixing_of(task_on(Heads(is_turned=is_turned, is_joined=is_joined), 5, 8))
    name = "attention_region" if is_joined else "scaled_dot_product_attention"
    assert found == ([name] if is_turned else [])


@pytest.mark.parametrize("is_turned", [False, True])
def test_attention_over_samples_mixes_them(is_turned):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = GroupedAttention(4, 2), nn.Linear(4, 3)

        def forward(self, x):
            x = x.transpose(0, 1) if is_turned else x
            y = self.attention(x, x)
            return self.head((y.transpose(0, 1) if is_turned else y).mean(1))

    assert mixing_of(task_on(Attends(), 5, 4)) == (["GroupedAttention"] if is_turned else [])


@pytest.mark.parametrize(("dim", "found"), [(0, ["softmax"]), (1, [])])
@pytest.mark.parametrize("multiple", [2, 4])
def test_mixing_is_found_in_a_model_that_takes_multiples_of_a_size_alone(multiple, dim, found):
    def function(x):
        groups = x.reshape(x.shape[0] // multiple, multiple, WIDTH)
        return groups.reshape(-1, WIDTH).softmax(dim)

    assert mixing(function) == found


def test_values_that_are_compared_with_the_batch_size_mix_samples():
    assert mixing(lambda x: x * (torch.arange(WIDTH) < x.shape[0])) == ["lt"]


def test_a_number_that_grows_in_large_batches_alone_mixes_samples():
    assert mixing(lambda x: x * max(x.shape[0], 6)) == ["mul"]
    assert mixing(lambda x: x * torch.full((1,), max(len(x), 6)).to(x)) == ["full"]
    assert mixing(lambda x: x * max(x.shape[0], 8)) == []


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_function_mixes_samples_along_their_dim_alone(dims):
    names = ["softmax", "cumsum", "logsumexp", "flip"]
    cases = [(name, dim) for name in names for dim in range(3)]

    def function(x):
        y = x.reshape(-1, 3, 4).permute(*dims)
        made = [getattr(torch, name)(y, (dim,) if name == "flip" else dim) for name, dim in cases]
        return x * sum(one.sum() for one in made)  # which mixes too, and comes last

    found = mixing(function)
    expected = [name for name, dim in cases if dims[dim] == 0]
    assert found[:4] == expected
    assert set(found[4:]) <= {"sum"}


def test_microbatches_are_refused_by_the_operators_name():
    graph = capture(SAMPLES["roll_batch"].task(), 8, "roll").graph
    cluster = small_cluster(2)
    strategy = replicated_pipeline(graph, 8, [[0], [1]], n_microbatches=2)
    with pytest.raises(StrategyError, match=r"operator 'roll' \(roll\) needs all samples"):
        validate(strategy, graph, cluster)
    validate(builders.ddp(graph, cluster, 8), graph, cluster)
    assert builders.ddp(graph, cluster, 8).operators["roll"].partition == {}


def test_an_instance_norm_with_running_statistics_is_kept_whole():
    assert mixing_of(ZOO["habit_instance_norm"].task()) == ["InstanceNorm2d"]


def test_a_loss_of_all_pairs_of_samples_is_not_cut_by_samples():
    class Pairs(Net):
        def forward(self, x):
            one = super().forward(x)
            return one @ one.tanh().T

    task = replace(ZOO["plain"].task(), model=Pairs().double())
    graph = capture(task, 8, "pairs").graph
    assert graph.operators[-1].attrs["is_cut_by_samples"] is False
    assert mixing_of(task) == ["matmul"]
