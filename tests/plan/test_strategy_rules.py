"""What each axis is for, and what engines run: every cut that a Rule refuses is told with what to do instead."""

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

AXES = (*DATA_RULES, *TP_RULES)
ULYSSES = strategy_rules("torch", sequence_parallel=False, cp_kind="all_to_all")
RING = strategy_rules("torch", sequence_parallel=False)

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
ATTENTION = {"dims": ("batch", "seq", "kv_seq", "kv_heads", "q_group", "head_dim"), "matrix": ()}

# Rules, atom, dim, operation, the ids of those that refuse it
CASES = [
    (AXES, "edp", "batch", NORM, ""), (AXES, "edp", None, NORM, "dp-batch"),
    (AXES, "edp", "hidden", PRODUCT, "dp-batch"), (AXES, "edp", "slots", EXPERT, ""),
    (AXES, "ep", "experts", EXPERT, ""), (AXES, "ep", "slots", EXPERT, "dp-batch"), (AXES, "ep", "batch", ROUTER, ""),
    (AXES, "cp", "seq", PRODUCT, ""), (AXES, "cp", None, PRODUCT, "cp-sequence"), (AXES, "cp", "slots", EXPERT, ""),
    (AXES, "kv", "kv_heads", PRODUCT, ""), (AXES, "kv", "hidden", PRODUCT, ""),
    (AXES, "kv", "seq", PRODUCT, "tp-tokens"), (AXES, "kv", "batch", NORM, "tp-tokens"),
    (AXES, "kv", "experts", EXPERT, "tp-tokens"), (AXES, "kv", None, PRODUCT, "tp-weights"),
    (AXES, "kv", None, KEYS, "tp-weights"), (AXES, "rep", None, KEYS, ""), (AXES, "rep", None, PRODUCT, "tp-weights"),
    (AXES, "kv", "seq", ROUTER, ""), (AXES, "kv", None, ROUTER, ""), (AXES, "kv", "hidden", NORM, "tp-hidden"),
    (AXES, "kv", "vocab", TABLE, ""), (AXES, "kv", "hidden", TABLE, "tp-vocabulary"),
    (NXD_RULES, "kv", "seq", NORM, ""), (NXD_RULES, "kv", "seq", ROUTER, ""),
    (NXD_RULES, "kv", "seq", DISPATCH, "nxd-sequence"), (NXD_RULES, "kv", "hidden", PRODUCT, "nxd-weights nxd-heads"),
    (NXD_RULES, "kv", "head_dim", KEYS, "nxd-weights nxd-heads"), (NXD_RULES, "kv", "ffn", EXPERT, ""),
    (NXD_RULES, "edp", "hidden", PRODUCT, ""), (NXD_RULES, "kv", "positions", POSITIONS, "nxd-weights"),
    (NXD_RULES, "kv", "seq", POSITIONS, ""), (NXD_RULES, "kv", "kv_heads", OWN_KEYS, ""),
    (NXD_RULES, "kv", None, OWN_KEYS, "nxd-heads"), (NXD_RULES, "rep", None, OWN_KEYS, ""),
    (NXD_RULES, "rep", "kv_heads", OWN_KEYS, "nxd-heads"), (NXD_RULES, "rep", "q_group", PRODUCT, ""),
    (NXD_RULES, "rep", "kv_heads", PRODUCT, "nxd-heads"), (NXD_RULES, "kv", "vocab", LOGITS, ""),
    (NXD_RULES, "kv", None, LOGITS, "nxd-loss"), (NXD_RULES, "kv", None, TOKENS, ""),
    (NXD_RULES, "kv", "seq", TOKENS, "nxd-loss"),
    # Sequence parallelism is a promise about what lies between products; losses are no hidden state.
    ((with_sp,), "kv", None, NORM, "sp"), ((with_sp,), "kv", "seq", NORM, ""), ((with_sp,), "kv", None, TOKENS, ""),
    ((without_sp,), "kv", "seq", NORM, "sp"), ((without_sp,), "kv", None, NORM, ""),
    ((with_sp, without_sp), "cp", "seq", NORM, ""),
    # With it NxD routes tokens where they lie.
    ((nxd_router,), "kv", None, ROUTER, "nxd-router"), ((nxd_router,), "kv", "seq", ROUTER, ""),
    ((nxd_router,), "cp", None, ROUTER, ""), *(((nxd_router,), "kv", None, op, "") for op in (EXPERT, DISPATCH, NORM)),
    # An all-to-all over cp cuts heads in attention, and tokens elsewhere.
    (ULYSSES, "cp", "kv_heads", ATTENTION, ""), (ULYSSES, "cp", "seq", ATTENTION, "cp-heads"),
    (ULYSSES, "cp", "seq", NORM, ""), (ULYSSES, "cp", None, NORM, "cp-heads"),
    (RING, "cp", "kv_heads", ATTENTION, "cp-sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "atom", "dim", "op", "why"), CASES)
def test_an_axis_is_for_one_thing_and_an_engine_runs_what_it_has_layers_for(rules, atom, dim, op, why):
    cut = AtomCut(op="some", atom=atom, dim=dim, **op)
    assert [found.rule_id for rule in rules if (found := rule.rejection(cut))] == why.split()


def test_the_rules_of_a_search_follow_from_its_terms():
    terms = {
        (engine, sp): strategy_rules(engine, sequence_parallel=sp)
        for engine in ("nxd", "torch")
        for sp in (True, False)
    }
    assert [key for key, rules in terms.items() if nxd_router in rules] == [("nxd", True)]
    assert all((with_sp in rules, without_sp in rules) == (sp, not sp) for (_, sp), rules in terms.items())


def test_a_refusal_says_what_where_and_what_instead():
    cut = AtomCut(op="layer.q", **PRODUCT, atom="kv", dim=None)
    (found,) = [found for rule in AXES if (found := rule.rejection(cut))]
    assert str(found).startswith("layer.q is not cut over kv: tp cuts every matrix")
    assert found.source
