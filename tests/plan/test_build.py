import pytest
from hypothesis import given

from autoshard.errors import InputError
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate, even_stages
from tests.plan.cases import ask, plan_of, shaped


def test_the_layout_of_the_first_screen_is_resolved_in_full():
    plan = plan_of(ask(), "tp=32,pp=8,recompute=selective[LlamaMLP]*7/full:4")
    assert str(plan.mesh) == "pp=8,edp=2,ep=1,cp=1,rep=4,kv=8 on 0-31"
    assert plan.schedule.num_micro_batches == 512
    assert plan.kernels == "nxd" and plan.sp and plan.zero == 1 and plan.micro_batch == 1
    assert [stage.first_layer for stage in plan.stages] == [0, 10, 20, 30, 40, 50, 60, 70]
    assert [str(stage.recompute) for stage in plan.stages] == ["selective[LlamaMLP]"] * 7 + ["full:4"]
    assert plan.buckets.reduce_scatter_bytes == 130 * 2**20 and plan.buckets.all_gather_bytes == 65 * 2**20
    assert plan.padding == {} and plan.strategies == {} and plan.prediction is None


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
    plan = plan_of(ask(cluster_name=cluster, nodes=2, lnc=lnc), f"tp={tp}")
    assert mesh in str(plan.mesh)


def test_interleaved_stages_go_round_the_ranks_and_those_of_a_v_return():
    plan = plan_of(ask(), "tp=32,pp=8,vp=2,schedule=interleaved")
    assert [(stage.rank, stage.chunk) for stage in plan.stages[6:10]] == [(6, 0), (7, 0), (0, 1), (1, 1)]
    plan = plan_of(ask(), "tp=32,pp=8,vp=2,schedule=zb_v")
    assert [(stage.rank, stage.chunk) for stage in plan.stages[6:10]] == [(6, 0), (7, 0), (7, 1), (6, 1)]
    assert all(plan.schedule.place_of(index) == (stage.rank, stage.chunk) for index, stage in enumerate(plan.stages))


def test_a_vocabulary_that_does_not_divide_is_padded():
    plan = plan_of(ask("gpt2-xl", "h100-80", 1, seq_len=1024), "tp=8")
    assert plan.padding == {"vocab": 50264}
    assert plan_of(ask("gpt2-xl", "h100-80", 1, seq_len=1024), "tp=1").padding == {}


def test_the_torch_engine_gets_its_own_buckets():
    assert plan_of(ask(cluster_name="h100-80"), "tp=8").buckets.all_gather_bytes == 25 * 2**20


def test_what_is_left_over_goes_to_the_middle_stages():
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
    again = Candidate.parse(str(plan.candidate))
    assert build_plan(again, *question.facts) == plan
    assert build_plan(again, *question.facts).candidate == plan.candidate


def test_values_equal_to_the_defaults_are_left_out_of_the_candidate():
    text = "tp=32,pp=8,stages=10*8,place=0-31,kernels=nxd,recompute=none*8"
    assert str(plan_of(ask(), text).candidate) == "tp=32,pp=8,dp=2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=32,pp=8,dp=4", "dp: pp x dp x cp x tp is 1024"),
        ("tp=32,pp=8,stages=40*2", "stages: lists 2 stages, but pp.vp is 8"),
        ("tp=32,pp=8,stages=10*7/11", "stages: the stages hold 81 layers together"),
        ("tp=1,pp=128", "pp=128,vp=1: 80 layers of llama3-70b cannot fill 128 stages"),
        ("tp=32,pp=8,recompute=full*3", "recompute=full.3: names 3 stages"),
        ("tp=32,pp=8,mbs=3", "dp=2,mbs=3: a step of 1024 sequences"),
        ("tp=32,pp=8,vp=2", "num_chunks: 1f1b runs one stage per rank"),
        ("tp=8,pp=8,ep=3", "ep: 3 does not divide dp 8"),
    ],
)
def test_a_candidate_without_a_shape_is_an_input_error(text, says):
    with pytest.raises(InputError, match=says):
        plan_of(ask(), text)
