"""A plan's own table, shrunk and executed on virtual ranks, computes what the unsharded model computes."""

import dataclasses

import pytest

from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.op import Array
from autoshard.layout import interpret
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump, load
from autoshard.plan.proof import MAX_RANKS, prove, shrink
from autoshard.plan.tables import plan_blocks, plan_programs
from autoshard.plan.verify import verify
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.slower import each_third_is_fast
from tests.tabled import tabled

CASES = {
    "trn1": ("llama3-70b", "trn1.32xlarge", 16, "tp=32,pp=8,dp=2,recompute=selective[CoreAttention,LlamaMLP]"),
    "ring": ("llama3-70b", "trn1.32xlarge", 16, "tp=32,pp=8,cp=2,dp=1"),
    "trn2": ("llama3-8b", "trn2.48xlarge", 1, "tp=16,pp=1,dp=4"),
    "no-sp": ("gpt-neox-20b", "a100-80", 1, "tp=8,pp=1,dp=1,sp=false"),
    "odd-vocab": ("gpt3-6.7b", "a100-80", 1, "tp=4,pp=2,dp=1,recompute=full"),
    "experts": ("mixtral-8x7b", "a100-80", 2, "tp=2,pp=1,ep=4,dp=8"),
    "sinks in a ring": ("gpt-oss-20b", "h100-80", 2, "tp=2,pp=1,cp=2,ep=4,dp=4"),
    "capped scores in a ring": ("gemma2-9b", "h100-80", 1, "tp=2,pp=1,cp=2,dp=2"),
    "experts, trn1": ("mixtral-8x7b", "trn1.32xlarge", 4, "tp=8,pp=1,dp=16"),
    "chunks": ("qwen3-8b", "a100-80", 1, "tp=2,pp=2,dp=2,vp=3,schedule=interleaved"),
    "boundary": ("llama2-7b", "a100-80", 1, "tp=2,pp=2,dp=2,sp=false,boundary=[batch/dp, seq, hidden/tp]"),
    "ultraserver": ("llama3-8b", "trn2u.48xlarge", 1, "tp=16,pp=1,dp=4"),
    "one chip": ("llama3-8b", "trn1.2xlarge", 1, "tp=2,pp=1,dp=1"),
    "stated recompute": (
        "deepseek-v3",
        "h100-80",
        16,
        "tp=2,pp=4,ep=8,recompute=selective[up_projections,experts,shared_experts]",
    ),
    "mixed": ("llama2-7b", "a100-80", 1, "tp=2,pp=2,dp=2,recompute=full:3/selective[attention]"),
}


def plan(case, **changes):
    name, cluster, nodes, text = CASES[case]
    where = load_cluster(cluster, nodes)
    candidate = Candidate.parse(text, where.num_ranks)
    work = Workload(seq_len=2048, global_batch=256, precision=Precision.named("bf16"), **changes)
    return tabled(build_plan(candidate, load_model(name), where, work, where.engine))


@pytest.mark.parametrize("case", each_third_is_fast(sorted(CASES)))
def test_the_sharded_plan_computes_the_same_on_few_ranks_with_every_axis_and_option(case):
    whole = plan(case)
    proof = prove(whole)
    assert proof.holds and proof.lost == ()
    assert {block.name for block in proof.blocks} >= {"embed", "layer", "head"}
    layer = next(block for block in proof.blocks if block.name == "layer")
    assert layer.num_results == len(plan_blocks(whole)["layer"].parameters) + 2
    assert sum(layer.collectives.values()) >= 4
    assert "plan-strategies" not in {found.rule_id for found in verify(whole)}
    large, small = whole.candidate, shrink(whole)[0].candidate
    assert small.num_ranks <= MAX_RANKS
    for axis in ("tp", "pp", "cp", "ep", "dp"):
        assert (getattr(small, axis) > 1) == (getattr(large, axis) > 1), axis
    kept = ("vp", "zero", "schedule", "cp_kind", "cp_order", "sequence_parallel", "kernels", "boundary")
    assert [getattr(small, name) for name in kept] == [getattr(large, name) for name in kept]


def test_full_experts_drop_the_tokens_that_the_table_says():
    whole = plan("experts")
    assert shrink(whole)[0].workload.expert_capacity is None  # what is summed when depends on it
    tight = dataclasses.replace(whole, workload=dataclasses.replace(whole.workload, expert_capacity=0.5))
    assert shrink(tight)[0].workload.expert_capacity == 0.5
    assert prove(tight).holds


@pytest.mark.parametrize("case", ["ring", "no-sp"])
def test_the_sharded_plan_keeps_documents_apart(case):
    whole = plan(case, documents="separate")
    assert shrink(whole)[0].workload.documents == "separate"
    assert prove(whole).holds


def test_a_ring_that_forgets_documents_is_no_proof(monkeypatch):
    visible = Attend.visible
    monkeypatch.setattr(Attend, "visible", lambda kind, at, keys, *starts: visible(kind, at, keys))
    uncut = Block.run

    def with_documents(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Attend, "visible", visible)
            uncut(*args)

    monkeypatch.setattr(Block, "run", with_documents)
    assert not prove(plan("ring", documents="separate")).holds and prove(plan("ring")).holds


@pytest.mark.parametrize("forgotten", ["with_sinks", "sink_gradient"])
def test_sinks_that_do_not_join_a_ring_once_are_no_proof(forgotten: str, monkeypatch: pytest.MonkeyPatch):
    whole, right = plan("sinks in a ring"), getattr(interpret, forgotten)
    assert prove(whole).holds

    def joined_at_each_hop(*arrays: Array) -> object:
        if forgotten == "with_sinks":
            return right(*right(*arrays), arrays[2])
        return 2 * right(*arrays)

    monkeypatch.setattr(interpret, forgotten, joined_at_each_hop)
    wrong = [block.name for block in prove(whole).blocks if not block.holds]
    assert wrong == ["local", "layer"]


def with_line(whole, entry, old, new):
    line = whole.strategies["layer"][entry].replace(old, new)
    assert line != whole.strategies["layer"][entry]
    layer = {**whole.strategies["layer"], entry: line}
    return dataclasses.replace(whole, strategies={**whole.strategies, "layer": layer})


def test_an_edited_collective_is_what_is_executed_and_a_wrong_line_a_reason_against_the_plan():
    whole = plan("trn1")
    proof = prove(
        with_line(whole, "attn_out", "F reduce_scatter seq/tp", "F all_reduce /tp, slice seq/kv, slice seq/rep")
    )
    layer = next(block for block in proof.blocks if block.name == "layer")
    assert proof.holds and layer.collectives["slice"] == 2
    broken = with_line(whole, "attn_out", "reduce_scatter", "all_gather")
    messages = [found.message for found in verify(broken) if found.rule_id == "plan-strategies"]
    assert messages and "strategies.layer.attn_out" in messages[0] and "write:" in messages[0]
    with pytest.raises(InputError, match="no such block"):
        plan_programs(dataclasses.replace(whole, strategies={**whole.strategies, "tail": {}}))
    tables = whole.strategies  # those of kinds of recompute list only what differs
    assert len(tables["layer selective[CoreAttention,LlamaMLP]"]) < len(tables["layer"]) / 2


def large(text, cluster="trn1.32xlarge"):
    candidate = Candidate.parse(text)
    place = load_cluster(cluster, num_nodes=candidate.num_ranks // load_cluster(cluster).num_ranks)
    workload = Workload(seq_len=8192, global_batch=256, precision=Precision.named("bf16"))
    return tabled(build_plan(candidate, load_model("llama3-70b"), place, workload, place.engine))


@pytest.mark.parametrize("max_ranks", [2, 3, 8, 16])
def test_few_ranks_suffice_though_more_share_a_port(max_ranks):
    small = shrink(large("tp=8,pp=8,dp=8,recompute=full:8/none*7"), max_ranks)[0]
    assert small.mesh.num_ranks <= max_ranks and small.mesh.size("tp") == 2
    assert plan_programs(small) and load(dump(small)) == small
    assert all(small.mesh.num_ranks % link.ranks_per_port == 0 for link in small.cluster.links)


@pytest.mark.parametrize("cluster", ["gb200-nvl72", "h100-80", "trn2.48xlarge"])
def test_a_plan_of_any_machine_is_proven_also_where_only_racks_have_links(cluster: str):
    place = load_cluster(cluster, num_nodes=2)
    candidate = Candidate(tp=2, dp=place.num_ranks // 2)
    workload = Workload(seq_len=2048, global_batch=256, precision=Precision.named("bf16"))
    made = build_plan(candidate, load_model("tiny-llama"), place, workload, "torch")
    assert prove(tabled(made)).holds


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ("tiny-gemma3", "pp=4,recompute=none*3/full"),
        ("tiny-gpt-oss", "pp=4,recompute=full/none/selective[mlp]/none"),
        ("tiny-deepseek", "pp=2,vp=2,schedule=zb_v,recompute=none/selective[mlp]*2/none"),
        ("tiny-glm4-moe", "pp=4,recompute=full/none*3"),  # only the dense layer is computed again
    ],
)
def test_layers_of_several_kinds_are_proven_under_what_they_compute_again_and_no_other(model: str, recompute: str):
    card, place = load_model(model), load_cluster("h100-80")
    workload = Workload(seq_len=256, global_batch=256, precision=Precision.named("bf16"))
    whole = tabled(build_plan(Candidate.parse(recompute, 8), card, place, workload, "torch"))
    small, lost = shrink(whole)
    every = "kinds of recompute" not in str(lost)
    assert plan_blocks(small).keys() <= plan_blocks(whole).keys() and prove(whole).holds
    assert not every or plan_blocks(small).keys() == plan_blocks(whole).keys()
    alone = shrink(whole, 1)[0]
    assert plan_blocks(alone).keys() <= plan_blocks(whole).keys() and plan_programs(alone)


def test_what_has_no_effect_without_its_axis_is_given_up_by_name():
    plan = large("tp=8,pp=4,dp=4,vp=4,schedule=interleaved,recompute=full:2", "h100-80")
    (kept, none), (less, lost) = shrink(plan, 8), shrink(plan, 2)
    assert kept.candidate.vp == 4 and not none
    assert less.candidate.vp == 1 and less.candidate.schedule == "1f1b"
    assert lost == (
        "pp=4: no room for it on 2 ranks",
        "dp=4: no room for it on 2 ranks",
        "schedule=interleaved: there is only one pipeline rank",
    )
    small = shrink(large("tp=8,pp=1,cp=2,dp=1,cp_order=zigzag", "h100-80"), 2)[0]
    assert small.cp_order == "contiguous" and small.mesh.size("cp") == 1
    assert plan_programs(less) and plan_programs(small)
