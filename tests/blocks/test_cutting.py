"""The solver's tables for plans: Rules hold, one cutting serves many meshes, names do not matter."""

import functools
from dataclasses import replace

import pytest

from autoshard.blocks.choices import atom_dims
from autoshard.blocks.cutting import Meshes, Terms, operator_problem, solved_cutting
from autoshard.blocks.problem import ring_of_s
from autoshard.cost.setting import price_block, setting_of
from autoshard.cost.sharded import CutBlocks
from autoshard.layout.layout import Cutting
from autoshard.layout.legal import cut_operations, faults
from autoshard.plan.build import cut_atoms
from autoshard.plan.candidate import boundary_cuts
from autoshard.plan.lowering import ATOMS, KINDS
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.strategy import strategy_rules
from autoshard.spec.model_catalogue import model_names
from tests.cost.cases import ask, candidate_of

CASES = {
    "trn1": ("llama3-70b", "trn1.32xlarge", 4, "tp=32"),
    "ring": ("llama3-8b", "h100-80", 2, "tp=4,cp=2,dp=2"),
    "no-sp": ("llama3-8b", "h100-80", 2, "tp=8,sp=false"),
    "experts": ("mixtral-8x7b", "h100-80", 2, "tp=2,ep=4,cp=2,dp=4"),
    "alone": ("llama3-8b", "h100-80", 2, "tp=1"),
}


@functools.cache
def solved(case):
    model, cluster, nodes, text = CASES[case]
    question = ask(model, cluster, nodes)
    candidate = candidate_of(question, text)
    terms = Terms(engine=question.cluster.engine, sequence_parallel=candidate.sequence_parallel)
    return question, candidate, solved_cutting(question, candidate, terms)


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_cut_is_legal_and_every_rule_holds(case):
    question, candidate, cutting = solved(case)
    rules = strategy_rules(question.cluster.engine, sequence_parallel=candidate.sequence_parallel)
    real = cut_atoms(candidate, question.model)
    for kind in KINDS:
        block = question.step.block(kind, Recompute())
        assert not faults(block, cutting.block(kind), ATOMS)
        for op in cut_operations(block):
            cuts = cutting.block(kind)[op.name]
            tied = dict(op.kind.tied_dims())
            for atom in real:
                (place,) = [dim for dim, cut in cuts.items() if atom in cut and dim not in tied] or [""]
                assert place in atom_dims(block, op, atom, rules), (kind, op.name, atom, place)


@pytest.mark.parametrize("case", sorted(CASES))
def test_what_dp_cp_and_ep_cut_is_said_for_meshes_that_have_them(case):
    _, _, cutting = solved(case)
    assert cutting.block("layer")["attn_norm"]["batch"] == ("edp", "ep")
    assert cutting.block("layer")["attn_norm"]["seq"][0] == "cp"
    assert cutting.block("layer")["attend"]["kv_seq"] == ("cp",)


def test_a_ring_costs_the_solver_what_it_costs_a_block():
    question, candidate, cutting = solved("ring")
    question = replace(question, calibration=replace(question.calibration, collective_s=1e-3))
    problem = operator_problem(
        question, Meshes.of(question, candidate), Terms(engine="torch", sequence_parallel=True), "layer"
    )
    parts = [op for op in problem.block.select("micro_batch") if op.source == "attend"]
    cuts = cutting.only(set(problem.real_atoms)).block("layer")["attend"]
    ring_s = sum(ring_of_s(problem, op, cuts) for op in parts)
    blocks = CutBlocks(step=question.step, cutting=cutting, atoms=cut_atoms(candidate, question.model))
    cost = price_block(question, setting_of(question, candidate, blocks), "layer", Recompute())
    assert ring_s == pytest.approx(cost.part_s("cp"), rel=1e-9)


def test_a_cutting_of_some_atoms_is_that_of_a_mesh_with_these():
    _, _, cutting = solved("trn1")
    assert cutting.only(set(ATOMS)) == cutting
    whole = {kind: {name: {} for name in cutting.block(kind)} for kind in KINDS}
    assert cutting.only(frozenset()) == Cutting.of(whole, {})


@pytest.mark.parametrize("model", model_names())
def test_every_card_can_be_cut_on_both_engines(model):
    for engine in ("nxd", "torch"):
        question = ask(model, "trn2.48xlarge", 1, seq_len=512)
        for text in ("tp=16", "tp=4,sp=false"):
            candidate = candidate_of(question, text)
            terms = Terms(engine=engine, sequence_parallel=candidate.sequence_parallel)
            cutting = solved_cutting(question, candidate, terms)
            assert cutting.boundary == boundary_cuts(None, sequence_parallel=candidate.sequence_parallel)
