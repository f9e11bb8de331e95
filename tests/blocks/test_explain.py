"""What explain says adds up to what the plan predicts, and its second-best cuts are those that a new search finds."""

import functools
import math
from dataclasses import replace

import pytest

from autoshard.blocks.choices import real_cuts
from autoshard.blocks.cutting import Meshes, Terms, operator_problem
from autoshard.blocks.explain import explain, second_best
from autoshard.blocks.operators import solve
from autoshard.cost.built_in import calibration_of
from autoshard.cost.predict import question_of
from autoshard.cost.setting import price_block, setting_of
from autoshard.cost.sharded import ListedBlocks
from autoshard.cost.step import PARTS
from autoshard.errors import InputError
from autoshard.layout.pin import pins_of
from autoshard.plan.candidate import Candidate
from autoshard.search.bound.request import plan_at
from tests.search.brute_force import ask
from tests.slower import each_third_is_fast

CASES = {
    "trn1": (ask("llama3-70b", "trn1.32xlarge", 4), "tp=32,pp=2,recompute=selective[LlamaMLP]"),
    "ring": (ask("llama3-8b", "h100-80"), "tp=4,cp=2,recompute=full:3"),
    "experts": (ask("mixtral-8x7b", "h100-80", 2), "tp=2,ep=4,dp=8"),
    "hidden": (ask("llama3-8b", "h100-80"), "tp=8,kernels=mcore"),
    "short": (ask("tiny-llama", "h100-80"), "tp=2,dp=4,kernels=torch_cuda"),
    "tiny": (ask("tiny-llama"), "tp=2,pp=2"),
    "alone": (ask("tiny-llama", ranks=1), "tp=1"),
}


@functools.cache
def plan(case):
    request, text = CASES[case]
    return plan_at(request, Candidate.parse(text, request.cluster.num_ranks))


@functools.cache
def explained(case):
    return explain(plan(case))


@pytest.mark.parametrize("case", each_third_is_fast(sorted(CASES)))
def test_the_parts_add_up_to_the_blocks_that_the_prediction_is_made_of(case):
    question, blocks = question_of(plan(case), calibration_of(plan(case))), ListedBlocks.of(plan(case))
    setting = setting_of(question, plan(case).candidate, blocks)
    drops = dict(zip([block.name for block in explained(case).blocks], explained(case).blocks, strict=True))
    for kind, drop in blocks.kinds:
        name = kind if drop.kind == "none" else f"{kind} {drop}"
        if name in drops:
            cost = price_block(question, setting, kind, drop)
            block, seconds = drops[name], {part: float(cost.part_s(part)) for part in PARTS}
            sending_s, sent = seconds["tp"] + seconds["cp"] + seconds["ep"], sum(map(float, cost.sent_bytes.values()))
            assert [block.compute_s, block.waiting_s, block.sending_s - block.hidden_s] == pytest.approx(
                [seconds["compute"], seconds["waiting"], sending_s], rel=1e-12
            )
            assert block.time_s == pytest.approx(sum(seconds.values()), rel=1e-12)
            assert sum(one.sent_bytes for step in block.steps for one in step.sent) == pytest.approx(sent, rel=1e-12)
    found = explained(case)
    assert sum(block.count for block in found.blocks if block.name.startswith("layer")) == plan(case).model.num_layers
    for block in found.blocks:
        assert {step.name for step in block.steps} == {*plan(case).strategies[block.name.split()[0]]}


def layer_of(case):
    return next(block for block in explained(case).blocks if block.name.startswith("layer"))


def test_what_hides_and_what_waits_stands_apart():
    hidden, short, plain = layer_of("hidden"), layer_of("short"), layer_of("trn1")
    assert plain.hidden_s == plain.waiting_s == 0, "NxD hides nothing, and its graphs are started whole"
    pieces = [
        one
        for step in hidden.steps
        for one in step.sent
        if one.collective.split()[0] in ("all_gather", "reduce_scatter")
    ]
    but_first = 7 / 8 * sum(one.time_s for one in pieces)
    assert hidden.hidden_s == pytest.approx(but_first), "all but a product's first piece"
    assert short.waiting_s > short.compute_s, "kernels on so few numbers end before the next is launched"
    kernels = sum(sum(step.seconds.values()) for step in short.steps)
    assert kernels == pytest.approx(short.compute_s)


def test_all_passes_of_a_fused_kernel_stand_with_its_first_operation():
    steps = {step.name: step.seconds for step in layer_of("trn1").steps}
    assert set(steps["q"]) == {"F", "I", "W"} and not steps["k"] and not steps["v"]


@pytest.mark.parametrize("case", ["trn1", "tiny"])
def test_the_second_best_cut_is_what_a_search_without_the_best_one_finds(case):
    question = question_of(plan(case), calibration_of(plan(case)))
    terms = Terms(engine=plan(case).engine, sequence_parallel=plan(case).sp)
    problem = operator_problem(question, Meshes.of(question, plan(case).candidate), terms, "layer")
    best = solve(problem)
    others = second_best(problem, best.cuts, terms.rules)
    checked = 0
    for name, own in best.cuts.items():
        rest = [cuts for cuts in problem.allowed[name] if real_cuts(cuts) != real_cuts(own)]
        costs = [cost_with(problem, name, cuts) for cuts in rest]
        if min(costs, default=math.inf) < math.inf:
            assert others[name].refused is None
            assert others[name].more_s == pytest.approx(min(costs) - best.cost_s, abs=1e-12 + 1e-9 * best.cost_s)
            assert others[name].more_s >= -1e-12
            checked += 1
        elif name in others:
            assert others[name].refused
    assert checked >= 2  # NxD leaves little to choose


def cost_with(problem, name, cuts):
    try:
        return solve(replace(problem, allowed={**problem.allowed, name: (cuts,)})).cost_s
    except (AssertionError, InputError):
        return math.inf


def test_one_rank_sends_nothing_and_has_no_choice():
    for block in explained("alone").blocks:
        assert not any(step.sent for step in block.steps) and not [step for step in block.steps if step.other]


def test_a_pinned_cut_may_be_worse_than_its_second_best():
    request = replace(CASES["tiny"][0], layouts=pins_of({"act": "[batch, seq/dp, ffn/tp]"}, "--pin"))
    found = explain(plan_at(request, Candidate.parse("tp=2,dp=2")))
    layer = next(block for block in found.blocks if block.name == "layer")
    step = next(step for step in layer.steps if step.name == "act")
    assert step.gives == "[batch, seq/dp, ffn/tp]"
    assert min(one.other.more_s for one in layer.steps if one.other and one.other.refused is None) < 0
