"""A batch of layouts is priced as the plan of each of them, and every constant shows in these prices."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost.calibration import CONSTANTS, OPTIONAL, SECONDS, uncalibrated
from autoshard.cost.departures import EFFICIENCIES
from autoshard.cost.predict import plan_cost, step_timer
from autoshard.cost.setting import only
from autoshard.cost.sharded import CutBlocks
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import parse_pins
from autoshard.plan.rules.check import legality
from autoshard.plan.tables import with_tables
from autoshard.search.bound.space import whole_space
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import Precision
from benchmarks.estimate_batch import evaluate
from tests.cost.cases import ask, plan_of
from tests.slower import rest_is_slow
from tests.tabled import cutting_of

SAMPLE = 6  # layouts of each case

# model, cluster, nodes, pins
CASES = {
    "dense-trn1": ("llama3-8b", "trn1.32xlarge", 4, ""),
    "large-trn1": ("llama3-70b", "trn1.32xlarge", 16, "schedule=interleaved,vp=2"),
    "dense-trn2": ("llama3-8b", "trn2.48xlarge", 2, ""),
    "nxd-core-zero-0": ("llama2-7b", "trn1.32xlarge", 4, "kernels=nxd_core,zero=0"),
    "partly-full": ("llama3-8b", "trn1.32xlarge", 4, "recompute=full:2"),
    "per-stage": ("llama3-8b", "trn1.32xlarge", 4, "pp=2,stages=15/17,recompute=full/none"),
    "dense-gpu": ("llama3-8b", "h100-80", 4, ""),
    "host-memory": ("llama3-8b", "a100-80", 2, "recompute=selective[activation,norms]+offload"),
    "host-memory-per-stage": ("llama3-8b", "a100-80", 2, "pp=2,stages=15/17,recompute=full/none+offload"),
    "copied-keys-recomputed": ("llama3-8b", "h100-80", 2, "recompute=selective[activation,norms]"),
    "narrow-states": ("tiny-deepseek", "h100-80", 1, ""),
    "experts-zero-3": ("mixtral-8x7b", "h100-80", 2, "zero=3"),
    "experts": ("mixtral-8x7b", "h100-80", 4, ""),
    "experts-over-cp": ("mixtral-8x7b", "h100-80", 2, "tp=1,pp=2,cp=2,schedule=interleaved,vp=2"),
    "experts-by-tokens": ("mixtral-8x7b", "h100-80", 4, "kernels=mcore+deepep"),
    "tied": ("gpt2-xl", "a100-40", 1, ""),
    "no-sp": ("llama3-8b", "h100-80", 2, "sp=false,schedule=gpipe"),
    "zigzag": ("llama3-8b", "h100-80", 2, "cp=2,cp_order=zigzag"),
    "heads-over-cp": ("llama3-8b", "h100-80", 2, "tp=1,cp_kind=all_to_all"),
    "interleaved-zero-0": ("llama3-8b", "h100-80", 2, "schedule=interleaved,vp=2,zero=0"),
    "split-v": ("llama3-70b", "h100-80", 16, "schedule=zb_v,vp=2"),
    "split-uneven": ("llama3-8b", "h100-80", 2, "schedule=zb_h1,pp=4,stages=7/9/9/7"),
    "mcore-zero-1": ("llama3-8b", "h100-80", 4, "kernels=mcore"),
    "torch-zero-0": ("llama3-8b", "h100-80", 2, "kernels=torch_cuda,zero=0"),
    "weights-over-nodes": ("mixtral-8x7b", "h100-80", 4, "zero=3,weight_group=8"),
    "weights-over-parts-of-groups": (
        "llama3-8b",
        "h100-80",
        4,
        "kernels=torch_cuda,zero=3,zero_group=8,weight_group=2",
    ),
    "torch-zero-3": ("llama3-8b", "h100-80", 2, "kernels=torch_cuda,zero=3"),
}

# No constant is another, or so near nothing that it would not show somewhere.
ACTIVE = replace(
    uncalibrated(),
    **dict(zip(EFFICIENCIES, (0.71, 0.05, 0.31, 0.83, 0.61, 0.43), strict=True)),
    **dict(zip(SECONDS, (8e-5, 1e-4, 0.07), strict=True)),
    **dict(zip(OPTIONAL, (2e-4, 3e-4, 2e-3, 1e-5, 1e-4, 1.3), strict=True)),
)
SLOW_VECTORS = replace(ACTIVE, vector_efficiency=0.02)  # those of GPUs are so fast that they hide behind memory
# NxD keeps masters only inside ZeRO-1.
NO_MASTERS = Precision(weights="bf16", activations="bf16", gradients="bf16", masters=None, moments="bf16")


def active(question):
    """Ask with constants each of which shows."""
    return replace(question, calibration=ACTIVE if question.cluster.engine == "nxd" else SLOW_VECTORS)


@pytest.mark.parametrize("case", rest_is_slow(CASES, 2, 5))
def test_a_batch_is_priced_as_the_tables_of_its_members(case):
    model, cluster, nodes, pins = CASES[case]
    precision = {"precision": NO_MASTERS} if "trn" in cluster and "zero=0" in pins else {}
    seq_len = {"gpt2-xl": 1024, "llama2-7b": 4096, "tiny-deepseek": 256}.get(model, 8192)
    hold_prices(active(ask(model, cluster, nodes, seq_len=seq_len, **precision)), pins)


def test_starts_that_take_longer_in_pipelines_are_priced_in_columns_beside_meshes_without_any():
    question = active(ask("llama3-8b", "h100-80", 4, seq_len=8192))
    hold_prices(replace(question, calibration=replace(question.calibration, joined_s=0.01)), "tp=4")


def hold_prices(question, pins):
    """Hold the prices of some layouts in columns against those of the plan of each."""
    facts = (question.model, question.cluster, question.workload)
    space = whole_space(*facts, question.cluster.engine, parse_pins(pins) if pins else {})
    question = replace(question, kernels=space.base.kernels or question.cluster.kernels)
    legal = np.flatnonzero(legality(space.columns(*facts, 0)))
    random = np.random.default_rng(7)
    space = space.only(np.sort(random.permutation(legal)[:SAMPLE]))
    # That of the layout with the largest tp serves all.
    cutting = cutting_of(question, space.candidate(int(np.argmax(space.rows["tp"])), 0), space.engine)
    together = evaluate(question, space, cutting)
    assert together.time_s.shape == (space.num_layouts, len(space.recomputes)) and space.num_layouts == SAMPLE
    for index in range(space.num_layouts):
        number = int(random.integers(len(space.recomputes)))
        candidate = space.candidate(index, number)
        plan = build_plan(candidate, *facts, space.engine)
        alone = plan_cost(with_tables(plan, cutting), question)
        found = together.time_s[index, number], together.peak_bytes[index, number]
        assert found == pytest.approx((float(alone.time_s), float(alone.peak_bytes)), rel=1e-9), str(candidate)
        blocks = CutBlocks(step=question.step, cutting=cutting, atoms=cut_atoms(candidate, question.model))
        assert step_timer(plan, blocks)(question.calibration) == pytest.approx(float(alone.time_s), rel=1e-9)


KERNELS = {
    "te": ("llama3-8b", "h100-80", "tp=4,pp=2,dp=2"),
    "mcore": ("llama3-8b", "h100-80", "tp=4,pp=2,dp=2"),
    "torch_cuda": ("llama3-8b", "h100-80", "tp=4,pp=2,dp=2,zero=3"),
    "nxd": ("llama3-8b", "trn1.32xlarge", "tp=8,pp=2,dp=4"),
    "nxd_core": ("llama2-7b", "trn1.32xlarge", "tp=8,pp=2,dp=4"),
}


@pytest.mark.parametrize("kernels", rest_is_slow(KERNELS, 2, 3))
def test_every_constant_shows_where_columns_are_compared(kernels):
    model, cluster, text = KERNELS[kernels]
    question = active(ask(model, cluster, 2, kernels=kernels, seq_len=4096))
    plan, constants = plan_of(question, text), question.calibration

    def cost(**changes):
        return plan_cost(plan, replace(question, calibration=replace(constants, **changes)))

    names = {*CONSTANTS, *OPTIONAL}
    waits = question.cluster.engine != "nxd"  # a compiled graph waits for no host
    idle = {"experts_s"} if waits else {"launch_s", "layer_s", "experts_s"}
    hidden = {"dp_ratio"} if 1.0 in load_kernels(kernels).hides.values() else set()  # all of it, behind passes
    showing = {name for name in names if cost(**{name: 0.9 * getattr(constants, name)}).time_s != cost().time_s}
    assert showing == names - idle - hidden
    assert (float(cost(task_s=0.0).seconds["waiting"]) > 0) == waits
    assert cost().seconds["fixed"] == constants.step_s


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
