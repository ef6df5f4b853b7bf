"""What an operator gives must be finite, or on the way to a loss that is."""

from contextlib import nullcontext

import pytest
import torch

from harness.errors import VerificationError
from harness.runtime.profiling.subgraph import OperatorCall
from harness.runtime.profiling.verify import verify


def call(function, *args):
    return OperatorCall(function, args, {})


def test_finite_values_are_never_asked_about():
    x = torch.ones(4, requires_grad=True)
    kept = verify(call(torch.exp, x), "operator 'exp'", nullcontext, lambda: pytest.fail("asked"))
    assert kept == 16


@pytest.mark.parametrize(
    ("function", "value", "kind"), [(torch.log, 0.0, "output"), (torch.sqrt, 0.0, "gradient")]
)
def test_other_values_are_wrong_unless_the_loss_is_finite(function, value, kind):
    x = torch.full((4,), value, requires_grad=True)
    with pytest.raises(VerificationError, match=f"operator 'f' gives {kind}s that are not finite"):
        verify(call(function, x), "operator 'f'", nullcontext, lambda: False)
    verify(call(function, x), "operator 'f'", nullcontext, lambda: True)
