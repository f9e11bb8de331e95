"""The planner from Python: three lines, and parts of one's own."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import autoshard
from autoshard.cost.calibration import CONSTANTS, uncalibrated
from autoshard.errors import InputError, NoPlan
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.rule import Verdict, rule
from autoshard.plan.verify import verify
from autoshard.search.ask.api import Search, engines_of, request_of
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.ask.vendor.defaults import TOKENS, default_sizes, default_workload
from autoshard.search.bound.request import Request
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.recipe import QuestionOptions
from autoshard.spec.workload import Precision, Workload


def test_three_lines_give_a_plan():
    plan = autoshard.plan("llama3-8b", "trn1.32xlarge", nodes=2, fix={"tp": 32, "mbs": 1}).plan
    assert isinstance(plan, Plan) and plan.cluster.num_nodes == 2
    assert plan.prediction and plan.prediction.peak_bytes <= plan.cluster.rank_memory_bytes


def test_the_package_of_the_same_name_still_works():
    import autoshard.plan.candidate

    assert autoshard.plan.candidate.Candidate().tp == 1
    assert autoshard.plan.__name__ == "autoshard.plan"


@pytest.mark.slow
def test_parts_may_be_values_paths_or_names():
    model, cluster = load_model("tiny-llama"), load_cluster("local")
    workload, _ = default_workload(model, cluster)
    few = "tp=2,pp=1,mbs=8"
    result = autoshard.plan("tiny-llama", "local", fix=few)
    assert autoshard.plan(model, cluster, workload, nodes=1, fix={"tp": 2, "pp": 1, "mbs": 8}) == result
    card = Path(__file__).parents[1] / "models" / "tiny-llama.json"
    assert autoshard.plan(card, "local", fix=few).plan.model.num_layers == model.num_layers


def test_a_users_own_rule_and_pins_are_respected():
    @rule("pp", source="this test")
    def mine(c: Columns) -> Verdict:
        yield c.pp == 2
        yield f"pp={c.pp}: use 2"

    plan = autoshard.plan("tiny-llama", "local", fix="tp=2,mbs=8", search=Search(rules=(mine,))).plan
    assert (plan.mesh.size("pp"), plan.mesh.size("tp")) == (2, 2)


def test_another_method_to_search_gets_the_request():
    seen: list[Request] = []

    def method(request: Request) -> SearchResult:
        seen.append(request)
        return search(request)

    workload = Workload(seq_len=128, global_batch=4, precision=Precision.named("fp32"))
    plan = autoshard.plan("tiny-llama", "local", workload, fix="tp=2,pp=1,mbs=1", search=Search(method=method)).plan
    assert seen[0].workload == workload == plan.workload


def test_a_calibration_of_ones_own_changes_the_prediction_and_is_named():
    nominal, few = uncalibrated(), "tp=2,pp=1,mbs=8"
    slow = replace(nominal, name="slow", **dict.fromkeys(CONSTANTS, 0.35))
    plan, usual = (autoshard.plan("tiny-llama", "local", fix=few, cost=cost).plan for cost in (slow, None))
    assert (plan.provenance["calibration"], usual.provenance["calibration"]) == ("slow", "uncalibrated")
    assert plan.prediction and usual.prediction
    assert plan.prediction.step_time_s > 1.5 * usual.prediction.step_time_s


def test_what_cannot_be_answered_is_an_exception_with_reasons():
    with pytest.raises(NoPlan, match=r"more than the 14\.40 GiB that a headroom of 0\.1 leaves of 16\.00 GiB"):
        autoshard.plan("llama3-70b", "trn1.32xlarge", fix="tp=32,mbs=1")
    with pytest.raises(InputError, match="do not divide by 3"):
        autoshard.plan("tiny-llama", "local", fix={"tp": 3})
    with pytest.raises(InputError, match="there is no table 'x'"):
        autoshard.plan("tiny-llama", "local", fix="kernels=x")


def test_one_rank_has_a_plan():
    found = autoshard.plan("tiny-llama", load_cluster("local", ranks=1), seq_len=32, global_batch=8).plan
    assert found.mesh.num_ranks == 1 and verify(found) == ()


def faults_of(nodes: int = 1, **values: object) -> set[str]:
    with pytest.raises(InputError) as caught:
        request_of(QuestionOptions(**{"model": "tiny-llama", "cluster": "local", **values}), nodes)  # type: ignore[arg-type]
    return {fault.where for fault in caught.value.faults}


def test_all_that_a_recipe_names_wrongly_is_reported_at_once():
    assert faults_of(model="no", cluster="no", nodes=0, fix="tp=x,zz=1") == {
        "--model", "--cluster", "--nodes", "--fix tp=x", "--fix zz=1",
    }  # fmt: skip
    assert faults_of(seq_len=0, global_batch=2**40) == {"--seq-len", "--global-batch"}
    assert faults_of(seq_len=0, global_batch="4k") == faults_of(seq_len=-4, global_batch="4k") == {"--seq-len"}
    assert faults_of(fix=" ") == {"--fix"}
    assert faults_of(fix="kernels=x") == {"--fix kernels"}
    assert faults_of(precision="fp8") == {"--precision"}
    assert faults_of(cluster="trn1.32xlarge", nodes=10**9) == {"--nodes"}


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "batch", "says"),
    [
        ("tiny-llama", "local", 256, 32, "batch: for this machine"),
        ("llama3.1-8b", "trn1.32xlarge", 8192, 1024, "as AWS NxD Training 2.26 documents"),
        ("gpt3-175b", "h100-80", 2048, 1536, "as NVIDIA Megatron-LM documents for gpt3-175b"),
        ("qwen3-8b", "h100-80", 8192, 512, "batch: the largest power of two with at most 4,194,304 tokens"),
    ],
)
def test_defaults_are_those_that_are_documented(model: str, cluster: str, seq_len: int, batch: int, says: str):
    workload, why = default_workload(load_model(model), load_cluster(cluster))
    assert (workload.seq_len, workload.global_batch) == (seq_len, batch) and says in why
    assert workload.precision == Precision.named("bf16")


def test_how_busy_experts_are_is_no_question_about_a_model_without_experts() -> None:
    options, cluster = QuestionOptions(expert_imbalance=0.2), load_cluster("h100-80")
    assert default_workload(load_model("mixtral-8x7b"), cluster, options)[0].expert_imbalance == 0.2
    with pytest.raises(InputError, match="expert_imbalance: llama3-8b has no experts"):
        default_workload(load_model("llama3-8b"), cluster, options)


@given(seq_len=st.integers(1, 2**31 - 1))
def test_without_a_vendor_a_step_has_the_most_tokens_that_a_power_of_two_of_sequences_holds(seq_len: int):
    sizes = default_sizes(load_model("qwen3-8b"), load_cluster("h100-80"), seq_len=seq_len)
    assert sizes.global_batch.bit_count() == 1 and sizes.seq_len == seq_len
    assert sizes.global_batch == 1 or sizes.global_batch * seq_len <= TOKENS
    assert 2 * sizes.global_batch * seq_len > TOKENS


def test_a_vendors_sizes_hold_at_its_length_on_as_many_nodes_or_twice_as_many():
    card = load_model("llama3-8b")  # on h100-80 documented for 1 node, 128 sequences of 8192 tokens
    nodes = {count: default_sizes(card, load_cluster("h100-80", count)) for count in (1, 2, 3)}
    assert [one.global_batch for one in nodes.values()] == [128, 128, 512]
    assert default_sizes(card, load_cluster("h100-80"), seq_len=8192).why.startswith("batch: as NVIDIA")
    assert default_sizes(card, load_cluster("h100-80"), seq_len=4096).global_batch == TOKENS // 4096
    stated = default_sizes(card, load_cluster("h100-80"), seq_len=4096, global_batch=7)
    assert (stated.global_batch, stated.why) == (7, "")
    longer = replace(card, max_positions=4096)
    assert default_sizes(longer, load_cluster("h100-80")).seq_len == 4096, "no vendor's length is past the model's"


def test_what_python_leaves_open_is_as_on_the_command_line():
    result = autoshard.plan("tiny-llama", "local", fix="tp=2,pp=1,mbs=8", seq_len=64)
    workload = result.plan.workload
    assert (workload.seq_len, workload.global_batch) == (64, 32) and "batch: for this machine" in result.summary()


def test_the_engine_is_the_clusters_unless_another_is_named():
    trn, gpu = load_cluster("trn1.32xlarge"), load_cluster("h200")
    assert (engines_of(trn, None), engines_of(gpu, None)) == (("nxd",), ("torch",))
    assert (engines_of(trn, "any"), engines_of(gpu, "any")) == (("nxd", "torch"), ("torch", "nxd"))
    assert (engines_of(trn, "torch"), engines_of(gpu, "nxd")) == (("torch",), ("nxd",))


@pytest.mark.parametrize("recompute", ["full/none", ["full", "none"], ("full", "none")])
@pytest.mark.parametrize("stages", ["3/1", [3, 1], (3, 1)])
def test_pins_of_python_may_be_text_lists_and_tuples(stages: object, recompute: object) -> None:
    pins = {"pp": 2, "tp": 1, "mbs": 1, "schedule": "1f1b", "stages": stages, "recompute": recompute}
    candidate = autoshard.plan("tiny-llama", "local", fix=pins).plan.candidate
    assert str(candidate) == "tp=1,pp=2,dp=2,recompute=full/none,stages=3/1"
