"""Which parts of the experts tokens reach, and what sending a token once to each saves: by enumeration and play."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from autoshard.cost.built_in import built_in
from autoshard.cost.collective import mesh_ring
from autoshard.cost.dispatch import ExpertChoices, TokenSends
from autoshard.layout.layout import Collective
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.spec.kernels import load_kernels
from tests.cost.cases import cluster, model

EP = ("ep",)
DISPATCH = Collective(kind="all_to_all", dim="slots", to_dim="experts", atoms=EP)
COMBINE = Collective(kind="all_to_all", dim="experts", to_dim="slots", atoms=EP)
HEADS = Collective(kind="all_to_all", dim="seq", to_dim="kv_heads", atoms=EP)


def every_choice(choices):
    """Return all sets of experts that a token may choose."""
    size = choices.experts // choices.groups
    allowed = combinations(range(choices.groups), choices.chosen_groups)
    within = ([expert for expert in range(choices.experts) if expert // size in groups] for groups in allowed)
    return [chosen for experts in within for chosen in combinations(experts, choices.chosen)]


@st.composite
def routers(draw):
    groups = draw(st.sampled_from([1, 2, 4]))
    size = draw(st.sampled_from([1, 2, 3] if groups > 1 else [2, 4, 6, 8]))
    chosen_groups = draw(st.integers(1, groups))
    chosen = draw(st.integers(1, min(3, chosen_groups * size)))
    return ExpertChoices(experts=groups * size, chosen=chosen, groups=groups, chosen_groups=chosen_groups)


@given(routers(), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_a_part_is_reached_as_often_as_in_all_choices_that_there_are(choices, parts):
    assume(choices.experts % parts == 0)
    every, size = every_choice(choices), choices.experts // parts
    for part in range(parts if choices.groups == 1 else 1):
        held = set(range(part * size, (part + 1) * size))
        assert choices.reach(parts) == pytest.approx(np.mean([bool(held & {*chosen}) for chosen in every]), abs=1e-12)


def test_the_router_of_a_model_is_read():
    assert ExpertChoices.of(model("deepseek-v3")) == ExpertChoices(experts=256, chosen=8, groups=8, chosen_groups=4)
    assert ExpertChoices.of(model("mixtral-8x7b")) == ExpertChoices(experts=8, chosen=2)


def sends(choices):
    return TokenSends(choices=choices, near_efficiency=0.6, far_efficiency=0.8)


def rings(name, nodes, text, choices):
    place = cluster("h100-80", nodes)
    mesh = mesh_of(Candidate.parse(text, place.num_ranks), model(name), place)
    constants = replace(built_in("h100-80", "te"), near_link_efficiency=0.6, far_link_efficiency=0.8)
    return mesh_ring(place, mesh, EP, constants, sends(choices)), mesh_ring(place, mesh, EP, constants)


@pytest.mark.parametrize(("name", "nodes", "ep"), [("deepseek-v3", 4, 32), ("qwen3-30b-a3b", 2, 16)])
def test_a_rank_sends_what_it_sends_in_a_run_that_is_played(name, nodes, ep):
    """Tokens choose at random; each goes once to each other node, and from there once to each other rank."""
    choices, tokens = ExpertChoices.of(model(name)), 4000
    generator = np.random.default_rng(7)
    scores = generator.random((tokens, choices.groups, choices.experts // choices.groups))
    best = np.argsort(generator.random((tokens, choices.groups)), axis=1)[:, : choices.chosen_groups]
    allowed = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(allowed, best[:, :, None], True, axis=1)
    chosen = np.argsort(-np.where(allowed, scores, -1).reshape(tokens, -1), axis=1)[:, : choices.chosen]
    ranks = chosen * ep // choices.experts
    sent = 0
    for to in ranks:  # of a token of rank 0, whose peers are the first ranks of the other nodes
        for node in {rank // 8 for rank in to}:
            sent += node != 0
            sent += len({rank for rank in to if rank // 8 == node} - {node * 8})
    once, _ = rings(name, nodes, f"tp=1,pp=1,ep={ep}", choices)
    rows = tokens * choices.chosen  # of the message, each of one byte
    assert once.sent_bytes(DISPATCH, rows) == pytest.approx(sent, rel=0.03)


def test_only_rows_of_experts_go_as_tokens():
    once, each = rings("deepseek-v3", 4, "tp=1,pp=1,ep=32", ExpertChoices.of(model("deepseek-v3")))
    assert once.time_s(DISPATCH, 1e8) == once.time_s(COMBINE, 1e8) < 0.5 * each.time_s(DISPATCH, 1e8)
    assert once.sent_bytes(DISPATCH, 1e8) == pytest.approx(each.sent_bytes(DISPATCH, 1e8), rel=0.05), (
        "more inside nodes"
    )
    assert once.time_s(HEADS, 1e8) == each.time_s(HEADS, 1e8) == each.time_s(DISPATCH, 1e8)
    assert once.sent_bytes(HEADS, 1e8) == each.sent_bytes(HEADS, 1e8)


def test_with_one_choice_only_the_second_step_is_new():
    """A token with one expert has no copies to spare: as much leaves the node, and what came goes on inside."""
    ring, each = rings("mixtral-8x7b", 2, "tp=2,pp=1,ep=8", ExpertChoices(experts=8, chosen=1))
    assert ring.tokens and each.exchange and ring.tokens.sent_share
    assert ring.tokens.seconds_per_byte == pytest.approx(each.exchange.seconds_per_byte)
    assert ring.tokens.sent_share == pytest.approx(1 / 2 + 3 / 4)


# 4096 tokens of 7168 numbers in BF16, 8 choices: bytes of copies to ranks (one node) or to nodes, those at home
# counted, by the time of combine: deepseek-ai/DeepEP docs/legacy.md (DeepSeek-V3's router, H800), and of its branch
# hybrid-ep docs/README_Hybrid-EP.md (8 experts a rank, all equally likely). The shares of links are from 8, 32, 64.
PUBLISHED = {
    "deepep in a node": ("deepep", "h800", 8, ExpertChoices.of(model("deepseek-v3")), 158e9, 0.02),
    "deepep on 4 nodes": ("deepep", "h800", 32, ExpertChoices.of(model("deepseek-v3")), 57e9, 0.02),
    "deepep on 8 nodes": ("deepep", "h800", 64, ExpertChoices.of(model("deepseek-v3")), 50e9, 0.03),
    "hybridep in a node": ("hybridep", "b200", 8, ExpertChoices(experts=64, chosen=8), 673.84e9, 0.02),
    "hybridep on 2 nodes": ("hybridep", "h100-80", 16, ExpertChoices(experts=128, chosen=8), 62.95e9, 0.28),
    "hybridep on 4 nodes": ("hybridep", "h100-80", 32, ExpertChoices(experts=256, chosen=8), 57.46e9, 0.02),
    "hybridep on 8 nodes": ("hybridep", "h100-80", 64, ExpertChoices(experts=512, chosen=8), 49.77e9, 0.02),
}


@pytest.mark.parametrize(("library", "name", "ep", "choices", "published", "near"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_speed_that_libraries_publish_is_met(library, name, ep, choices, published, near):
    nodes, token_bytes, table = ep // 8, 4096 * 7168 * 2, load_kernels(f"te+{library}")
    place = cluster(name, nodes)
    tokens = TokenSends.of(model("deepseek-v3"), table)
    assert tokens and TokenSends.of(model("deepseek-v3"), load_kernels("te")) is None
    mesh = mesh_of(Candidate.parse(f"tp=1,pp=1,ep={ep}", ep), model("deepseek-v3"), place)
    ring = mesh_ring(place, mesh, EP, built_in(name, "te"), replace(tokens, choices=choices))
    copies = nodes * choices.reach(nodes) if nodes > 1 else ep * choices.reach(ep)
    measured_s = token_bytes * copies / published
    assert ring.wire_s(COMBINE, token_bytes * choices.chosen) == pytest.approx(measured_s, rel=near)
