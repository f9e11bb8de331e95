"""What a plan promises, how promises compare, what is compiled, how a plan file is checked, and a user's own terms."""

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

import autoshard
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.predict import check_plan, compiling, predict, predicted
from autoshard.cost.storage import storage_of
from autoshard.cost.terms import CostTerm, term_entries, term_seconds
from autoshard.cost.timeline import rank_times, timeline_of
from autoshard.errors import InputError
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump, load, plan_hash
from autoshard.plan.rules.columns import Columns
from autoshard.search.ask.api import Cost
from autoshard.search.bound.request import plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import Precision
from tests.cost.cases import ask, candidate_of, plan_of, predicted_of
from tests.json_schema import schema_text
from tests.search.brute_force import ask as asked
from tests.slower import covering

TEXT = "tp=8,pp=4,dp=4"
LAYERS_DIFFER = [name for name in model_names() if name.startswith("tiny-") and load_model(name).order]
TEXTS = (
    TEXT,
    "tp=8,pp=1,dp=16,mbs=2",
    "tp=32,pp=2,dp=2,recompute=full",
    "tp=8,pp=2,cp=4,dp=2",
    "tp=8,pp=4,vp=2,dp=4,schedule=interleaved",
    "tp=8,pp=4,dp=4,recompute=full:3",
    "tp=1,pp=4,dp=32,zero=3",
)


class TestPrediction:
    def test_an_interval_is_a_factor_and_ends_at_the_best_that_any_row_of_the_chip_reached(self):
        question = ask()
        for interval in (0.1, 0.9):
            wide = replace(question.calibration, interval=interval)
            found = predict(plan_of(question, TEXT), replace(wide, best_mfu=0.99))
            assert found.high_s == pytest.approx(found.step_time_s * (1 + interval))
            fastest_s = found.step_time_s * (found.mfu_causal or 0.0) / 0.99
            assert found.low_s == pytest.approx(max(found.step_time_s / (1 + interval), fastest_s))
            best = 1.05 * (found.mfu_causal or 0.0)
            clipped = predict(plan_of(question, TEXT), replace(wide, best_mfu=best))
            assert clipped.low_s == pytest.approx(found.step_time_s / 1.05) and clipped.high_s == found.high_s
            above = predict(plan_of(question, TEXT), replace(wide, best_mfu=best / 2))
            assert above.low_s == above.step_time_s, "what is predicted is not changed"

    @pytest.mark.parametrize("text", TEXTS)
    def test_it_names_its_plan_adds_up_and_is_the_same_every_time(self, text):
        question = ask()
        plan = predicted(plan_of(question, text))
        found = plan.prediction
        assert found and found.of == plan_hash(plan)
        assert found.basis.startswith("calibrated on 42 rows of trn1.32xlarge")
        assert predict(plan, question.calibration).basis.startswith("uncalibrated")
        assert sum(found.time_parts.values()) == pytest.approx(found.step_time_s, rel=1e-8)
        assert min(found.time_parts.values()) > 0 and found.capacity_bytes == int(0.9 * 16 * 2**30)
        assert len(found.stage_memory) == plan.schedule.num_ranks
        assert all(min(memory.parts.values()) >= 0 for memory in found.stage_memory)
        assert {memory.parts["runtime"] for memory in found.stage_memory} == {load_kernels("nxd").runtime_bytes}
        assert dump(predicted(plan_of(question, text))) == dump(plan)

    def test_tokens_and_utilisation_follow_from_the_step_time(self):
        question = ask()
        prediction, model = predicted_of(question, TEXT), question.model
        assert prediction.tokens_per_s == pytest.approx(256 * 8192 / prediction.step_time_s)
        attention = 12 * model.num_layers * model.num_heads * model.head_dim * 8192
        matmul = model.num_parameters - (model.vocab + 2 * model.num_layers + 1) * model.hidden
        flops = (6 * matmul + attention) * 256 * 8192
        peak = 128 * 95e12  # 4 nodes of 32 cores of 95 TFLOPS
        assert prediction.mfu == pytest.approx(flops / peak / prediction.step_time_s, rel=1e-6)
        # masked pairs count as work done, and a kernel skips them
        assert 0.05 < prediction.mfu < question.calibration.matrix_efficiency / 0.8

    def test_slots_that_no_token_needs_are_no_work_of_the_model(self):
        even, roomy = (
            predicted_of(
                ask("mixtral-8x7b", "h100-80", 4, kernels="te", expert_capacity=capacity), "tp=8,pp=4,dp=1,mbs=1"
            )
            for capacity in (None, 2.0)
        )
        assert roomy.step_time_s > 1.2 * even.step_time_s
        assert roomy.mfu * roomy.step_time_s == pytest.approx(even.mfu * even.step_time_s, rel=1e-6)


@pytest.mark.parametrize("text", TEXTS[:3])
def test_more_tokens_take_longer_a_larger_batch_at_most_in_proportion(text):
    whole, twice, short = (predicted_of(one, text) for one in (ask(), ask(global_batch=512), ask(seq_len=4096)))
    assert whole.step_time_s < twice.step_time_s <= 2 * whole.step_time_s
    assert short.step_time_s < whole.step_time_s and short.peak_bytes < whole.peak_bytes


def test_products_in_a_format_of_their_own_are_faster_and_travel_with_the_plan():
    quick = ask(cluster_name="h100-80", nodes=1, precision=replace(Precision.named("bf16"), products="fp8"))
    plan, plain = (predicted(plan_of(one, "tp=2,pp=2,dp=2")) for one in (quick, ask(cluster_name="h100-80", nodes=1)))
    written, said, before = dump(plan), plan.prediction, plain.prediction
    assert json.loads(written)["workload"]["precision"]["products"] == "fp8" and load(written) == plan
    jsonschema.validate(json.loads(written), json.loads(schema_text()))
    assert said and before and plan_hash(plain) != plan_hash(plan), "another plan"
    assert said.step_time_s < before.step_time_s
    assert (said.stage_memory, said.communication_bytes) == (before.stage_memory, before.communication_bytes)
    # utilisation is of the peak that activations have, as published ones are
    assert said.mfu * said.step_time_s == pytest.approx(before.mfu * before.step_time_s, rel=1e-6)
    data = json.loads(dump(plain))
    data["workload"]["precision"].pop("products", None)
    assert load(json.dumps(data)) == plain, "without it, a plan multiplies as it activates"


@pytest.mark.parametrize(
    ("text", "num_graphs"),
    [
        ("tp=32,pp=1,dp=4", 3),  # one of work, one that reduces gradients, and one that updates
        # First, middle and last: forward, backward, reduction, update; to send and to receive, forward and backward.
        ("tp=32,pp=4,dp=1", 3 * 4 + 4),
        ("tp=8,pp=8,dp=2", 3 * 4 + 4),
        ("tp=32,pp=4,dp=1,stages=7/9/8/8", 4 * 4 + 4),
        ("tp=32,pp=2,vp=2,dp=2,schedule=interleaved", 3 * 2 + 2 * 2 + 4),  # three kinds of stages, two kinds of ranks
        ("tp=32,pp=4,dp=1,schedule=zb_h1", 3 * 5 + 4),  # a split backward is two graphs
    ],
)
def test_stages_that_hold_the_same_share_their_graphs(text, num_graphs):
    question = ask()
    facts = (question.model, question.cluster, question.workload)
    found = compiling(build_plan(candidate_of(question, text), *facts, "nxd"))
    assert found and found.num_graphs == num_graphs and found.compile_s > 0


RECOMPUTE = ("full/selective[mlp]", "none/full", "full:1/selective[mlp]")


class TestChecked:
    @pytest.mark.parametrize(("model", "recompute"), covering(LAYERS_DIFFER, RECOMPUTE, fast=1))
    def test_stages_may_lack_a_kind_of_layer_and_recompute_each_in_its_way(self, model, recompute):
        request = asked(model, ranks=4)
        split = f"1/{request.model.num_layers - 1}"  # the first stage has one layer, and so one kind
        plan = plan_at(request, Candidate.parse(f"pp=2,dp=2,recompute={recompute},stages={split}"))
        assert len({kind for kind, _ in plan.layers}) > 1
        assert predict(load(dump(plan)), uncalibrated()) == plan.prediction, "as a file it has the tables that it needs"
        assert len(rank_times(plan)) == 2

    slow = replace(uncalibrated(), name="slow", basis="my own runs", matrix_efficiency=0.2, memory_efficiency=0.2)

    @pytest.mark.slow
    def test_a_plan_is_checked_with_its_own_constants_or_with_others_and_keeps_the_seconds_of_its_terms(self):
        stall = CostTerm(name="stall", seconds=lambda c: 0.25 * c.dp, source="this test")
        made = autoshard.plan("tiny-llama", "local", fix="mbs=8", cost=Cost(calibration=self.slow, terms=(stall,))).plan
        found, nominal = check_plan(made), check_plan(made, uncalibrated())
        assert found.plan == made and found.remark.startswith("cost.stall: not known here")
        assert made.prediction and nominal.plan.prediction
        assert nominal.plan.provenance["calibration"] == "uncalibrated"
        assert nominal.plan.prediction.step_time_s < made.prediction.step_time_s
        stated = made.prediction.time_parts["cost.stall"]
        assert nominal.plan.prediction.time_parts["cost.stall"] == stated
        assert check_plan(nominal.plan, self.slow).plan.prediction == made.prediction
        edited = check_plan(replace(made, provenance={**made.provenance, "cost.stall": "9.0 s, x"}))
        assert edited.remark.startswith("prediction: the plan was edited") and "cost.stall: not known" in edited.remark
        assert edited.plan.prediction and edited.plan.prediction.time_parts["cost.stall"] == 9.0


PER_RANK = CostTerm(name="per_rank", seconds=lambda c: 0.01 * c.dp * c.tp, source="this test")


def columns(text):
    question = ask()
    return Columns.of(Candidate.parse(text), question.model, question.cluster, question.workload, "nxd")


def plan_with(**terms):
    plan = plan_of(ask(), TEXT)
    return replace(plan, provenance={**plan.provenance, **{f"cost.{name}": text for name, text in terms.items()}})


def test_columns_give_what_single_candidates_give_and_a_plan_states_it():
    rows = [columns("tp=8,pp=4,dp=4"), columns("tp=32,pp=2,dp=2"), columns("tp=8,pp=1,dp=16")]
    assert PER_RANK.of(Columns.stack(rows)).tolist() == [float(PER_RANK.of(row)) for row in rows]
    stall = CostTerm(name="stall", seconds=lambda c: 0.1 + 0.2, source="1 s, then less")
    question, candidate = ask(), Candidate.parse(f"{TEXT},stages=9/7/8*2,recompute=full")
    entries = term_entries((PER_RANK, stall), candidate, question.model, question.cluster, question.workload, "nxd")
    assert entries["cost.stall"] == f"{0.1 + 0.2!r} s, 1 s, then less"
    assert term_seconds({"model": "x", **entries}) == {"cost.per_rank": 0.32, "cost.stall": 0.1 + 0.2}


def test_a_term_that_is_no_addition_or_has_no_name_or_source_is_refused():
    for seconds in (-1e-9, float("nan"), float("inf"), np.array([1.0, -2.0])):
        with pytest.raises(InputError, match=r"cost.per_rank: gives .* s; a term gives finite seconds of at least 0"):
            replace(PER_RANK, seconds=lambda c, seconds=seconds: seconds).of(columns(TEXT))
    for name, source, where in (("Per rank", "x", "name"), ("", "x", "name"), ("a", " ", "source")):
        with pytest.raises(InputError, match=f"^{where}: "):
            CostTerm(name=name, source=source, seconds=lambda c: 0.0)


@pytest.mark.parametrize("text", ["", "fast", "1", "1 s", "-1 s, x", "nan s, x", "inf s, x", "x s, 1 s, y"])
def test_a_statement_that_is_none_is_refused_with_its_place(text):
    with pytest.raises(InputError, match=r"provenance.cost.mine: must be SECONDS s, SOURCE"):
        predict(plan_with(mine=text))


def test_stated_terms_are_parts_of_the_prediction_survive_the_file_and_end_the_traced_step():
    bare, plan = predicted(plan_with()), predicted(plan_with(stall="0.25 s, x", nothing="0 s, y"))
    assert bare.prediction and plan.prediction
    assert plan.prediction.time_parts == {**bare.prediction.time_parts, "cost.stall": 0.25}
    assert plan.prediction.step_time_s == pytest.approx(bare.prediction.step_time_s + 0.25, rel=1e-8)
    assert load(dump(plan)) == plan and predict(load(dump(plan))) == plan.prediction
    found = timeline_of(plan)
    assert (found.phases[-1].part, set(found.phases[-1].seconds)) == ("cost.stall", {0.25})
    assert found.end_s - timeline_of(plan_with()).end_s == pytest.approx(0.25)


def test_checkpoints_of_this_machine_lie_on_its_disk_and_those_of_clusters_on_shared_storage():
    assert "a disk of this machine" in storage_of(load_cluster("local")).name
    assert "a disk of this machine" not in storage_of(load_cluster("trn1.32xlarge")).name
