"""A module that loops over a long sequence is one operator of an exported graph."""

import torch
from nets import held, users_task
from torch import nn

from harness.runtime.capture.capture import capture
from harness.runtime.tracing import kept_calls
from harness.runtime.tracing.kept_calls import WholeModule


class Decay(nn.Module):
    """A scan from the state that it keeps, which is in float32, whatever its input."""

    kept = None

    def __init__(self):
        super().__init__()
        self.rate, self.out = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)

    def forward(self, x, *, state=None):
        state = torch.zeros_like(x[:, 0]).float() if self.kept is None else self.kept
        seen = []
        for k in range(x.shape[1]):
            state = state * torch.sigmoid(self.rate).float() + x[:, k].float()
            seen.append(state)
        self.kept = state
        return self.out(torch.stack(seen, 1).to(x.dtype)), state


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scans = nn.ModuleList(Decay() for _ in range(3))

    def forward(self, x):
        for scan in self.scans:
            scan.kept = None
            x = torch.tanh(scan(x, state=None)[0])
        return x.mean(1)


def captured(n_steps):
    return held(users_task(Net(), {"x": torch.randn(2, n_steps, 6)}), 8)


def test_a_long_loop_is_one_operator_that_is_cut_by_samples(monkeypatch):
    monkeypatch.setattr(kept_calls, "LONGEST", 40)
    found = captured(n_steps=10)
    whole = [k for k, n in found.nodes.items() if isinstance(n.target, WholeModule)]
    operators = [op for op in found.graph.operators if op.name in whole]
    assert len(operators) == 3
    assert len(found.graph.operators) == 9  # input, three scans and tanh, mean, loss
    assert not any({"mixes_samples", "is_cut_by_samples"} & op.attrs.keys() for op in operators)
    assert operators[0].attrs["parameters"] == [
        "scans.0.rate", "scans.0.out.weight", "scans.0.out.bias",
    ]  # fmt: skip


def test_a_short_loop_is_unrolled():
    assert not any(isinstance(n.target, WholeModule) for n in captured(n_steps=2).nodes.values())


def test_what_follows_the_values_of_a_forward_does_not_make_it_a_loop(monkeypatch):
    class Masked(nn.Linear):
        def forward(self, x):
            ones, y = [torch.ones(6) for _ in range(x.shape[1])], super().forward(x)
            return torch.stack([y[:, 0] * one for one in ones], 1)

    monkeypatch.setattr(kept_calls, "LONGEST", 40)
    model = nn.Sequential(*(Masked(6, 6) for _ in range(3)))
    found = capture(users_task(model, {"input": torch.randn(2, 8, 6)}), 8, "masks")
    assert sum(op.attrs.get("function") == "stack" for op in found.graph.operators) == 3
