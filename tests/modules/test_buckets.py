"""Gradients of a sharded module are summed in buckets, while others are computed; the numbers are the same."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import autoshard.modules.running.weights as weights
from autoshard.engine.torch.execution import RankStep
from autoshard.modules.shard import shard_module
from autoshard.modules.sharded import ShardedModule
from autoshard.spec.cluster_catalogue import load_cluster
from tests.modules.comparing import cut_on_ranks, devices_of, difference
from tests.modules.test_compiling import batch, stack
from tests.ranks.spawn import each_rank, on_ranks
from tests.slower import rest_is_slow

LAYERS = 3
UNDER_WAY = "gradients under way"


def sharded(plain: torch.nn.Module, seed: int, bucket_bytes: int) -> torch.nn.Module:
    """Let a module run with random cuts on two ranks."""
    found = shard_module(plain, [batch()], load_cluster("local", ranks=2), "a=2", precision="fp32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "BUCKET_BYTES", bucket_bytes)
        return cut_on_ranks(copy.deepcopy(plain), found, seed, devices_of("a=2"))


def steps(module: torch.nn.Module) -> Sequence[RankStep]:
    assert isinstance(module, ShardedModule)
    return module.autoshard.first.program.trained.backward


def begun(module: torch.nn.Module) -> list[int]:
    """Where in the backward pass sums begin."""
    return [number for number, step in enumerate(steps(module)) if step.writes[0].startswith(UNDER_WAY)]


def sums(seed: int, bucket_bytes: int) -> tuple[list[int], list[int], int, float]:
    """Where sums begin, where they are waited for, of how many steps, and the difference from the plain module."""
    plain = stack(LAYERS)
    module = sharded(plain, seed, bucket_bytes)
    listed = steps(module)
    waits = [number for number, step in enumerate(listed) if step.reads[0].startswith(UNDER_WAY)]
    return begun(module), waits, len(listed), difference(plain, module, [batch()])


@pytest.mark.parametrize("seed", rest_is_slow(range(3)))
def test_buckets_give_the_gradients_of_the_plain_module_with_fewer_collectives(seed: int):
    for alone, together in zip(on_ranks(2, sums, seed, 1), on_ranks(2, sums, seed, 2**20), strict=True):
        for begins, waits, count, worst in (alone, together):
            assert worst < 1e-12
            assert waits == [*range(count - len(waits), count)] and len(begins) == len(waits)
        assert len(alone[0]) >= 4 and len(together[0]) <= 3
        assert alone[0][0] < alone[2] / 2, "the first sum begins before half of the gradients are computed"


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [False, True])
@each_rank(2)
def test_a_gradient_that_goes_to_another_weight_is_seen(swaps: bool):
    """Two gradients of one bucket are exchanged."""
    true, plain = weights.GradientBucket.arrive, stack(LAYERS)

    def arrive(bucket: weights.GradientBucket) -> RankStep:
        step, shapes = true(bucket), [weight.shape for weight in bucket.weights]
        same = [number for number, shape in enumerate(shapes) if shape == shapes[0]]
        names = list(step.writes)
        names[same[0]], names[same[-1]] = names[same[-1]], names[same[0]]
        return replace(step, writes=tuple(names)) if swaps else step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights.GradientBucket, "arrive", arrive)
        module = sharded(plain, 0, 2**20)
    worst = difference(plain, module, [batch()])
    assert worst > 1e-3 if swaps else worst < 1e-12
