import copy
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.domain.graph import Operator
from harness.domain.partition import blocks
from harness.errors import ModelError
from harness.runtime.executor.shards.base import ShardSpec, Wanted
from harness.runtime.executor.shards.batch_norm import make_batch_norm, merge_statistics
from harness.runtime.executor.shards.kinds import make_shard

IMAGES = {"sample": 5, "feature": 4, "height": 6, "width": 3}
ROWS = {"sample": 7, "feature": 4}


class Meeting:
    """Sums what several threads bring, as an all-reduce over their devices would."""

    def __init__(self, n):
        self.tensors = [None] * n
        self.barrier = threading.Barrier(n, timeout=30)

    def member(self, k):
        def reduce(tensor):
            self.tensors[k] = tensor
            self.barrier.wait()
            total = sum(self.tensors)
            self.barrier.wait()
            return total

        return reduce


def run_together(functions):
    results = [None] * len(functions)

    def run(k):
        results[k] = functions[k]()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def spec_of(node, root, shape, block):
    operator = Operator(
        name="0", kind="batch_norm", inputs=["x"], shape=shape, attrs={"module": "0"}
    )
    wanted = [Wanted(shape, block)]
    return ShardSpec(
        operator=operator, node=node, root=root, shape=shape, block=block, wanted=wanted
    )


def traced(module):
    root = fx.symbolic_trace(nn.Sequential(module))
    return root, next(n for n in root.graph.nodes if n.op == "call_module")


def global_shards(module, shape, cuts):
    """(where, shard) of each block; those of equal features meet each other."""
    root, node = traced(module)
    cut = list(blocks(list(shape), list(shape.values()), cuts))
    same = {f: [b for b in cut if b[1] == f] for f in {b[1] for b in cut}}
    meetings = {f: Meeting(len(members)) for f, members in same.items()}
    for block in cut:
        reduce = meetings[block[1]].member(same[block[1]].index(block))
        shard = make_batch_norm(spec_of(node, root, shape, block), reduce)
        yield tuple(slice(*interval) for interval in block), shard


def step(shard, x, gradient):
    x = x.clone().requires_grad_()
    output = shard(x)
    output.backward(gradient)
    return output.detach(), x.grad


def normalised(**options):
    module = nn.BatchNorm2d(4, **options)
    for name in ("weight", "bias"):
        if getattr(module, name) is not None:
            nn.init.normal_(getattr(module, name))
    return module


CASES = [
    (normalised(), IMAGES, {"sample": [1, 2]}),
    (normalised(), IMAGES, {"sample": 2, "feature": [1, 3]}),
    (normalised(), IMAGES, {"height": [1, 4], "width": 3}),
    (normalised(), IMAGES, {"sample": 2, "feature": 2, "height": 2}),
    (normalised(momentum=None), IMAGES, {"sample": 3}),
    (normalised(momentum=0.3, eps=1e-2), IMAGES, {"sample": 3}),
    (normalised(affine=False), IMAGES, {"sample": 3}),
    (normalised(track_running_stats=False), IMAGES, {"sample": 3}),
    (nn.BatchNorm1d(4), ROWS, {"sample": [3, 4], "feature": 2}),
    (nn.BatchNorm1d(4), ROWS, {"sample": 7}),
]


@pytest.mark.parametrize(("module", "shape", "cuts"), CASES)
def test_blocks_by_global_statistics_are_the_whole(module, shape, cuts):
    torch.manual_seed(5)
    module = copy.deepcopy(module).double()
    parts = list(global_shards(module, shape, cuts))
    for _ in range(2):  # the second by running statistics that the first moved
        x, gradient = (torch.randn(*shape.values(), dtype=torch.float64) for _ in range(2))
        module.zero_grad()
        for _, shard in parts:
            shard.zero_grad()
        output, of_x = step(module, x, gradient)
        found = run_together([partial(step, shard, x[at], gradient[at]) for at, shard in parts])
        sums = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
        for (at, shard), (part, of_part) in zip(parts, found, strict=True):
            # Sums of up to 100 terms of size 1, in another order, in float64.
            assert (part - output[at]).abs().max() < 1e-12
            assert (of_part - of_x[at]).abs().max() < 1e-12
            for name, parameter in shard.named_parameters():
                shard.sources[name].take(sums[name]).add_(parameter.grad)
            for name, buffer in shard.named_buffers():
                whole = shard.sources[name].take(module.get_buffer(name))
                assert (buffer - whole).abs().max() < 1e-12
        for name, parameter in module.named_parameters():
            assert (sums[name] - parameter.grad).abs().max() < 1e-12


class _Seen(TorchDispatchMode):
    """Notes what weights the backward of a batch norm is given."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.weights.append(args[2])
        return func(*args, **(kwargs or {}))


def test_backward_without_weights_is_told_ones_which_cuda_needs():
    shape = {"sample": 3, "feature": 4, "height": 2, "width": 2}
    ((_, shard),) = global_shards(nn.BatchNorm2d(4, affine=False), shape, {})
    x = torch.rand(*shape.values(), requires_grad=True)
    with _Seen() as seen:
        shard(x).sum().backward()
    assert [weight.tolist() for weight in seen.weights] == [[1.0] * 4]


def test_evaluation_goes_by_running_statistics():
    module = normalised().double().eval()
    module.running_mean.normal_()
    x = torch.randn(*IMAGES.values(), dtype=torch.float64)
    for at, shard in global_shards(module, IMAGES, {"feature": 2}):
        assert not shard.training
        # The kernel rounds otherwise where images do not lie side by side.
        assert (shard(x[at]) - module(x)[at]).abs().max() < 1e-14


def test_a_block_by_its_own_statistics_is_batch_norm_of_the_block():
    module = normalised().double()
    root, node = traced(module)
    block = ((1, 4), (1, 3), (0, 2), (0, 3))
    x = torch.randn(*IMAGES.values(), dtype=torch.float64)
    shard = make_shard(spec_of(node, root, IMAGES, block))
    at = tuple(slice(*interval) for interval in block)
    mean, variance = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    expected = F.batch_norm(
        x[at], mean, variance, module.weight[1:3], module.bias[1:3], training=True
    )
    assert torch.equal(shard(x[at]), expected)
    assert torch.equal(shard.running_mean, mean)
    assert torch.equal(shard.running_var, variance)
    assert shard.num_batches_tracked == 1


def test_float32_loses_no_more_than_torch_where_the_mean_is_large():
    torch.manual_seed(2)
    x = torch.randn(16, 3, 8, 8) + 300
    exact = F.batch_norm(x.double(), None, None, training=True)
    by_torch = (F.batch_norm(x, None, None, training=True) - exact).abs().max()
    module = nn.BatchNorm2d(3, affine=False)
    shape = dict(zip(IMAGES, x.shape, strict=True))
    parts = list(global_shards(module, shape, {"sample": 4}))
    found = run_together([partial(shard, x[at]) for at, shard in parts])
    ours = max((y - exact[at]).abs().max() for (at, _), y in zip(parts, found, strict=True))
    # Both end in the same float32 kernel, which takes the mean off numbers near 300.
    assert ours <= 1.5 * by_torch


def test_merged_statistics_are_exact_for_blocks_of_unlike_size_and_mean():
    x = torch.tensor([0.0, 2.0, 10.0, 10.0, 10.0, 16.0]).view(6, 1)
    meeting = Meeting(2)
    found = run_together(
        [partial(merge_statistics, y, meeting.member(k)) for k, y in enumerate((x[:2], x[2:]))]
    )
    for mean, variance, n_values in found:
        assert (mean.item(), variance.item(), n_values.item()) == (8.0, 176 / 6, 6)


def test_one_value_per_feature_is_refused():
    shape = {"sample": 1, "feature": 4}
    ((_, shard),) = global_shards(nn.BatchNorm1d(4), shape, {})
    with pytest.raises(ModelError, match="needs 2 values per feature, it gets 1: raise the batch"):
        shard(torch.ones(1, 4))
