"""What weights begin as: norms and biases do nothing, all else is drawn by name."""

import numpy as np
import pytest

from autoshard.engine.initial import InitialWeights
from tests.engine.small_models import graph_of, small_models

MODELS = small_models()


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_biases_begin_without_effect_and_all_else_as_it_is_drawn(name):
    graph = graph_of(MODELS[name])
    weights = InitialWeights(graph=graph, seed=0)
    for instance, block in graph.instances():
        for tensor in block.parameters:
            values, shape = weights(f"{instance}.{tensor.name}"), tuple(graph.sizes[dim] for dim in tensor.dims)
            assert values.shape == shape
            if tensor.name.endswith(".bias"):
                assert not values.any()
            elif len(shape) == 1:
                assert (values == 1).all()
            else:
                assert 0.015 < values.std() < 0.025


def test_the_same_weight_is_the_same_everywhere_and_no_other():
    graph = graph_of(next(iter(MODELS.values())))
    first, again, other = (InitialWeights(graph=graph, seed=seed) for seed in (0, 0, 1))
    up = "layer.0.up.weight"
    assert np.array_equal(first(up), again(up))
    assert not np.array_equal(first(up), other(up)) and not np.array_equal(first(up), first("layer.1.up.weight"))


def test_tied_weights_begin_alike():
    tied = next(model for model in MODELS.values() if model.tied_embeddings)
    weights = InitialWeights(graph=graph_of(tied), seed=0)
    assert np.array_equal(weights("head.0.unembed.weight"), weights("embed.0.embed.weight"))
