"""What a model says beside its operators keeps its meaning under every strategy."""

import pytest
from equivalence_cases import Case
from equivalence_check import check
from equivalence_constructs import CONSTRUCTS
from equivalence_models import small_graph
from equivalence_strategies import named_strategies

NAMES = ("single", "ddp", "tensor parallel", "hybrid", "1f1b", "zero_bubble", "interleaved")
# Operators of these need all samples of a batch at once.
MIXING = ("mixing_function",)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", sorted(CONSTRUCTS.keys() - set(MIXING)))
def test_a_construct_trains_what_one_device_trains(model, name, ranks):
    strategy = named_strategies(small_graph(model), 2, 8)[name]
    finding = check(Case(name=name, model=model, n_ranks=2, strategy=strategy), ranks)
    assert finding.is_equal, finding.text()


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("model", MIXING)
def test_what_mixes_samples_trains_what_one_device_trains(model, name, ranks):
    strategy = named_strategies(small_graph(model), 2, 8)[name]
    finding = check(Case(name=name, model=model, n_ranks=2, strategy=strategy), ranks)
    assert finding.is_equal, finding.text()
