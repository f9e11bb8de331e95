import dataclasses
import json
import re

import pytest
from hypothesis import given

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.predict import question_of
from autoshard.plan.build import build_plan
from autoshard.plan.codec import dump, load
from autoshard.plan.plan import StageMemory
from autoshard.plan.rules.check import rejections
from autoshard.plan.rules.rule import rule
from autoshard.plan.tables import with_tables
from autoshard.plan.verify import notices, verify
from autoshard.spec.kernels import load_kernels
from tests.plan.cases import ask, plan_of, shaped, with_prediction
from tests.tabled import tabled


def good(text="tp=32,pp=8,recompute=selective[LlamaMLP]", **facts):
    return with_prediction(plan_of(ask(**facts), text))


def after(edit, plan=None):
    """Verify a plan file after an edit by hand, leaving out that its prediction is stale then."""
    data = json.loads(dump(plan or good()))
    edit(data)
    found = verify(load(json.dumps(data)))
    return [rejection for rejection in found if not rejection.rule_id.startswith("prediction-")]


def put(*path_and_value):
    *path, key, value = path_and_value

    def edit(data):
        for step in path:
            data = data[step]
        data[key] = value

    return edit


def test_a_built_plan_of_a_legal_candidate_passes_and_so_does_one_whose_layer_is_moved_in_all_places():
    def move(data):
        data["stages"][0]["num_layers"] = 9
        data["stages"][1].update(first_layer=9, num_layers=11)

    assert verify(good()) == () and after(move) == []
    assert verify(good("tp=32,pp=8,vp=2,schedule=interleaved")) == ()
    assert verify(good("tp=16,pp=2", cluster_name="trn2.48xlarge", nodes=1)) == ()
    assert verify(good("tp=8,pp=2,vp=2,schedule=zb_v", cluster_name="h100-80", nodes=4)) == ()


@given(shaped())
def test_a_built_plan_is_refused_by_the_rules_alone(case):
    question, candidate = case
    by_rules = rejections(candidate, *question.facts)
    assert {r.rule_id for r in verify(build_plan(candidate, *question.facts))} == {r.rule_id for r in by_rules}


@pytest.mark.parametrize(
    ("edit", "rule_id", "says"),
    [
        (put("cluster", "num_nodes", 8), "ranks", "uses 512 ranks, but the cluster has 256"),
        (put("mesh", "pp=8,edp=2,ep=1,cp=1,rep=4,kv=8 on 0-15"), "place", "places 16 ranks, but a node of "),
        (put("mesh", "pp=8,dp=2,tp=32 on 0-31"), "plan-parts", "Type pp=8,edp=2,ep=1,cp=1,rep=4,kv=8 on 0-31"),
        (put("mesh", "pp=4,edp=4,ep=1,cp=1,rep=4,kv=8 on 0-31"), "recompute-count", "names 8 stages, but pp*vp is 4"),
        (put("stages", 3, "num_layers", 11), "stages-sum", "81 layers together, but llama3-70b has 80: remove 1"),
        (put("stages", 0, "first_layer", 1), "plan-parts", "stages[0].first_layer: is 1, but 0 follows"),
        (put("stages", 2, "rank", 3), "plan-parts", "stages[2].rank: is 3, but 2 follows from the rest"),
        (put("stages", 2, "chunk", 1), "plan-parts", "from the rest of the plan. Type 0"),
        (lambda data: data["stages"].pop(), "stages-count", "lists 7 stages, but pp*vp is 8"),
        (put("schedule", "num_ranks", 4), "plan-parts", "schedule.num_ranks: is 4, but 8 follows"),
        (put("schedule", "num_micro_batches", 500), "plan-parts", "is 500, but 512 follows"),
        (put("micro_batch", 3), "batch", "does not divide by dp*mbs=6"),
        (put("workload", "global_batch", 1000), "plan-parts", "Type 500"),
        (put("schedule", "actions", [["F0.0", "B0.0"]] * 8), "plan-actions", "actions[0]: 1 chunks x 512"),
        (put("padding", {"vocab": 128257}), "plan-padding", "not hold 128256 entries in 32 equal parts. Rem"),
        (put("padding", {"hidden": 8192}), "plan-padding", "hidden: only vocab can be padded. Remove it"),
        (put("strategies", {"block": {"qkv": "x"}}), "plan-strategies", "no such block"),
        (put("zero", 0), "nxd-zero", "Use zero=1"),
        (put("stages", 0, "recompute", "full:11"), "recompute-layers", "some stages have fewer layers"),
    ],
)  # fmt: skip
def test_an_edit_by_hand_is_refused_with_what_to_type(edit, rule_id, says):
    messages = [rejection.message for rejection in after(edit) if rejection.rule_id == rule_id]
    assert any(says in message for message in messages), [str(rejection) for rejection in after(edit)]


def test_sizes_that_cannot_be_are_left_to_their_rules():
    plan = good("tp=1,dp=28", model_name="llama3-8b", cluster_name="local", nodes=1, ranks=28, global_batch=28)
    found = {rejection.rule_id for rejection in after(put("mesh", "pp=1,edp=1,ep=1,cp=1,kv=28,rep=1 on 0-27"), plan)}
    assert {"kv-heads", "heads"} <= found and "plan-parts" not in found
    edit = put("mesh", "pp=2,edp=8,ep=1,cp=1,rep=4,kv=8 on 0-31")
    assert "number of stages: is 1, but 2 follows" in "\n".join(map(str, after(edit, good("tp=32,pp=1"))))
    plan = good("tp=5,sp=false", model_name="gpt2-xl", cluster_name="local", nodes=1, seq_len=1024, ranks=5)
    assert plan.padding == {"vocab": 50260}
    messages = [rejection.message for rejection in after(put("padding", {}), plan)]
    assert "padding.vocab: 50257 does not hold 50257 entries in 5 equal parts. Type 50260" in messages


def ordered(plan, lists):
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, actions=tuple(map(tuple, lists))))


def split(plan):
    """Write the backward of a plan's own lists as I and W, W right after I: they can run, whoever runs them."""

    def parts(action):
        return [dataclasses.replace(action, kind=kind) for kind in ("IW" if action.kind == "B" else action.kind)]

    return ordered(plan, ([one for action in own for one in parts(action)] for own in plan.schedule.action_lists()))


def test_lists_of_ones_own_are_refused_where_they_cannot_run_or_nobody_follows_them():
    plan = plan_of(ask(nodes=2, global_batch=4), "tp=32,pp=2")
    first, second = plan.schedule.action_lists()
    assert verify(ordered(plan, (first, second))) == verify(plan) == ()
    stuck = ordered(plan, (first, second[::-1]))
    assert "schedule.actions[1]: B1.3 waits for F1.3" in "\n".join(r.message for r in verify(stuck))
    (refused,) = verify(split(plan))
    assert refused.rule_id == "nxd-actions" and "Type actions: null" in refused.message
    assert "scheduler.py" in refused.source
    other = ordered(plan, (first, (*second[2:4], *second[:2], *second[4:])))  # another order that could run
    assert "nxd-actions" in {rejection.rule_id for rejection in verify(other)}


@pytest.mark.parametrize("pins", ["1f1b,zero=3", "gpipe,zero=1,recompute=full", "interleaved,vp=2"])
def test_a_backward_split_by_hand_may_run_where_lists_are_executed_as_they_stand(pins):
    plan = plan_of(ask("llama3-8b", "h100-80", 1, global_batch=8), f"tp=2,pp=2,dp=2,schedule={pins}")
    assert verify(plan) == ()
    assert verify(split(plan)) == ()


def test_what_zero_3_sends_for_a_block_is_listed_and_cannot_be_edited():
    asked = ask("llama3-8b", "h100-80", 1, global_batch=8)
    plan, whole = (tabled(plan_of(asked, f"tp=2,pp=2,dp=2,zero={zero}")) for zero in (3, 1))
    assert verify(plan) == verify(whole) == ()
    assert set(plan.units) == {"embed", "layer", "head"} and not whole.units
    # 2 B for each weight of half a layer, and of its norms.
    assert plan.units["layer"].startswith("F all_gather flat/dp 218120192 B | I all_gather")
    for name, line in (("layer", plan.units["layer"].replace("flat/dp", "flat/tp")), ("layer", ""), ("stem", "")):
        (refused,) = verify(dataclasses.replace(plan, units={**plan.units, name: line}, prediction=None))
        assert refused.rule_id == "plan-units"
        assert refused.message.endswith(f"Type {plan.units[name]}" if name in plan.units else "Remove it")
    stray = verify(dataclasses.replace(whole, units=plan.units, prediction=None))
    assert {one.rule_id for one in stray} == {"plan-units"}


def test_a_builder_that_cannot_run_on_its_placement_is_refused():
    plan = good("tp=32,pp=8,vp=2,schedule=interleaved")
    turned = [[rank, 0] for rank in range(8)] + [[7 - rank, 1] for rank in range(8)]

    def edit(data):
        data["schedule"]["placement"] = turned
        for stage, (rank, chunk) in zip(data["stages"], turned, strict=True):
            stage.update(rank=rank, chunk=chunk)

    found = after(edit, plan)
    assert {rejection.rule_id for rejection in found} == {"plan-actions"}
    assert "which never ends" in found[0].message

    def swap(data):
        data["schedule"]["placement"] = [[1, 0], [0, 0], *([rank, 0] for rank in range(2, 8))]
        data["stages"][0]["rank"], data["stages"][1]["rank"] = 1, 0

    assert after(swap) == []


def test_a_stale_prediction_and_too_little_memory_are_reasons_of_their_own():
    stale = dataclasses.replace(good(), zero=0)
    message = {r.rule_id: r.message for r in verify(stale)}["prediction-stale"]
    assert "autoshard plan --at tp=32,pp=8,dp=2,zero=0,recompute=selective[LlamaMLP]" in message
    assert verify(dataclasses.replace(good(), prediction=None)) == ()
    full = StageMemory(num_weights=1, parts={"weights": 15 * 2**30, "activations": 2**30 + 2**29})
    half = StageMemory(num_weights=1, parts={"weights": 8 * 2**30})
    bare, fuller = plan_of(ask(), "tp=32,pp=8"), StageMemory(num_weights=1, parts={"weights": 17 * 2**30})
    (rejection,) = verify(with_prediction(bare, stage_memory=(full, *[half] * 7)))
    assert rejection.rule_id == "memory"
    assert "rank 0 is predicted to need 16.50 GiB of 16.00 GiB, 512.00 MiB too much. Use" in rejection.message
    capacity_bytes = round(0.9 * 16 * 2**30)
    several = with_prediction(bare, stage_memory=(full, fuller, *[half] * 6), capacity_bytes=capacity_bytes)
    (rejection,) = verify(several)
    assert "rank 1 is predicted to need 17.00 GiB of 14.40 GiB (16.00 GiB less 0.1 of headroom)" in rejection.message
    assert "too much (2 of 8 pipeline ranks need too much)" in rejection.message
    none = with_prediction(plan_of(ask(), "tp=32,pp=8"), stage_memory=())
    assert [rejection.rule_id for rejection in verify(none)] == ["prediction-ranks"]


def test_what_is_left_for_tensors_and_for_blocks_of_an_allocator_adds_up():
    plan = plan_of(ask("llama3-8b", "h100-80", nodes=1), "tp=8,kernels=te")
    huge = StageMemory(num_weights=1, parts={"weights": 90 * 2**30})
    capacity_bytes = load_kernels("te").capacity_bytes(plan.cluster.rank_memory_bytes, plan.headroom)
    (rejection,) = verify(with_prediction(plan, stage_memory=(huge,), capacity_bytes=capacity_bytes))
    said = re.search(r"of ([\d.]+) GiB \(([\d.]+) GiB less 0.1 of .* may fill ([\d.]+) GiB\)", rejection.message)
    assert said, rejection.message
    capacity, usable, filled = map(float, said.groups())
    assert capacity == pytest.approx((1 - plan.headroom) * usable + filled, abs=0.02)


def test_what_a_plan_does_not_promise_is_said_and_users_rules_count_too():
    empty, uncalibrated = notices(good())
    assert "the table is empty" in empty and "uncalibrated" in uncalibrated
    assert "there is none" in notices(dataclasses.replace(good(), prediction=None))[1]
    assert len(notices(with_prediction(plan_of(ask(), "tp=32,pp=8"), basis="calibration of 2027"))) == 1

    @rule("tp", source="me")
    def mine(c):
        yield c.tp < 32
        yield "too wide"

    assert [str(rejection) for rejection in verify(good(), extra_rules=[mine])] == ["too wide [mine]"]


def test_a_table_that_its_engine_cannot_run_is_refused_with_the_rule():
    # What the torch engine would choose there: queries cut along what is summed over.
    question = ask()
    plan = plan_of(question, "tp=8,pp=8,dp=8")
    priced = question_of(plan, uncalibrated())
    terms = {engine: Terms(engine=engine, sequence_parallel=True) for engine in ("nxd", "torch")}
    nxd, torch = (with_tables(plan, solved_cutting(priced, plan.candidate, terms[engine])) for engine in terms)
    assert verify(nxd) == ()
    assert {found.rule_id for found in verify(torch)} == {"nxd-weights", "nxd-heads", "nxd-loss"}
    assert verify(torch)[0].message.startswith("strategies.layer.q cuts hidden over kv: NxD's layers cut weights")
