"""Counted FLOPs against counts by hand, and against the same model run for real."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.runtime.capture.meta_run import step_flops
from harness.runtime.models import (
    InputSpec,
    ModelOptions,
    Task,
    TextOptions,
    build_task,
    fit_options,
)


def test_counting_without_memory_equals_counting_a_real_step():
    def build():
        return build_task("lenet", fit_options("lenet", ModelOptions()))

    task = build()
    with FlopCounterMode(display=False) as counter:
        task.sum_loss(task.model(torch.randn(3, 1, 28, 28)), torch.tensor([1, 2, 3])).backward()
    assert step_flops(task, 3) == (counter.get_total_flops(), 0.0)


def test_a_vit_step_counts_about_three_forwards():
    def build():
        return build_task("vit_b_16", fit_options("vit_b_16", ModelOptions()))

    with torch.device("meta"):
        task = build()
    # 17.56 GMAC by torchvision's documentation, attention's products not among them.
    flops = step_flops(task, 1)
    assert flops is not None
    assert 3 * 2 * 16.8e9 < flops.total < 3 * 2 * 18.5e9


def test_a_decoder_counts_six_flops_a_parameter_and_token_beside_its_scores():
    sizes = TextOptions(
        sequence_length=16, vocabulary_size=50, n_layers=2, width=32, n_heads=4, mlp_width=64
    )

    def build():
        return build_task("llama", fit_options("llama", ModelOptions(text=sizes)))

    task, tokens = build(), 3 * 16
    flops = step_flops(task, 3)
    assert flops is not None
    # Of 2 layers, forward and twice backward: scores and sums of 16 x 16 positions of width 32.
    assert flops.scores == 3 * 2 * 2 * (2 * 3 * 16 * 16 * 32)
    multiplied = [p for n, p in task.model.named_parameters() if p.dim() > 1 and "tokens" not in n]
    assert flops.total - flops.scores == 6 * tokens * sum(p.numel() for p in multiplied)


def test_a_model_that_needs_values_is_not_counted():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)

    def build():
        return Task(model=Looks(), inputs=(InputSpec(name="x", shape=(8,)),), n_classes=4)

    assert step_flops(build(), 2) is None
