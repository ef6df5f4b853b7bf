"""Models of text train what one device trains, by whatever cut; sequences have unlike lengths."""

from functools import cache

import pytest
from equivalence_cases import Case
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond
from equivalence_models import TEXT_MODELS, small_graph
from equivalence_reference import train_alone
from equivalence_strategies import named_strategies

STRATEGIES = ("ddp", "tensor parallel", "hybrid", "zero_bubble")


@cache
def strategies(model):
    return named_strategies(small_graph(model), 2, 8)


def make_case(model, name):
    return Case(name=name, model=model, n_ranks=2, strategy=strategies(model)[name])


@cache
def trained_alone(model):
    """By whole batches, as a user trains: the loss is a mean over all tokens that count."""
    return train_alone(make_case(model, "single"))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_model_of_text_trains_what_one_device_trains(model, name, ranks):
    found = ranks.train(make_case(model, name))
    assert first_beyond(found, trained_alone(model), FLOAT64_TOLERANCES["sgd"]) is None
