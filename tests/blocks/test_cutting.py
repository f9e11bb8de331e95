"""The solver's tables for plans: Rules hold, one cutting serves many meshes, names do not matter."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from autoshard.blocks.choices import atom_dims
from autoshard.blocks.cutting import Meshes, Terms, operator_problem, shared_cuttings, solved_cutting
from autoshard.blocks.operators import solve
from autoshard.blocks.parts import PricedParts
from autoshard.blocks.problem import ring_of_s
from autoshard.cost.built_in import built_in
from autoshard.cost.predict import predict
from autoshard.cost.setting import price_block, setting_of
from autoshard.cost.sharded import CutBlocks
from autoshard.layout.layout import Cutting
from autoshard.layout.legal import cut_operations, faults
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import boundary_cuts
from autoshard.plan.lowering import ATOMS
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.strategy import strategy_rules
from autoshard.search.bound.watch import SearchStopped
from autoshard.spec.model_catalogue import model_names
from tests.cost.cases import ask, candidate_of
from tests.slower import rest_is_slow

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
    for kind in dict(cutting.blocks):
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
    setting = setting_of(question, candidate, blocks)
    cost, ring = price_block(question, setting, "layer", Recompute()), setting.rings["cp",]
    sends = [
        one for one in setting.blocks.block("layer", Recompute()).sharding.messages if one.collective.kind == "permute"
    ]
    starts_s = sum(float(ring.starts_s(one.collective)) for one in sends)  # by hosts, so in no message of the block
    assert ring_s == pytest.approx(cost.part_s("cp") + starts_s, rel=1e-9) and starts_s > 0


def test_a_cut_counts_what_hosts_take_to_start_its_messages():
    """A rank of few tokens waits for its hosts: cuts with more and smaller messages are no gain there."""
    question, step_s = ask("llama3-70b", "h100-80", 2, seq_len=4096, global_batch=64), list[float]()
    question = replace(question, calibration=built_in("h100-80"))
    candidate = candidate_of(question, "tp=8,pp=2,dp=1")
    blind = replace(question.calibration, collective_s=0.0, joined_s=0.0)
    for asked in (question, replace(question, calibration=blind)):
        cutting = solved_cutting(asked, candidate, Terms.of(candidate, "torch"))
        blocks = CutBlocks(step=question.step, cutting=cutting, atoms=cut_atoms(candidate, question.model))
        plan = build_plan(candidate, question.model, question.cluster, question.workload, "torch")
        step_s.append(predict(plan, question.calibration, blocks).step_time_s)
    assert step_s[0] < 0.95 * step_s[1]


def test_a_cutting_of_some_atoms_is_that_of_a_mesh_with_these():
    _, _, cutting = solved("trn1")
    assert cutting.only(set(ATOMS)) == cutting
    whole = {kind: {name: {} for name in cutting.block(kind)} for kind in dict(cutting.blocks)}
    assert cutting.only(frozenset()) == Cutting.of(whole, {})


QUICK = ("llama3-8b", "mixtral-8x7b")


@pytest.mark.parametrize("model", rest_is_slow(sorted(model_names(), key=lambda name: name not in QUICK), 2, 6))
def test_every_card_can_be_cut_on_both_engines(model):
    for engine in ("nxd", "torch"):
        question = ask(model, "trn2.48xlarge", 1, seq_len=512)
        for text in ("tp=16", "tp=4,sp=false"):
            candidate = candidate_of(question, text)
            terms = Terms(engine=engine, sequence_parallel=candidate.sequence_parallel)
            cutting = solved_cutting(question, candidate, terms)
            assert cutting.boundary == boundary_cuts(None, sequence_parallel=candidate.sequence_parallel)


def test_cuttings_of_many_meshes_may_be_stopped_between_any_two_parts_of_a_block():
    question, candidate, _ = solved("experts")
    mesh, looks = Meshes.of(question, candidate), list[int]()
    columns = Meshes(
        atoms={atom: np.array([size]) for atom, size in mesh.atoms.items()},
        num_sequences=np.array([mesh.num_sequences]),
        num_micro_batches=np.array([mesh.num_micro_batches]),
        ring=mesh.ring,
    )
    terms = Terms(engine=question.cluster.engine, sequence_parallel=candidate.sequence_parallel)
    next(shared_cuttings(question, columns, (terms, 0.0), lambda: looks.append(0)))
    num_ops = sum(len(question.step.block(kind, Recompute()).ops) for kind in question.step.kinds)
    assert len(looks) > num_ops / 3, "each operation and each tensor that is delivered is a part"

    def stop() -> None:
        if len(looks) == 5:
            raise SearchStopped("in the middle")
        looks.append(0)

    looks.clear()
    with pytest.raises(SearchStopped):
        next(shared_cuttings(question, columns, (terms, 0.0), stop))


@pytest.mark.parametrize("model", ["tiny-gpt-oss", "tiny-gemma3", "tiny-deepseek"])
def test_blocks_that_share_parts_are_cut_as_each_alone_and_price_less(model):
    question = ask(model, "h100-80", 1, seq_len=512)
    candidate = candidate_of(question, "tp=2,cp=2,dp=2,mbs=2")
    terms = Terms(engine=question.cluster.engine, sequence_parallel=True)
    meshes, priced, alone_counts = Meshes.of(question, candidate), PricedParts(), list[int]()
    for kind in question.step.kinds:
        problem, alone = operator_problem(question, meshes, terms, kind), PricedParts()
        shared, single = solve(problem, priced), solve(problem, alone)
        assert shared == single
        alone_counts.append(len(alone.parts))
    assert len(question.model.layer_counts) > 1 and len(priced.parts) < 0.9 * sum(alone_counts)


def test_a_part_with_other_choices_is_priced_anew():
    question = ask("llama3-8b", "h100-80", 1)
    terms, meshes = Terms(engine="torch", sequence_parallel=True), Meshes.of(question, candidate_of(question, "tp=8"))
    problem, priced = operator_problem(question, meshes, terms, "layer"), PricedParts()
    solve(problem, priced)
    whole = replace(problem, allowed={**problem.allowed, "up": ({},)})
    assert solve(whole, priced) == solve(whole)
    assert solve(whole).cost_s > solve(problem, priced).cost_s
