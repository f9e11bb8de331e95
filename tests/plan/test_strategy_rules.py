"""What each axis is for, and what engines run: every place that a Rule refuses is told with what to do instead."""

import pytest

from autoshard.plan.rules.strategy import (
    AXIS_RULES,
    NXD_ROUTER,
    NXD_RULES,
    WITH_SP,
    WITHOUT_SP,
    Place,
    strategy_rules,
)

QUERY = ("batch", "seq", "hidden", "kv_heads", "q_group", "head_dim")
PRODUCT = {"dims": QUERY, "matrix": ("kv_heads", "q_group", "head_dim", "hidden")}
KEYS = {"dims": QUERY, "matrix": ("kv_heads", "head_dim", "hidden")}
NORM = {"dims": ("batch", "seq", "hidden"), "matrix": ()}
EXPERT = {"dims": ("experts", "slots", "ffn", "hidden"), "matrix": ("experts", "ffn", "hidden")}
ROUTER = {"dims": ("batch", "seq", "hidden", "experts"), "matrix": ("hidden", "experts")}
DISPATCH = {"dims": ("batch", "seq", "hidden", "experts", "slots", "choices"), "matrix": ()}
OWN_KEYS = {"dims": ("batch", "seq", "hidden", "kv_heads", "head_dim"), "matrix": ("kv_heads", "head_dim", "hidden")}
POSITIONS = {"dims": ("positions", "hidden", "seq"), "matrix": ("positions", "hidden")}
LOGITS = {"dims": ("batch", "seq", "vocab"), "matrix": ()}
TOKENS = {"dims": ("batch", "seq"), "matrix": ()}
TABLE = {"dims": ("vocab", "hidden", "batch", "seq"), "matrix": ("vocab", "hidden")}


def refused(rules, atom, dim, *, dims, matrix):
    place = Place(op="some", dims=dims, matrix=matrix, atom=atom, dim=dim)
    return [found.rule_id for rule in rules if (found := rule.rejection(place))]


@pytest.mark.parametrize(
    ("atom", "dim", "op", "why"),
    [
        ("edp", "batch", NORM, []),
        ("edp", None, NORM, ["dp-batch"]),
        ("edp", "hidden", PRODUCT, ["dp-batch"]),
        ("edp", "slots", EXPERT, []),
        ("ep", "experts", EXPERT, []),
        ("ep", "slots", EXPERT, ["dp-batch"]),
        ("ep", "batch", ROUTER, []),
        ("cp", "seq", PRODUCT, []),
        ("cp", None, PRODUCT, ["cp-sequence"]),
        ("cp", "slots", EXPERT, []),
        ("kv", "kv_heads", PRODUCT, []),
        ("kv", "hidden", PRODUCT, []),
        ("kv", "seq", PRODUCT, ["tp-tokens"]),
        ("kv", "batch", NORM, ["tp-tokens"]),
        ("kv", "experts", EXPERT, ["tp-tokens"]),
        ("kv", None, PRODUCT, ["tp-weights"]),
        ("kv", None, KEYS, ["tp-weights"]),
        ("rep", None, KEYS, []),
        ("rep", None, PRODUCT, ["tp-weights"]),
        ("kv", "seq", ROUTER, []),
        ("kv", None, ROUTER, []),
        ("kv", "hidden", NORM, ["tp-hidden"]),
        ("kv", "vocab", TABLE, []),
        ("kv", "hidden", TABLE, ["tp-vocabulary"]),
    ],
)
def test_an_axis_is_for_one_thing(atom, dim, op, why):
    assert refused(AXIS_RULES, atom, dim, **op) == why


@pytest.mark.parametrize(
    ("atom", "dim", "op", "why"),
    [
        ("kv", "seq", NORM, []),
        ("kv", "seq", ROUTER, []),
        ("kv", "seq", DISPATCH, ["nxd-sequence"]),
        ("kv", "hidden", PRODUCT, ["nxd-weights", "nxd-heads"]),
        ("kv", "head_dim", KEYS, ["nxd-weights", "nxd-heads"]),
        ("kv", "ffn", EXPERT, []),
        ("edp", "hidden", PRODUCT, []),
        ("kv", "positions", POSITIONS, ["nxd-weights"]),
        ("kv", "seq", POSITIONS, []),
        ("kv", "kv_heads", OWN_KEYS, []),
        ("kv", None, OWN_KEYS, ["nxd-heads"]),
        ("rep", None, OWN_KEYS, []),
        ("rep", "kv_heads", OWN_KEYS, ["nxd-heads"]),
        ("rep", "q_group", PRODUCT, []),
        ("rep", "kv_heads", PRODUCT, ["nxd-heads"]),
        ("kv", "vocab", LOGITS, []),
        ("kv", None, LOGITS, ["nxd-loss"]),
        ("kv", None, TOKENS, []),
        ("kv", "seq", TOKENS, ["nxd-loss"]),
    ],
)
def test_what_nxd_has_no_layer_for(atom, dim, op, why):
    assert refused(NXD_RULES, atom, dim, **op) == why


def test_sequence_parallelism_is_a_promise_about_what_lies_between_products():
    assert refused([WITH_SP], "kv", None, **NORM) == ["sp"] and refused([WITH_SP], "kv", "seq", **NORM) == []
    assert refused([WITHOUT_SP], "kv", "seq", **NORM) == ["sp"] and refused([WITHOUT_SP], "kv", None, **NORM) == []
    assert refused([WITH_SP, WITHOUT_SP], "cp", "seq", **NORM) == []
    assert refused([WITH_SP], "kv", None, **TOKENS) == []  # losses are no hidden state
    assert WITH_SP in strategy_rules("torch", sequence_parallel=True)
    assert WITHOUT_SP in strategy_rules("nxd", sequence_parallel=False)


def test_with_sequence_parallelism_nxd_routes_tokens_where_they_lie():
    assert refused([NXD_ROUTER], "kv", None, **ROUTER) == ["nxd-router"]
    assert refused([NXD_ROUTER], "kv", "seq", **ROUTER) == []
    for op in (EXPERT, DISPATCH, NORM, PRODUCT):
        assert refused([NXD_ROUTER], "kv", None, **op) == []
    assert refused([NXD_ROUTER], "cp", None, **ROUTER) == []
    asked = {
        (engine, sp): strategy_rules(engine, sequence_parallel=sp)
        for engine in ("nxd", "torch")
        for sp in (True, False)
    }
    assert [key for key, rules in asked.items() if NXD_ROUTER in rules] == [("nxd", True)]


def test_an_all_to_all_over_cp_cuts_heads_in_attention_and_tokens_elsewhere():
    rules = strategy_rules("torch", sequence_parallel=False, cp_kind="all_to_all")
    attention = {"dims": ("batch", "seq", "kv_seq", "kv_heads", "q_group", "head_dim"), "matrix": ()}
    assert refused(rules, "cp", "kv_heads", **attention) == []
    assert refused(rules, "cp", "seq", **attention) == ["cp-heads"]
    assert refused(rules, "cp", "seq", **NORM) == [] and refused(rules, "cp", None, **NORM) == ["cp-heads"]
    ring = strategy_rules("torch", sequence_parallel=False)
    assert refused(ring, "cp", "kv_heads", **attention) == ["cp-sequence"]


def test_a_refusal_says_what_where_and_what_instead():
    place = Place(op="layer.q", **PRODUCT, atom="kv", dim=None)
    (found,) = [found for rule in AXIS_RULES if (found := rule.rejection(place))]
    assert str(found).startswith("layer.q is not cut over kv: tp cuts every matrix")
    assert found.source
