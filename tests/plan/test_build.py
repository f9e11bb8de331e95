"""From a candidate to a plan, and the numbers of its prediction."""

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate, even_stages
from autoshard.plan.codec import dump, load
from autoshard.plan.plan import StageMemory, rounded
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from tests.plan.cases import ask, plan_of, shaped, with_prediction


def test_the_layout_of_the_first_screen_is_resolved_in_full():
    plan = plan_of(ask(), "tp=32,pp=8,recompute=selective[LlamaMLP]*7/full:4")
    assert str(plan.mesh) == "pp=8,edp=2,ep=1,cp=1,rep=4,kv=8 on 0-31"
    assert plan.schedule.num_micro_batches == 512
    assert plan.kernels == "nxd" and plan.sp and plan.zero == 1 and plan.micro_batch == 1
    assert [stage.first_layer for stage in plan.stages] == [0, 10, 20, 30, 40, 50, 60, 70]
    assert [str(stage.recompute) for stage in plan.stages] == ["selective[LlamaMLP]"] * 7 + ["full:4"]
    assert plan.buckets.reduce_scatter_bytes == 130 * 2**20 and plan.buckets.all_gather_bytes == 65 * 2**20
    assert plan.padding == {} and plan.strategies == {} and plan.prediction is None
    assert plan_of(ask(cluster_name="h100-80"), "tp=8").buckets.all_gather_bytes == 25 * 2**20


@pytest.mark.parametrize(
    ("cluster", "lnc", "tp", "mesh"),
    [
        ("trn1.32xlarge", None, 4, "rep=1,kv=4 on 0-24:8/1-25:8"),
        ("trn2.48xlarge", 2, 32, "kv=8,rep=4 on 0-15/48-63/16-47"),
        ("trn2.48xlarge", 2, 16, "kv=8,rep=2 on 0-63"),
        ("h100-80", None, 8, "kv=8,rep=1 on 0-7"),
    ],
)
def test_kv_heads_repeat_where_tp_is_larger_and_ranks_stand_as_the_platform_wants(cluster, lnc, tp, mesh):
    assert mesh in str(plan_of(ask(cluster_name=cluster, nodes=2, lnc=lnc), f"tp={tp}").mesh)


@pytest.mark.parametrize(("schedule", "places"), [("interleaved", [(0, 1), (1, 1)]), ("zb_v", [(7, 1), (6, 1)])])
def test_interleaved_stages_go_round_the_ranks_and_those_of_a_v_return(schedule, places):
    plan = plan_of(ask(), f"tp=32,pp=8,vp=2,schedule={schedule}")
    assert [(stage.rank, stage.chunk) for stage in plan.stages[6:10]] == [(6, 0), (7, 0), *places]


def test_a_vocabulary_that_does_not_divide_is_padded():
    plans = [plan_of(ask("gpt2-xl", "h100-80", 1, seq_len=1024), f"tp={tp}") for tp in (8, 1)]
    assert [plan.padding for plan in plans] == [{"vocab": 50264}, {}]


def test_layers_spread_as_even_as_can_be_and_the_ends_get_fewer():
    for num_layers in range(1, 40):
        for num_stages in range(1, num_layers + 1):
            layers = even_stages(num_layers, num_stages)
            assert sum(layers) == num_layers and max(layers) - min(layers) <= 1
            assert layers[-1] == min(layers)
            rest = num_layers % num_stages
            assert layers[0] == min(layers) or rest == num_stages - 1


@given(shaped())
def test_the_candidate_of_a_plan_gives_the_plan_again(case):
    question, candidate = case
    plan = build_plan(candidate, *question.facts)
    again = build_plan(Candidate.parse(str(plan.candidate)), *question.facts)
    assert again == plan and again.candidate == plan.candidate


def test_values_equal_to_the_defaults_are_left_out_of_the_candidate():
    text = "tp=32,pp=8,stages=10*8,place=0-31,kernels=nxd,recompute=none*8"
    assert str(plan_of(ask(), text).candidate) == "tp=32,pp=8,dp=2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=32,pp=8,dp=4", "dp: pp x dp x cp x tp is 1024"),
        ("tp=32,pp=8,stages=40*2", "stages: lists 2 stages, but pp.vp is 8"),
        ("tp=1,pp=128", "pp=128,vp=1: 80 layers of llama3-70b cannot fill 128 stages"),
        ("tp=32,pp=8,mbs=3", "dp=2,mbs=3: a step of 1024 sequences"),
        ("tp=32,pp=8,vp=2", "num_chunks: 1f1b runs one stage per rank"),
        ("tp=8,pp=8,ep=3", "ep: 3 does not divide dp 8"),
    ],
)
def test_a_candidate_without_a_shape_is_an_input_error(text, says):
    with pytest.raises(InputError, match=says):
        plan_of(ask(), text)


def predicted(plan=None, **changes):
    return with_prediction(plan or plan_of(ask(), "tp=32,pp=8"), **changes)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"step_time_s": 0.0, "time_parts": {}}, "step_time_s"),
        ({"low_s": 11.0}, "low_s"),
        ({"high_s": 9.0}, "low_s"),
        ({"time_parts": {"compute": 10.1}}, "time_parts"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"tokens_per_s": 0.0}, "tokens_per_s"),
        ({"mfu": -0.1}, "mfu"),
        ({"basis": ""}, "basis"),
        ({"communication_bytes": {"tp": -1}}, "communication_bytes.tp"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes, where):
    with pytest.raises(InputError) as caught:
        predicted(**changes)
    assert where in [fault.where for fault in caught.value.faults]
    parts = {"compute": 6.5 + 4e-6, "bubble": 3.5}  # they may differ from the sum by their rounding
    prediction = predicted(time_parts=parts).prediction
    assert prediction and prediction.peak_bytes == 4 * 2**30
    with pytest.raises(InputError, match=r"parts\.weights: must not be negative"):
        StageMemory(num_weights=1, parts={"weights": -1})


@given(st.floats(1e-12, 1e15))
def test_rounding_keeps_nine_digits_and_is_done_once(value):
    assert rounded(rounded(value)) == rounded(value) == pytest.approx(value, rel=1e-8)


@given(st.sampled_from([1, 2, 4, 16]), st.floats(0.01, 1000), st.floats(1e-3, 1e6))
def test_dollars_are_hours_times_nodes_times_price(nodes, price, step_time_s):
    plan = plan_of(ask(nodes=nodes), "tp=32,pp=1")
    cluster = dataclasses.replace(plan.cluster, price_usd_per_node_hour=price, price_date="2026-06-25")
    times = dict.fromkeys(("step_time_s", "low_s", "high_s"), step_time_s)
    tokens = plan.workload.tokens_per_step
    plan = dataclasses.replace(plan, cluster=cluster)
    plan = predicted(plan, **times, time_parts={"compute": step_time_s}, tokens_per_s=tokens / step_time_s)
    found = plan.dollars
    assert found is not None and (found.price_usd_per_node_hour, found.price_date) == (price, "2026-06-25")
    step = Fraction(step_time_s) / (60 * 60) * nodes * Fraction(price)
    assert found.usd_per_step == pytest.approx(float(step), rel=1e-8)
    assert found.usd_per_billion_tokens == pytest.approx(float(step * 10**9 / tokens), rel=1e-8)
    assert load(dump(plan)).dollars == found
    unpriced = dataclasses.replace(cluster, price_usd_per_node_hour=None, price_date=None)
    assert dataclasses.replace(plan, cluster=unpriced).dollars is None
    assert dataclasses.replace(plan, prediction=None).dollars is None


def test_a_price_of_the_catalogue_says_whether_its_source_has_a_date():
    for cluster in map(load_cluster, cluster_names()):
        if cluster.price_usd_per_node_hour is not None:
            assert (cluster.price_date or "carries no date") in cluster.sources["price_usd_per_node_hour"]
