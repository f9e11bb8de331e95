"""A batch of layouts is priced as each of them alone."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.calibration import CONSTANTS, EFFICIENCIES, SECONDS, uncalibrated
from autoshard.cost.predict import plan_cost, step_timer
from autoshard.cost.sharded import CutBlocks
from autoshard.cost.stages import only
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import parse_pins
from autoshard.plan.rules.check import legality
from autoshard.plan.tables import with_tables
from autoshard.search.space import whole_space
from autoshard.spec.workload import Precision
from benchmarks.estimate_batch import evaluate
from tests.cost.cases import ask, plan_of
from tests.tabled import cutting_of

SAMPLE, KINDS = 7, 2  # layouts of each case, and of each the kinds of recompute that are priced by themselves

# model, cluster, nodes, pins
CASES = {
    "dense-trn1": ("llama3-8b", "trn1.32xlarge", 4, ""),
    "large-trn1": ("llama3-70b", "trn1.32xlarge", 16, ""),
    "dense-trn2": ("llama3-8b", "trn2.48xlarge", 2, ""),
    "dense-gpu": ("llama3-8b", "h100-80", 4, ""),
    "experts-gpu": ("mixtral-8x7b", "h100-80", 4, ""),
    "tied-gpu": ("gpt2-xl", "a100-40", 1, ""),
    "no-sp": ("llama3-8b", "h100-80", 2, "sp=false"),
    "zero-0": ("llama3-8b", "h100-80", 2, "zero=0"),
    "zero-3": ("llama3-8b", "h100-80", 2, "zero=3"),
    "zero-3-experts": ("mixtral-8x7b", "h100-80", 2, "zero=3"),
    "zigzag": ("llama3-8b", "h100-80", 2, "cp=2,cp_order=zigzag"),
    "heads-over-cp": ("llama3-8b", "h100-80", 2, "tp=1,cp_kind=all_to_all"),
    "all-forwards-first": ("llama3-8b", "h100-80", 2, "schedule=gpipe"),
    "interleaved-gpu": ("llama3-70b", "h100-80", 16, "schedule=interleaved,vp=2"),
    "split": ("llama3-8b", "h100-80", 4, "schedule=zb_h1"),
    "split-v": ("llama3-70b", "h100-80", 16, "schedule=zb_v,vp=2"),
    "split-uneven": ("llama3-8b", "h100-80", 2, "schedule=zb_h1,pp=4,stages=7/9/9/7"),
    "interleaved": ("llama3-70b", "trn1.32xlarge", 16, "schedule=interleaved,vp=2"),
    "partly-full": ("llama3-8b", "trn1.32xlarge", 4, "recompute=full:2"),
    "per-stage": ("llama3-8b", "trn1.32xlarge", 4, "pp=2,recompute=full/none"),
    "uneven": ("llama3-8b", "trn1.32xlarge", 4, "pp=2,stages=15/17"),
    "te-interleaved-zero-0": ("llama3-8b", "h100-80", 2, "schedule=interleaved,vp=2,zero=0"),
    "mcore-zero-0": ("llama3-8b", "h100-80", 2, "kernels=mcore,zero=0"),
    "mcore-zero-1": ("llama3-8b", "h100-80", 4, "kernels=mcore"),
    "mcore-zero-3": ("llama3-8b", "h100-80", 2, "kernels=mcore,zero=3"),
    "torch-zero-0": ("llama3-8b", "h100-80", 2, "kernels=torch_cuda,zero=0"),
    "torch-zero-1": ("llama3-8b", "h100-80", 2, "kernels=torch_cuda"),
    "torch-zero-3": ("llama3-8b", "h100-80", 2, "kernels=torch_cuda,zero=3"),
    "nxd-zero-0": ("llama3-8b", "trn1.32xlarge", 4, "zero=0"),
    "nxd-core": ("llama2-7b", "trn1.32xlarge", 4, "kernels=nxd_core"),
    "nxd-core-zero-0": ("llama2-7b", "trn1.32xlarge", 4, "kernels=nxd_core,zero=0"),
}

# No constant is another, or so near nothing that it would not show somewhere.
ACTIVE = replace(
    uncalibrated(),
    **dict(zip(EFFICIENCIES, (0.71, 0.05, 0.31, 0.83, 0.61, 0.43), strict=True)),
    **dict(zip(SECONDS, (8e-5, 1e-4, 0.07), strict=True)),
)
SLOW_VECTORS = replace(ACTIVE, vector_efficiency=0.02)  # those of GPUs are so fast that they hide behind memory
# NxD keeps masters only inside ZeRO-1.
NO_MASTERS = Precision(weights="bf16", activations="bf16", gradients="bf16", masters=None, moments="bf16")


def active(question):
    """Ask with constants each of which shows."""
    return replace(question, calibration=ACTIVE if question.cluster.engine == "nxd" else SLOW_VECTORS)


@pytest.fixture(params=CASES, scope="module")
def case(request):
    """A question, and a random part of its legal layouts, the same in every run."""
    model, cluster, nodes, pins = CASES[request.param]
    precision = {"precision": NO_MASTERS} if "trn" in cluster and "zero=0" in pins else {}
    seq_len = {"gpt2-xl": 1024, "llama2-7b": 4096}.get(model, 8192)
    question = active(ask(model, cluster, nodes, seq_len=seq_len, **precision))
    engine = question.cluster.engine
    facts = (question.model, question.cluster, question.workload)
    space = whole_space(*facts, engine, parse_pins(pins) if pins else {})
    question = replace(question, kernels=space.base.kernels or question.cluster.kernels)
    legal = space.only(legality(space.columns(*facts, 0)).mask)
    assert legal.num_layouts, "the case has legal layouts"
    random = np.random.default_rng(7)
    chosen = random.permutation(legal.num_layouts)[:SAMPLE]
    return question, legal.only(np.sort(chosen))


def most_cut(question, space):
    """The cutting of the layout with the largest tp, which serves all."""
    return cutting_of(question, space.candidate(int(np.argmax(space.rows["tp"])), 0), space.engine)


def test_a_batch_is_priced_as_the_tables_of_its_members(case):
    question, space = case
    together = evaluate(question, space, most_cut(question, space))
    assert together.time_s.shape == (space.num_layouts, len(space.recomputes))
    random = np.random.default_rng(11)
    for index in range(space.num_layouts):
        for number in random.permutation(len(space.recomputes))[:KINDS].tolist():
            candidate = space.candidate(index, number)
            plan = build_plan(candidate, question.model, question.cluster, question.workload, space.engine)
            alone = plan_cost(with_tables(plan, most_cut(question, space)), question)
            assert together.time_s[index, number] == pytest.approx(float(alone.time_s), rel=1e-9), str(candidate)
            assert together.peak_bytes[index, number] == pytest.approx(float(alone.peak_bytes), rel=1e-9), str(
                candidate
            )


def test_the_price_of_a_layout_does_not_depend_on_its_neighbours(case):
    question, space = case
    together = evaluate(question, space, most_cut(question, space))
    for index in (0, space.num_layouts - 1):
        alone = evaluate(question, space.only(np.array([index])), most_cut(question, space))
        assert together.time_s[index] == pytest.approx(alone.time_s[0], rel=1e-12)
        assert together.peak_bytes[index] == pytest.approx(alone.peak_bytes[0], rel=1e-12)


def plans_of(case):
    question, space = case
    for index in range(0, space.num_layouts, 3):
        candidate = space.candidate(index, 0)
        yield build_plan(candidate, question.model, question.cluster, question.workload, space.engine)


def test_a_fit_times_a_step_as_the_prediction_does(case):
    question, space = case
    for plan in plans_of(case):
        real = cut_atoms(plan.candidate, question.model)
        blocks = CutBlocks(step=question.step, cutting=most_cut(question, space), atoms=real)
        alone = plan_cost(plan, question, blocks)
        assert step_timer(plan, blocks)(question.calibration) == pytest.approx(float(alone.time_s), rel=1e-9), str(
            plan.candidate
        )


KERNELS = {
    "te": ("llama3-8b", "h100-80", "tp=4,pp=2,dp=2"),
    "mcore": ("llama3-8b", "h100-80", "tp=4,pp=2,dp=2"),
    "torch_cuda": ("llama3-8b", "h100-80", "tp=4,pp=2,dp=2,zero=3"),
    "nxd": ("llama3-8b", "trn1.32xlarge", "tp=8,pp=2,dp=4"),
    "nxd_core": ("llama2-7b", "trn1.32xlarge", "tp=8,pp=2,dp=4"),
}


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_constant_shows_where_columns_are_compared(kernels):
    model, cluster, text = KERNELS[kernels]
    question = active(ask(model, cluster, 2, kernels=kernels, seq_len=4096))
    plan, constants = plan_of(question, text), question.calibration
    cost = plan_cost(plan, question)

    def changes(name):
        other = replace(constants, **{name: 0.9 * getattr(constants, name)})
        return plan_cost(plan, replace(question, calibration=other)).time_s != cost.time_s

    idle = {"launch_s"} if question.cluster.engine == "nxd" else set()  # a compiled graph waits for no host
    assert {name for name in CONSTANTS if changes(name)} == {*CONSTANTS} - idle
    assert (float(cost.seconds["waiting"]) > 0) == (not idle)
    assert cost.seconds["fixed"] == constants.step_s


def test_tiles_of_a_matrix_unit_are_priced_in_columns_too():
    question = active(ask("gpt2-xl", "trn1.32xlarge", 1, seq_len=1000))
    plan = plan_of(question, "tp=1,dp=32")
    chip = replace(question.cluster.chip, matrix_tile=1)
    untiled = replace(question, cluster=replace(question.cluster, chip=chip))
    assert plan_cost(plan, question).time_s > 1.001 * plan_cost(replace(plan, cluster=untiled.cluster), untiled).time_s


def test_columns_inside_a_value_are_taken():
    value = {"a": np.array([1.0, 2.0]), "b": {"c": np.array([3.0, 4.0])}, "kind": "text"}
    assert only(value, np.array([1]))["a"].tolist() == [2]
    assert only(value, np.array([1, 1]))["b"]["c"].tolist() == [4, 4]
    assert only(value, np.array([0]))["kind"] == "text"
