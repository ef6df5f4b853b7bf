"""What a model says beside its operators keeps its meaning under every strategy."""

import pytest
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond
from equivalence_named import make_case, trained_alone
from equivalence_ranks import local_world
from equivalence_training import make_engine

from harness.errors import StrategyError

# hybrid plans each operator as one of these does.
WITHOUT_MICROBATCHES = ("ddp", "tensor parallel")
WITH_MICROBATCHES = ("zero_bubble", "interleaved")
# Models of the zoo; operators of the second need all samples of a batch at once.
CONSTRUCTS = (
    "pair_function", "straight_through", "no_grad_branch", "hooked_weights", "complex_values",
    "placed_features",
)  # fmt: skip
MIXING = ("hooked_module", "buffer_assigned", "thirds_of_batch")


def assert_equal(model, name, ranks):
    found = ranks.train(make_case(model, name))
    assert first_beyond(found, trained_alone(model), FLOAT64_TOLERANCES["sgd"]) is None


@pytest.mark.parametrize("name", WITHOUT_MICROBATCHES + WITH_MICROBATCHES)
@pytest.mark.parametrize("model", CONSTRUCTS)
def test_a_construct_trains_what_one_device_trains(model, name, ranks):
    assert_equal(model, name, ranks)


@pytest.mark.parametrize("name", WITHOUT_MICROBATCHES)
@pytest.mark.parametrize("model", MIXING)
def test_what_mixes_samples_trains_what_one_device_trains(model, name, ranks):
    assert_equal(model, name, ranks)


@pytest.mark.parametrize("name", WITH_MICROBATCHES)
@pytest.mark.parametrize("model", MIXING)
def test_what_mixes_samples_refuses_microbatches(model, name):
    case = make_case(model, name)
    with pytest.raises(StrategyError, match="needs all samples of a batch at once"):
        make_engine(case, case.make_task(), local_world(0, 2))
