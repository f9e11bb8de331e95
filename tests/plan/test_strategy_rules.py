"""What each axis is for, and what engines run: every place that a Rule refuses is told with what to do instead."""

import pytest

from autoshard.plan.rules.strategy import (
    DATA_RULES,
    NXD_RULES,
    TP_RULES,
    AtomCut,
    nxd_router,
    strategy_rules,
    with_sp,
    without_sp,
)

AXIS_RULES = (*DATA_RULES, *TP_RULES)

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
    cut = AtomCut(op="some", dims=dims, matrix=matrix, atom=atom, dim=dim)
    return [found.rule_id for rule in rules if (found := rule.rejection(cut))]


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
    assert refused([with_sp], "kv", None, **NORM) == ["sp"] and refused([with_sp], "kv", "seq", **NORM) == []
    assert refused([without_sp], "kv", "seq", **NORM) == ["sp"] and refused([without_sp], "kv", None, **NORM) == []
    assert refused([with_sp, without_sp], "cp", "seq", **NORM) == []
    assert refused([with_sp], "kv", None, **TOKENS) == []  # losses are no hidden state
    assert with_sp in strategy_rules("torch", sequence_parallel=True)
    assert without_sp in strategy_rules("nxd", sequence_parallel=False)


def test_with_sequence_parallelism_nxd_routes_tokens_where_they_lie():
    assert refused([nxd_router], "kv", None, **ROUTER) == ["nxd-router"]
    assert refused([nxd_router], "kv", "seq", **ROUTER) == []
    for op in (EXPERT, DISPATCH, NORM, PRODUCT):
        assert refused([nxd_router], "kv", None, **op) == []
    assert refused([nxd_router], "cp", None, **ROUTER) == []
    asked = {
        (engine, sp): strategy_rules(engine, sequence_parallel=sp)
        for engine in ("nxd", "torch")
        for sp in (True, False)
    }
    assert [key for key, rules in asked.items() if nxd_router in rules] == [("nxd", True)]


def test_an_all_to_all_over_cp_cuts_heads_in_attention_and_tokens_elsewhere():
    rules = strategy_rules("torch", sequence_parallel=False, cp_kind="all_to_all")
    attention = {"dims": ("batch", "seq", "kv_seq", "kv_heads", "q_group", "head_dim"), "matrix": ()}
    assert refused(rules, "cp", "kv_heads", **attention) == []
    assert refused(rules, "cp", "seq", **attention) == ["cp-heads"]
    assert refused(rules, "cp", "seq", **NORM) == [] and refused(rules, "cp", None, **NORM) == ["cp-heads"]
    ring = strategy_rules("torch", sequence_parallel=False)
    assert refused(ring, "cp", "kv_heads", **attention) == ["cp-sequence"]


def test_a_refusal_says_what_where_and_what_instead():
    cut = AtomCut(op="layer.q", **PRODUCT, atom="kv", dim=None)
    (found,) = [found for rule in AXIS_RULES if (found := rule.rejection(cut))]
    assert str(found).startswith("layer.q is not cut over kv: tp cuts every matrix")
    assert found.source
