"""Bytes that ranks must be given under another plan: against sets of single numbers, counted rank by rank."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.resuming import resuming
from autoshard.engine.placement import MeshRank
from autoshard.errors import InputError
from autoshard.graph.op import Array
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import KINDS, split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs, step_of
from autoshard.search.request import plan_at
from tests.search.brute_force import ask

Held = dict[str, Array]  # which numbers of a weight

BYTES = 12  # an FP32 master or weight, and two moments

TEXTS = (
    "dp={}",
    "dp={},zero=3",
    "dp={},zero=0,tp=2",
    "tp=4,dp={}",
    "cp=2,dp={}",
    "pp=2,dp={}",
    "pp=2,vp=2,schedule=interleaved,dp={}",
)


@functools.cache
def small(model: str, ranks: int, text: str) -> Plan:
    """Return the plan of a candidate, on as much dp as there are ranks for it."""
    given = Candidate.parse(text.format(1))
    candidate = replace(given, dp=ranks // (given.tp * given.cp * given.pp))
    return plan_at(ask(model, ranks=ranks), candidate)


def numbers(made: Plan, rank: int) -> Held:
    """Mark in every weight of a rank the numbers of which it holds the state."""
    place = MeshRank(mesh=made.mesh, rank=rank, sizes=step_of(made).sizes(1))
    programs, graph, found = plan_programs(made), step_of(made).graph, Held()
    held = [stage for stage in made.stages if stage.rank == place.coordinate("pp")]
    blocks = [f"layer.{stage.first_layer + index}" for stage in held for index in range(stage.num_layers)]
    blocks += ["embed.0"] if held[0].first_layer == 0 else []
    blocks += ["head.0"] if held[-1].first_layer + held[-1].num_layers == made.model.num_layers else []
    tied = {*graph.tied, *graph.tied.values()}
    for block in blocks:
        kind = block.partition(".")[0]
        for tensor in graph.block(kind).parameters:
            layout = programs[kind].results[f"{tensor.name}.sum"].layout
            shape = [place.sizes[dim] for dim in tensor.dims]
            mine = place.block(np.arange(math.prod(shape)).reshape(shape), layout).reshape(-1)
            shards = split_pending(layout.sums)[0] if made.zero else ()
            group = [made.mesh.size(atom) for atom in shards]
            at = [place.coordinate(atom) for atom in shards]
            count, number = math.prod(group), int(np.ravel_multi_index(at, group)) if group else 0
            length = -(-len(mine) // count)
            name = "the tied one" if f"{kind}.{tensor.name}" in tied else f"{block}.{tensor.name}"
            mask = found[name] = np.zeros(math.prod(shape), dtype=bool)
            mask[mine[number * length : (number + 1) * length]] = True
    return found


def test_the_kinds_of_blocks_are_those_that_this_test_knows():
    assert KINDS == ("embed", "layer", "head")


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt"])  # the second has tied embeddings
@settings(max_examples=4)
@given(st.sampled_from(TEXTS), st.sampled_from(TEXTS), st.sampled_from([(4, 4), (4, 8), (8, 4)]))
def test_bytes_are_those_of_sets_of_numbers(model: str, a: str, b: str, ranks: tuple[int, int]):
    old, new = small(model, ranks[0], a), small(model, ranks[1], b)
    found = resuming(old, new)
    before = [numbers(old, rank) for rank in range(ranks[0])] + [Held()] * ranks[1]
    after = [numbers(new, rank) for rank in range(ranks[1])]
    pairs = [
        (mask, had.get(name, False)) for mine, had in zip(after, before, strict=False) for name, mask in mine.items()
    ]
    assert found.held_bytes == BYTES * sum(np.count_nonzero(mask) for mask, _ in pairs)
    assert found.lacking_bytes == BYTES * sum(np.count_nonzero(mask & np.logical_not(had)) for mask, had in pairs)
    assert found.state_bytes == BYTES * new.model.num_parameters <= found.held_bytes


def test_nothing_is_missing_under_the_same_plan_and_all_where_there_was_no_rank():
    made = small("tiny-llama", 4, "pp=2,dp={}")
    assert resuming(made, made).lacking_bytes == 0
    grown = resuming(made, small("tiny-llama", 8, "pp=2,dp={}"))
    assert grown.busiest_node_bytes == grown.lacking_bytes > 0
    assert grown.send_s is None  # one machine has no network


def test_another_precision_or_optimizer_has_another_state():
    made = small("tiny-llama", 4, "dp={}")
    plain = replace(made, workload=replace(made.workload, optimizer="sgd"))
    assert resuming(made, made).state_bytes == 3 * resuming(plain, plain).state_bytes


def test_the_state_of_another_model_is_of_no_use():
    with pytest.raises(InputError, match="is not the tiny-llama whose state there is"):
        resuming(small("tiny-llama", 4, "dp={}"), small("tiny-gpt", 4, "dp={}"))
