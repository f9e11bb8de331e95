"""The answers to a question: what their names promise, and vendors' layouts against the sources that are here."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.calibration.measured_run import run_of
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.errors import InputError, NoPlan
from autoshard.plan.candidate import Candidate, parse_pins
from autoshard.plan.codec import dump, load
from autoshard.plan.explanation import Answer
from autoshard.search.ask.answers import PlanResult, answers_of
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.planner import search
from autoshard.search.ask.vendor.answer import as_documented, vendor_answer
from autoshard.search.ask.vendor.documented import VendorLayout, vendor_layouts
from autoshard.search.bound.request import Request, plan_at, rejections_of
from autoshard.search.bound.watch import Look
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision
from benchmarks.aws_recipes import load_aws_recipes
from tests.search.brute_force import ask, peak, time_s
from tests.search.test_recipes import DISCREPANCIES
from tests.slower import rest_is_slow

ROWS = Path(__file__).parents[2] / "benchmarks" / "data"
SIZED = re.compile(r"--(\S+) (\S+)")
# Its recipe lets PyTorch's allocator extend segments, so that it reserves less than the 4 GiB that are counted here.
OVER = {"deepseek_v3_pretrain_1024gpu_h100_bf16_config": "tp=2,pp=8,"}
CLUSTERS = {"trainium1": "trn1.32xlarge", "trainium2": "trn2.48xlarge"}


@pytest.fixture(scope="module")
def result() -> PlanResult:
    request = ask("tiny-llama", ranks=4, pins="pp=2,mbs=8,recompute=none")
    return answers_of(request, search(request, 3, simple_within=DOUBT))


def test_answers_are_named_and_say_by_how_much_they_are_slower(result: PlanResult):
    names = [answer.name for answer in result.answers]
    assert names == ["fastest", "simple", "other", "2", "3"] and result.no_vendor
    fastest = result.named("fastest").plan
    for answer in result.answers:
        assert time_s(answer.plan) == pytest.approx((1 + answer.slower) * time_s(fastest)) and answer.why
        assert load(dump(answer.plan)) == answer.plan and answer.plan.strategies, "every answer can be saved"
    assert 0 <= result.named("simple").slower <= 0.1  # what the doubt allows at most
    value = time_s(result.named("simple").plan)
    gap = result.certificate.about(result.plan).gap
    assert gap == pytest.approx(1 - result.certificate.bound / value, abs=1e-8)
    assert result.plan == result.named("simple").plan and result.named("1").plan == fastest
    assert result.runners_up == (result.named("2").plan, result.named("3").plan)


def test_an_answer_that_is_not_there_is_refused_with_what_there_is(result: PlanResult):
    with pytest.raises(InputError, match=r"no such answer. There are fastest, simple, other, 2, 3$"):
        result.named("4")
    with pytest.raises(InputError, match="documented that autoshard knows"):
        result.named("vendor")


def test_saving_keeps_other_files_and_any_answer_can_be_saved(result: PlanResult, tmp_path: Path):
    out = tmp_path / "plan.json"
    assert result.save(out) == out and load(out) == result.plan
    result.save(out)
    result.save(out, "3")
    assert load(out) == result.named("3").plan
    out.write_text("notes", encoding="utf-8")
    with pytest.raises(InputError, match="Say force=True"):
        result.save(out)
    assert out.read_text(encoding="utf-8") == "notes"
    result.save(out, force=True)
    assert load(out) == result.plan


def test_a_result_shows_itself_and_says_where_the_plan_is(result: PlanResult):
    lines = result.summary().splitlines()
    assert "tiny-llama on 4 ranks" in lines[0] and [line.split()[0] for line in lines[1:6]] == [
        "fastest", "simple", "other", "2", "3",
    ]  # fmt: skip
    assert len(repr(result)) < 200 and str(result.plan.candidate) in repr(result)
    assert result._repr_html_().count("<tr>") == 5
    with pytest.raises(AttributeError, match=r"result\.plan\.mesh"):
        result.mesh  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no 'meshes'$"):
        result.meshes  # noqa: B018


def test_of_a_search_that_was_stopped_early_no_distance_is_promised():
    request = ask("llama3-8b", "h100-80", pins="pp=1,cp=1")

    def until_found(look: Look) -> str:
        return "stopped" if look().best < float("inf") else ""

    found = search(request, 1, until_found, simple_within=DOUBT)
    first = answers_of(request, found).answers[0]
    assert found.certificate.bound == 0 and first.why == "how far it is from the best is not known"


def test_least_memory_has_no_simple_answer():
    request = ask("tiny-llama", ranks=2, pins="mbs=8")
    small = replace(request, objective="memory")
    result = answers_of(small, search(small, 2))
    assert [answer.name for answer in result.answers] == ["smallest", "2"] and result.plan == result.answers[0].plan


def documented(layout: VendorLayout) -> Request:
    """The question that a layout was documented for."""
    cluster = load_cluster(CLUSTERS.get(layout.chips[0], layout.chips[0]), layout.nodes or 16)
    request = ask(layout.model, seq_len=layout.seq_len, global_batch=layout.global_batch)
    return replace(request, cluster=cluster, engines=(cluster.engine,))


every_layout = pytest.mark.parametrize(
    "layout", vendor_layouts(), ids=lambda one: f"{one.vendor}-{one.model}-{one.nodes}"
)


@every_layout
def test_a_documented_layout_has_a_source_and_may_run_where_it_is_documented(layout: VendorLayout):
    assert layout.source.startswith("https://") and layout.model == load_model(layout.model).name
    request = documented(layout).with_lnc_of(None)
    candidate = Candidate.parse(layout.layout, request.cluster.num_ranks)
    reasons = {one.rule_id for one in rejections_of(request, candidate, request.engines[0])}
    assert reasons == DISCREPANCIES.get(layout.source.rpartition("/")[2], (set[str](), ""))[0]


WITH_OPTIONS = [one for one in vendor_layouts() if one.options and not one.rows]


@pytest.mark.parametrize("layout", rest_is_slow(WITH_OPTIONS, 4, len(WITH_OPTIONS)), ids=lambda one: one.source[-60:])
def test_a_layout_fits_under_the_options_that_its_source_states(layout: VendorLayout):
    stated = dict(SIZED.findall(layout.options))
    assert Precision.named(stated.get("precision", "bf16")).name == (layout.precision or "bf16")
    assert layout.even == ("expert-imbalance" in stated) and (load_model(layout.model).num_experts or not layout.even)
    plan = as_documented(documented(layout), layout)
    assert plan and plan.kernels == stated["fix"].removeprefix("kernels=") and plan.workload.seq_len == layout.seq_len
    over = any(name in layout.source and layout.layout.startswith(start) for name, start in OVER.items())
    assert (peak(plan) > plan.cluster.rank_memory_bytes) == over


def test_every_recipe_of_aws_for_a_card_is_a_layout_and_says_the_same():
    known = {one.source: one for one in vendor_layouts()}
    for recipe in load_aws_recipes():
        if recipe.work == "pretraining" and not recipe.differs:
            one = known[recipe.source]
            facts = (one.model, one.nodes, one.seq_len, one.global_batch)
            assert facts == (recipe.model, recipe.nodes, recipe.seq_len, recipe.global_batch)
            ranks = recipe.candidate().num_ranks
            assert Candidate.parse(one.layout, ranks) == replace(recipe.candidate(), lnc=recipe.lnc)


def test_measured_seconds_are_those_of_rows_with_this_layout():
    lines = "".join(path.read_text(encoding="utf-8") for path in sorted(ROWS.glob("*.jsonl"))).splitlines()
    rows = {row.id: row for row in map(MeasuredRow.read, map(json.loads, lines))}
    measured = [one for one in vendor_layouts() if one.rows]
    assert sum(len(one.rows) for one in measured) > 20
    for one in measured:
        assert [rows[name].step_time_s for name in one.rows] == list(one.measured_s)
        for run in (run_of(rows[name]) for name in one.rows):
            assert run.candidate == Candidate.parse(one.layout, run.cluster.num_ranks)
            assert (run.workload.seq_len, run.workload.global_batch) == (one.seq_len, one.global_batch)
            assert (run.cluster.num_nodes, run.cluster.chip.name) == (one.nodes, *one.chips)


def test_unsettled_seconds_are_those_of_short_rows_with_this_layout_which_no_fit_has():
    kept = {row.id for row in measured_rows(ROWS).rows.values()}
    rows = {row.id: row for row in measured_rows(ROWS / "short.jsonl").rows.values()}
    unsettled = [(one, one.unsettled) for one in vendor_layouts() if one.unsettled]
    assert {name for _, seen in unsettled for name in seen.rows} == rows.keys() and not rows.keys() & kept
    for one, seen in unsettled:
        assert [rows[name].step_time_s for name in seen.rows] == list(seen.step_s)
        for row in (rows[name] for name in seen.rows):
            run, source = run_of(row), row.source or {}
            assert row.kind == "short" and row.inferred and "does not say" in str(row.inferred["platform"])
            assert replace(run.candidate, lnc=None) == Candidate.parse(
                one.layout.replace(",lnc=2", ""), run.cluster.num_ranks
            )
            assert (run.workload.seq_len, run.workload.global_batch) == (one.seq_len, one.global_batch)
            assert (run.cluster.num_nodes, run.cluster.chip.name) == (one.nodes, *one.chips)
            assert f"{source['repo']}/blob/{source['commit']}/{source['path']}" in seen.source


def test_a_log_that_had_not_settled_stands_beside_the_vendors_layout():
    found = asked("llama3-70b", 16)
    assert isinstance(found, Answer) and found.unsettled_run and found.nearest_run
    run = found.unsettled_run
    assert (run.num_runs, run.low_s, run.high_s, run.predicted_s) == (2, 320.22, 321.41, time_s(found.plan))
    assert "does not say which ran" in run.unsettled and not found.nearest_run.unsettled
    other = asked("llama3-70b", 8)
    assert isinstance(other, Answer) and other.unsettled_run == run, "it is compared at the nodes that it was logged on"


def asked(model: str, nodes: int, pins: str = "") -> Answer | str:
    return vendor_answer(ask(model, "trn1.32xlarge", nodes, pins=pins))


def test_the_vendors_layout_is_laid_on_the_ranks_there_are_with_the_nearest_run_beside_it():
    found = asked("llama3-70b", 8)
    assert isinstance(found, Answer) and not found.against
    assert str(found.plan.candidate) == "tp=32,pp=8,dp=1,recompute=selective[CoreAttention,LlamaMLP]"
    assert "on 16 x trn1.32xlarge" in found.why and found.source.endswith("hf_llama3_70B_config.yaml")
    run = found.nearest_run
    assert run and (run.num_runs, run.low_s, run.high_s) == (4, 128.482, 136.352)
    there = ask("llama3-70b", "trn1.32xlarge", 32)
    alike = plan_at(there, Candidate.parse("tp=32,pp=8,recompute=selective[CoreAttention,LlamaMLP]", 1024))
    assert run.predicted_s == time_s(alike)


def test_a_layout_that_the_rules_refuse_has_a_plan_only_where_it_is_wanted_even_so():
    request, candidate = ask("tiny-llama", ranks=8), Candidate.parse("tp=8,zero=3", 8)
    refused = rejections_of(request, candidate, request.engines[0])
    with pytest.raises(InputError) as caught:
        plan_at(request, candidate)
    assert [f"candidate: {one}" for one in refused] == str(caught.value).splitlines() and refused
    assert plan_at(request, candidate, even_refused=True).candidate == candidate


def test_why_there_is_no_vendors_layout_is_said():
    assert "is documented" in str(asked("qwen3-8b", 4))
    assert "does not divide the 96 ranks" in str(asked("llama3-70b", 3))
    assert "which tp=8 leaves out" in str(asked("llama3-70b", 16, "tp=8"))


def test_a_vendors_layout_answers_no_length_that_is_more_than_twice_another():
    request = ask("llama3-70b", "trn1.32xlarge", 16)
    for seq_len, far in ((32768, "more than 2 times as many"), (4095, "less than 1/2 of these")):
        work = replace(request.workload, seq_len=seq_len)
        words = f"documents one for llama3-70b on 16 x trn1.32xlarge with 8192 tokens a sequence; {seq_len} are {far}"
        assert words in str(vendor_answer(replace(request, workload=work)))
    for seq_len in (4096, 16384):
        work = replace(request.workload, seq_len=seq_len)
        assert isinstance(vendor_answer(replace(request, workload=work)), Answer)


@pytest.mark.slow
def test_a_vendors_layout_that_does_not_fit_is_shown_and_not_written():
    request = replace(ask("llama3-70b", "trn1.32xlarge", 16), memory_bytes=2**30)
    found = vendor_answer(request)
    assert isinstance(found, Answer) and "more than fit" in found.against[0]
    with pytest.raises(NoPlan, match=r"the vendor's layout tp=32,pp=8.* may not be run: .* more than fit"):
        PlanResult(answers=(found,), certificate=search(ask("tiny-llama")).certificate).runnable("vendor")


MIXTURES = {
    "deepseek-v3": (32, "tp=2,pp=8,ep=16,dp=16,recompute=full,stages=8*7/5,fold=tp"),
    "gemma3-1b": (1, "tp=1,pp=1,dp=8"),
    "llama3.2-3b": (1, "tp=1,pp=1,dp=8"),
    "smollm3-3b": (48, "tp=2,pp=1,dp=192,mbs=3,zero=0"),
    "deepseek-v2": (16, "tp=1,pp=4,ep=32,dp=32,recompute=full"),
    "qwen3-30b-a3b": (8, "tp=1,pp=1,ep=16,dp=64"),
    "gpt-oss-20b": (2, "tp=2,pp=4,ep=2,dp=2,fold=tp"),
    "gpt-oss-120b": (8, "tp=2,pp=4,ep=8,dp=8,fold=tp"),
}


@pytest.mark.parametrize(
    ("model", "nodes", "layout"), rest_is_slow([(model, *rest) for model, rest in MIXTURES.items()], 3, 4)
)
def test_each_family_of_2025_has_a_documented_layout_that_may_run(model: str, nodes: int, layout: str):
    request = ask(model, "h100-80", nodes)
    found = vendor_answer(request)
    assert isinstance(found, Answer) and (str(found.plan.candidate), found.against) == (layout, ())
    assert ("; here without a module that predicts" in found.why) == (model == "deepseek-v3")


BLACKWELLS = [  # model, cluster, nodes, layout; of Megatron-Bridge's recipes for chips of 2025
    ("deepseek-v3", "b300", 32, "tp=1,pp=8,ep=8,vp=2"),
    ("deepseek-v3", "gb300", 64, "tp=1,pp=4,ep=64,vp=4"),
    ("qwen3-235b-a22b", "gb200", 64, "tp=1,pp=8,ep=8"),
    ("qwen3-30b-a3b", "p6e-gb200", 2, "tp=1,pp=1,ep=8"),
    ("llama3-70b", "p6-b300", 8, "tp=1,pp=1"),
]


@pytest.mark.parametrize(("model", "cluster", "nodes", "sizes"), rest_is_slow(BLACKWELLS, 3, 4))
def test_newer_chips_have_documented_layouts_with_all_experts_of_a_layer_in_a_rack(
    model: str, cluster: str, nodes: int, sizes: str
):
    found = vendor_answer(ask(model, cluster, nodes))
    assert isinstance(found, Answer)
    layout = found.plan.candidate
    assert {key: getattr(layout, key) for key in parse_pins(sizes)} == parse_pins(sizes)
    assert {found.plan.cluster.link_of(group).kind for group in found.plan.mesh.groups("ep")} == {"switch"}


def test_a_layout_that_does_not_fit_as_asked_says_what_it_needs_as_documented_and_runs_if_asked_so():
    request = ask("qwen3-235b-a22b", "b200", 8)
    found = vendor_answer(request)
    assert isinstance(found, Answer)
    (against,) = found.against
    options = "--precision bf16,gradients=bf16 --expert-imbalance 0 --fix kernels=mcore"
    assert f"; as documented for qwen3-235b-a22b on 8 x b200 ({options}) it needs" in against
    work = replace(request.workload, precision=Precision.named("bf16,gradients=bf16"), expert_imbalance=0.0)
    so = vendor_answer(replace(request, workload=work, pins={"kernels": "mcore"}))
    assert isinstance(so, Answer) and not so.against and so.plan.kernels == "mcore"


FSDP_ASKED = [("tiny-llama", "h100-80", 1, 1), ("llama3-8b", "h100-80", 1, 1), ("mixtral-8x7b", "a100-80", 2, None)]


@pytest.mark.parametrize(("name", "cluster", "nodes", "mbs"), rest_is_slow(FSDP_ASKED, 0, 2))
def test_on_gpus_fsdp_is_an_answer_near_the_best_of_its_kind(name: str, cluster: str, nodes: int, mbs: int | None):
    request = replace(ask(name, cluster, nodes), pins={"mbs": mbs} if mbs else {})
    answers = answers_of(request, search(request, 2, simple_within=DOUBT))
    fsdp, fastest = answers.named("fsdp"), answers.named("fastest").plan
    layout = fsdp.plan.candidate
    assert (layout.zero, layout.tp, layout.pp) == (3, 1, 1) and "with FSDP (ZeRO-3" in fsdp.why
    assert fsdp.slower == pytest.approx(time_s(fsdp.plan) / time_s(fastest) - 1) and fsdp.slower >= 0
    assert fsdp.plan.candidate == fastest.candidate or fsdp.ratio, "how sure the difference is"
    alone = search(replace(request, pins={**request.pins, "zero": 3, "tp": 1, "pp": 1})).plans[0]
    assert time_s(alone) * (1 - 1e-9) <= time_s(fsdp.plan) <= 1.02 * time_s(alone)
    assert not any(answer.plan.candidate == layout for answer in answers.answers if answer.name == "other")


@pytest.mark.parametrize(
    ("cluster", "pins"),
    rest_is_slow([("trn1.32xlarge", ""), ("h100-80", "zero=1"), ("local", ""), ("h100-80", "tp=2")], 2, 2),
)
def test_elsewhere_and_where_pins_exclude_it_there_is_no_fsdp(cluster: str, pins: str):
    request = ask("tiny-llama", cluster, pins=",".join(filter(None, ["mbs=1,cp=1", pins])))
    assert search(request, simple_within=DOUBT).fsdp is None
