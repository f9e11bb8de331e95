"""Pinned layouts: plans keep to them, the solver decides the rest, and what cannot be is told with its origin."""

from dataclasses import replace

import pytest

import autoshard
from autoshard.errors import InputError
from autoshard.layout.pin import pins_of
from autoshard.layout.table import Strategy
from autoshard.plan.candidate import Candidate
from autoshard.plan.proof import prove
from autoshard.plan.verify import verify
from autoshard.search.ask.api import Search
from autoshard.search.ask.planner import search
from autoshard.search.bound.request import plan_at
from autoshard.spec.model_catalogue import load_model
from tests.search.brute_force import ask, time_s

TP2 = "tp=2,dp=2,mbs=1"


def pinned(layouts, model="tiny-llama", cluster="local", **more):
    return replace(ask(model, cluster, **more), layouts=pins_of(layouts, "--pin"))


def planned(layouts, candidate=TP2, **more):
    return plan_at(pinned(layouts, **more), Candidate.parse(candidate))


def line(plan, name, block="layer"):
    return Strategy.parse(plan.strategies[block][name])


def test_a_plan_keeps_to_its_pins_and_computes_the_same():
    layouts = {
        "q": "[batch/dp, seq/cp, kv_heads, q_group/tp, head_dim]",
        "layer.down": "[batch/dp, seq/cp, hidden/tp]",
    }
    plan = planned(layouts)
    assert str(line(plan, "q").outputs[0]) == "[batch/dp, seq, kv_heads, q_group/tp, head_dim]"
    assert str(line(plan, "down").outputs[0]) == "[batch/dp, seq, hidden/tp]"
    assert prove(plan).holds
    assert time_s(plan) > time_s(planned({}))


def test_a_pin_that_the_solver_would_choose_anyway_changes_nothing():
    assert planned({"up": "[batch/dp, seq/cp, ffn/tp]"}) == planned({})


@pytest.mark.parametrize(
    ("name", "layout", "shown"),
    [
        # Cut along what is summed over, the product of the queries leaves a sum over tp.
        ("q", "[batch/dp, seq, kv_heads, q_group, head_dim] +tp", "[batch/dp, seq, kv_heads, q_group, head_dim] +tp"),
        # The norm's result is cut so as well: q takes it as it was made, k and v as it is gathered for them.
        ("q", "[batch/dp, seq/tp, kv_heads, q_group, head_dim]", "[batch/dp, seq/tp, kv_heads, q_group, head_dim]"),
        ("act", "[batch, seq/dp, ffn/tp]", "[batch, seq/dp, ffn/tp]"),  # the axes' Rules would have dp cut the batch
    ],
)
def test_pins_go_before_what_the_axes_are_for_and_sums_stay_pending(name, layout, shown):
    plan = planned({name: layout})
    assert str(line(plan, name).outputs[0]) == shown
    assert prove(plan).holds


@pytest.mark.slow
def test_a_candidate_or_an_engine_that_cannot_keep_a_pin_is_no_answer_and_no_end():
    # Pins do not go before what an engine can run.
    layouts = {"q": "[batch/dp, seq/tp, kv_heads, q_group, head_dim]"}
    request = pinned(layouts, "llama3-8b", "trn2.48xlarge", pins="tp=4,pp=1,mbs=1")
    with pytest.raises(InputError, match=r"--pin q=.*q cuts seq over kv: NxD .* \[nxd-sequence\]"):
        search(request)
    assert {plan.engine for plan in search(replace(request, engines=("nxd", "torch"))).plans} == {"torch"}


def test_candidates_that_cannot_keep_to_a_pin_are_left_out():
    # 4 key/value heads are not cut into 8.
    layouts = {"k": "[batch/dp, seq/cp, kv_heads/tp, head_dim]"}
    found = search(pinned(layouts, ranks=8, global_batch=8, pins="pp=1,cp=1,mbs=1"), num_plans=30)
    assert {plan.mesh.size("tp") for plan in found.plans} <= {1, 2, 4}
    with pytest.raises(InputError, match=r"4 cannot be cut into 8 \(tp\)"):
        search(pinned(layouts, ranks=8, global_batch=8, pins="tp=8"))
    with pytest.raises(InputError, match=r"4 cannot be cut into 8 \(tp\)"):
        planned(layouts, "tp=8,dp=1", ranks=8, global_batch=8)


def test_between_blocks_lies_what_sp_says():
    layouts = {"x": "[batch/dp, seq/cp, hidden]"}
    with pytest.raises(InputError, match=r"between blocks lies seq/tp.*--fix sp=false"):
        planned(layouts)
    assert planned(layouts, "tp=2,dp=2,sp=false")


def test_a_plan_keeps_to_the_layout_between_blocks():
    between = "[batch/dp, seq, hidden/tp]"
    plan, usual = (planned({}, f"tp=2,pp=2,dp=1,sp=false{more}") for more in (f",boundary={between}", ""))
    assert plan.boundary == between and prove(plan).holds
    assert plan.prediction and usual.prediction
    sent, usually = (one.communication_bytes["pp"] for one in (plan.prediction, usual.prediction))
    assert 2 * sent == usually, "half of each message goes to another rank"


def test_from_python():
    how = Search(layouts={"gate": "[batch/dp, seq/cp, ffn/tp]"})
    plan = autoshard.plan("tiny-llama", "local", fix=f"{TP2},pp=1,cp=1", search=how).plan
    assert str(line(plan, "gate").outputs[0]) == "[batch/dp, seq, ffn/tp]"
    with pytest.raises(InputError, match="no tensor of the forward pass has this name"):
        autoshard.plan("tiny-llama", "local", search=Search(layouts={"gat": "[batch, seq, ffn]"}))


def test_a_pin_of_a_tied_weight_holds_for_both_of_its_places():
    tied = replace(load_model("tiny-llama"), tied_embeddings=True)
    candidate = Candidate.parse("tp=2,dp=2,sp=false")
    plan = plan_at(replace(pinned({"embed.weight": "[vocab, hidden/tp]"}), model=tied), candidate)
    assert str(line(plan, "embed", "embed").inputs[0]) == "[vocab, hidden/tp]"
    assert str(line(plan, "unembed", "head").inputs[1]) == "[vocab, hidden/tp]"
    assert verify(plan) == () and prove(plan).holds
    both = {"embed.weight": "[vocab, hidden/tp]", "unembed.weight": "[vocab/tp, hidden]"}
    with pytest.raises(InputError, match="exclude each other"):
        plan_at(replace(pinned(both), model=tied), candidate)
    with pytest.raises(InputError, match=r"^pins: .* \[vocab, hidden/tp\]\. Cut both alike: a pin of the weight holds"):
        plan_at(replace(pinned({"embed": "[batch, seq, hidden/tp]"}), model=tied), candidate)


def test_a_table_that_cuts_a_tied_weight_in_two_ways_is_refused():
    tied = replace(load_model("tiny-llama"), tied_embeddings=True)
    alike = plan_at(replace(pinned({}), model=tied), Candidate.parse("tp=2,dp=2,sp=false"))
    other = planned({"embed.weight": "[vocab, hidden/tp]"}, "tp=2,dp=2,sp=false")
    mixed = replace(alike, strategies={**alike.strategies, "embed": other.strategies["embed"]})
    (found,) = [reason for reason in verify(mixed) if reason.rule_id == "plan-tied"]
    assert "head.unembed.weight is [vocab/tp, hidden]" in found.message


def test_a_pin_that_no_layer_of_nxd_can_keep_to_is_refused():
    where = {"model": "llama3-8b", "cluster": "trn1.32xlarge"}
    assert verify(planned({"attn_norm": "[batch/dp, seq/cp.tp, hidden]"}, "tp=8,pp=4,dp=1", **where)) == ()
    with pytest.raises(InputError, match=r"layer\.block_in: with what is pinned, no layer of NxD sends F all_gather"):
        planned({"attn_norm": "[batch/dp, seq/cp, hidden]"}, "tp=8,pp=4,dp=1", **where)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("act", "[batch/dp, seq/tp.cp, ffn]", r"in the mesh's order. Write seq/cp.tp"),
        ("up", "[ffn/tp, seq, batch]", r"has the dims \[batch, seq, ffn\], not \[ffn, seq, batch\]"),
    ],
)
def test_atoms_and_dims_stand_in_the_order_that_tables_have(name, layout, message):
    with pytest.raises(InputError, match=message):
        planned({name: layout}, "tp=2,cp=2,dp=1")
