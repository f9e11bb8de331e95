"""Pinned layouts: plans keep to them, the solver decides the rest, and what cannot be is told with its origin."""

from dataclasses import replace

import pytest

import autoshard
from autoshard.errors import InputError
from autoshard.layout.pin import pins_of
from autoshard.layout.strategy import Strategy
from autoshard.plan.candidate import Candidate
from autoshard.plan.proof import prove
from autoshard.plan.verify import verify
from autoshard.search.api import Search, request_of
from autoshard.search.planner import plan_at, search
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.recipe import Recipe
from tests.search.brute_force import ask, time_s


def pinned(layouts, model="tiny-llama", cluster="local", **more):
    return replace(ask(model, cluster, **more), layouts=pins_of(layouts, "--pin"))


def line(plan, name, block="layer"):
    return Strategy.parse(plan.strategies[block][name])


def test_a_plan_keeps_to_its_pins_and_computes_the_same():
    layouts = {
        "q": "[batch/dp, seq/cp, kv_heads, q_group/tp, head_dim]",
        "layer.down": "[batch/dp, seq/cp, hidden/tp]",
    }
    (plan,) = search(pinned(layouts, pins="tp=2")).plans
    assert str(line(plan, "q").outputs[0]) == "[batch/dp, seq, kv_heads, q_group/tp, head_dim]"
    assert str(line(plan, "down").outputs[0]) == "[batch/dp, seq, hidden/tp]"
    assert prove(plan).holds
    assert time_s(plan) > time_s(search(ask("tiny-llama", pins="tp=2")).plans[0])


def test_a_pin_that_the_solver_would_choose_anyway_changes_nothing():
    free = search(ask("tiny-llama", pins="tp=2")).plans[0]
    held = search(pinned({"up": "[batch/dp, seq/cp, ffn/tp]"}, pins="tp=2")).plans[0]
    assert held == free


def test_a_pinned_sum_stays_pending():
    # Cut along what is summed over, the product of the queries leaves a sum over tp.
    (plan,) = search(pinned({"q": "[batch/dp, seq/cp, kv_heads, q_group, head_dim] +tp"}, pins="tp=2")).plans
    assert str(line(plan, "q").outputs[0]) == "[batch/dp, seq, kv_heads, q_group, head_dim] +tp"
    assert prove(plan).holds


def test_pins_go_before_what_the_axes_are_for():
    # The axes' Rules would have dp cut the batch everywhere.
    (plan,) = search(pinned({"act": "[batch, seq/dp, ffn/tp]"}, pins="tp=2,dp=2")).plans
    assert str(line(plan, "act").outputs[0]) == "[batch, seq/dp, ffn/tp]"
    assert prove(plan).holds


def test_pins_do_not_go_before_what_an_engine_can_run():
    layouts = {"q": "[batch/dp, seq/tp, kv_heads, q_group, head_dim]"}
    request = pinned(layouts, "llama3-8b", "trn1.32xlarge", pins="tp=8")
    with pytest.raises(InputError, match=r"--pin q=.*q cuts seq over kv: NxD .* \[nxd-sequence\]"):
        search(request)


def test_candidates_that_cannot_keep_to_a_pin_are_left_out():
    # 4 key/value heads are not cut into 8.
    layouts = {"k": "[batch/dp, seq/cp, kv_heads/tp, head_dim]"}
    found = search(pinned(layouts, ranks=8, global_batch=8), num_plans=30)
    assert {plan.mesh.size("tp") for plan in found.plans} <= {1, 2, 4}
    request = pinned(layouts, ranks=8, global_batch=8, pins="tp=8")
    with pytest.raises(InputError, match=r"4 cannot be cut into 8 \(tp\)"):
        search(request)
    with pytest.raises(InputError, match=r"4 cannot be cut into 8 \(tp\)"):
        plan_at(request, Candidate(tp=8))


def test_between_blocks_lies_what_sp_says():
    layouts = {"x": "[batch/dp, seq/cp, hidden]"}
    with pytest.raises(InputError, match=r"between blocks lies seq/tp.*--fix sp=false"):
        search(pinned(layouts, pins="tp=2"))
    assert search(pinned(layouts, pins="tp=2,sp=false")).plans


def test_a_search_keeps_to_the_layout_between_blocks():
    between = "[batch/dp, seq, hidden/tp]"
    (plan,) = search(ask("tiny-llama", pins=f"tp=2,pp=2,sp=false,boundary={between}")).plans
    (usual,) = search(ask("tiny-llama", pins="tp=2,pp=2,sp=false")).plans
    assert plan.boundary == between and prove(plan).holds
    assert plan.prediction and usual.prediction
    sent, usually = (one.communication_bytes["pp"] for one in (plan.prediction, usual.prediction))
    assert 2 * sent == usually, "half of each message goes to another rank"


def test_conflicts_are_told_with_both_origins_and_the_chain():
    recipe = Recipe(model="tiny-llama", cluster="local", pins={"up": "[batch/dp, seq/tp, ffn]"})
    request = request_of(recipe, pins_of({"up.weight": "[ffn/tp, hidden]"}, "--pin"))
    with pytest.raises(InputError) as caught:
        search(request)
    assert "pins up=" in str(caught.value) and "--pin up.weight=" in str(caught.value)
    assert "(layer.up <- layer.up.weight)" in str(caught.value)


def test_a_later_pin_of_the_same_tensor_replaces_that_of_the_recipe():
    recipe = Recipe(model="tiny-llama", cluster="local", fix="tp=2", pins={"up": "[batch/dp, seq/cp, ffn]"})
    (pin,) = request_of(recipe, pins_of({"up": "[batch/dp, seq/cp, ffn/tp]"}, "--pin")).layouts
    assert (pin.origin, str(pin.layout)) == ("--pin", "[batch/dp, seq/cp, ffn/tp]")


def test_from_python():
    how = Search(pins="tp=2", layouts={"gate": "[batch/dp, seq/cp, ffn/tp]"})
    plan = autoshard.plan("tiny-llama", "local", search=how)
    assert str(line(plan, "gate").outputs[0]) == "[batch/dp, seq, ffn/tp]"
    with pytest.raises(InputError, match="no tensor of the forward pass has this name"):
        autoshard.plan("tiny-llama", "local", search=Search(layouts={"gat": "[batch, seq, ffn]"}))


def test_what_is_shown_of_a_pinned_search_is_what_its_tables_cost():
    request = pinned({"up": "[batch/dp, seq, ffn/tp]"}, ranks=4)
    for plan in search(request, num_plans=12).plans:
        assert time_s(plan_at(request, plan.candidate)) == time_s(plan)


def test_a_pin_of_a_tied_weight_holds_for_both_of_its_places():
    tied = replace(load_model("tiny-llama"), tied_embeddings=True)
    request = replace(pinned({"embed.weight": "[vocab, hidden/tp]"}, pins="tp=2,sp=false"), model=tied)
    (plan,) = search(request).plans
    assert str(line(plan, "embed", "embed").inputs[0]) == "[vocab, hidden/tp]"
    assert str(line(plan, "unembed", "head").inputs[1]) == "[vocab, hidden/tp]"
    assert verify(plan) == () and prove(plan).holds
    both = {"embed.weight": "[vocab, hidden/tp]", "unembed.weight": "[vocab/tp, hidden]"}
    with pytest.raises(InputError, match="exclude each other"):
        search(replace(pinned(both, pins="tp=2,sp=false"), model=tied))


def test_a_table_that_cuts_a_tied_weight_in_two_ways_is_refused():
    tied = replace(load_model("tiny-llama"), tied_embeddings=True)
    (alike,) = search(replace(ask("tiny-llama", pins="tp=2,sp=false"), model=tied)).plans
    (other,) = search(pinned({"embed.weight": "[vocab, hidden/tp]"}, pins="tp=2,sp=false")).plans
    mixed = replace(alike, strategies={**alike.strategies, "embed": other.strategies["embed"]})
    (found,) = [reason for reason in verify(mixed) if reason.rule_id == "plan-tied"]
    assert "head.unembed.weight is [vocab/tp, hidden]" in found.message


def test_a_pin_that_no_layer_of_nxd_can_keep_to_is_refused():
    asked = ("llama3-8b", "trn1.32xlarge")
    usual = pinned({"attn_norm": "[batch/dp, seq/cp.tp, hidden]"}, *asked, pins="tp=8,cp=1,dp=1")
    (plan,) = search(usual).plans
    assert verify(plan) == () and prove(plan).holds
    with pytest.raises(InputError, match=r"layer\.block_in: with what is pinned, no layer of NxD sends F all_gather"):
        search(pinned({"attn_norm": "[batch/dp, seq/cp, hidden]"}, *asked, pins="tp=8,cp=1,dp=1"))


def test_atoms_of_a_dim_in_another_order_than_tables_have_are_refused():
    with pytest.raises(InputError, match=r"in the mesh's order. Write seq/cp.tp"):
        search(pinned({"act": "[batch/dp, seq/tp.cp, ffn]"}, pins="tp=2,cp=2"))


def test_dims_of_a_pin_stand_as_the_tensor_has_them():
    with pytest.raises(InputError, match=r"has the dims \[batch, seq, ffn\], not \[ffn, seq, batch\]"):
        search(pinned({"up": "[ffn/tp, seq, batch]"}, pins="tp=2"))


def test_a_candidate_or_an_engine_that_cannot_keep_a_pin_is_no_answer_and_no_end():
    layouts = {"q": "[batch/dp, seq/tp, kv_heads, q_group, head_dim]"}
    only_nxd = pinned(layouts, "llama3-8b", "trn2.48xlarge")
    with pytest.raises(InputError, match="nxd-sequence"):
        search(replace(only_nxd, pins={"tp": 4}))
    both = replace(only_nxd, engines=("nxd", "torch"), pins={"tp": 4})
    assert {plan.engine for plan in search(both).plans} == {"torch"}


def test_the_best_plan_with_pins_does_not_depend_on_who_else_was_looked_at():
    layouts = {"layer.up": "[batch, seq, ffn/tp]"}
    free, held = (search(pinned(layouts, pins=pins)).plans[0] for pins in ("", "tp=1,dp=4"))
    assert time_s(free) <= time_s(held)
