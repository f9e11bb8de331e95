"""Forms stand for exactly what a table lists: every weight once, every collective claimed, anything else a fault."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from autoshard.plan.candidate import Candidate
from autoshard.plan.nxd.forms import plan_forms
from autoshard.plan.nxd.match import Form
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, plan_programs
from autoshard.plan.verify import verify
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.record import options_on
from autoshard.spec.workload import Precision, Workload
from tests.slower import rest_is_slow

LLAMA = ("llama3-70b", "trn1.32xlarge", "tp=32,pp=8,dp=2")
MIXTRAL = ("mixtral-8x7b", "trn1.32xlarge", "tp=8,pp=4,dp=4,mbs=8", 4096, "bf16")
DROPS = ("mixtral-8x7b", "trn1.32xlarge", "tp=8,pp=4,dp=4", 4096, "bf16", 2.0)


def planned(
    model: str | ModelSpec, cluster: str, text: str, seq_len: int = 8192, precision: str = "bf16",
    expert_capacity: float | None = None,
) -> Plan:  # fmt: skip
    candidate, card = Candidate.parse(text), load_model(model) if isinstance(model, str) else model
    place = load_cluster(cluster, num_nodes=candidate.num_ranks // load_cluster(cluster).num_ranks)
    workload = Workload(
        seq_len=min(seq_len, card.max_positions), global_batch=1024, precision=Precision.named(precision),
        expert_capacity=expert_capacity,
    )  # fmt: skip
    return plan_at(
        Request(model=card, cluster=place, workload=workload, engines=("nxd",)), candidate, even_refused=True
    )


def forms_of(plan: Plan) -> dict[str, tuple[Form, ...]]:
    forms, faults = plan_forms(plan, plan_programs(plan))
    assert not faults, plan.candidate
    return dict(forms)


CUTS = (
    ("trn1.32xlarge", "tp=32,pp=1,dp=1", 2048, "bf16"),
    ("trn2.48xlarge", "tp=4,pp=1,dp=16,sp=false", 2048, "bf16", 1.25),
)
BUILT = [name for name in model_names() if not options_on(load_model(name))]  # a Rule refuses the others
CARDS = [[name, *CUTS[number % 2]] for number, name in enumerate(BUILT)]
ODD = [  # cp, one rank of tp, keys on fewer ranks than tp has, recompute
    ("llama3-70b", "trn1.32xlarge", "tp=32,pp=4,cp=2,dp=2"),
    ("llama3-8b", "trn1.32xlarge", "tp=1,pp=1,dp=32"),
    ("gpt2-xl", "trn2.48xlarge", "tp=64,pp=1,dp=1,sp=false,kernels=nxd_core"),
    ("qwen3-8b", "trn1.32xlarge", "tp=32,pp=2,dp=2,recompute=full"),
    ("mixtral-8x7b", "trn1.32xlarge", "tp=1,pp=1,dp=32"),
]


@pytest.mark.parametrize("case", rest_is_slow(CARDS, fast=2) + ODD, ids=lambda case: " ".join(map(str, case)))
def test_forms_hold_every_weight_once_however_a_card_is_cut(case: Any) -> None:
    plan = planned(*(case if load_model(case[0]).num_experts else case[:4]))
    forms = forms_of(plan)
    for kind, block in plan_blocks(plan).items():
        if kind == block.kind:
            pieces = Counter(piece.tensor for form in forms[kind] for one in form.parameters for piece in one.pieces)
            assert pieces == Counter(tensor.name for tensor in block.parameters)
            replaced = [leaf for form in forms[kind] for leaf in form.leaves]
            assert len(replaced) == len(set(replaced))


def experts_of(plan: Plan) -> Form:
    return next(form for form in forms_of(plan)["layer"] if form.layer == "MoE")


@pytest.mark.parametrize(("sp", "summed"), [("true", True), ("false", False)])
def test_experts_are_one_layer_from_the_router_on(sp: str, summed: bool) -> None:
    form = experts_of(planned("mixtral-8x7b", "trn1.32xlarge", f"tp=8,pp=4,dp=2,sp={sp}"))
    assert form.leaves[0] == "router" and form.leaves[-1] == "combine" and len(form.leaves) == 11
    assert form.arguments["sequence_parallel_enabled"] is summed
    router, inner, outer = form.parameters
    assert (router.split, router.summed) == (None, summed) and (inner.split, outer.split) == (2, 1)
    assert [piece.tensor for piece in inner.pieces] == ["gate.weight", "up.weight"]  # NxD takes the gate first
    assert [dim for (dim,) in outer.pieces[0].axes] == ["experts", "ffn", "hidden"]
    experts: Any = form.arguments["expert_mlps"]  # no token is dropped, so that they run block by block
    assert experts["capacity_factor"] == 0.0 and not experts["normalize_top_k_affinities"]


@pytest.mark.parametrize(
    ("capacity", "text"), [(2.0, "tp=8,pp=4,dp=2"), (1.25, "tp=8,pp=2,cp=2,dp=2"), (4.0, "tp=8,pp=1,dp=4")]
)
def test_nxd_counts_as_many_slots_as_the_plan(capacity: float, text: str) -> None:
    # expert_mlps_v2.py forward_capacity_factor: math.ceil(tokens * top_k * capacity_factor / num_experts)
    plan = planned("mixtral-8x7b", "trn1.32xlarge", text, 4096, "bf16", capacity)
    experts: Any = experts_of(plan).arguments["expert_mlps"]
    tokens = 4096 // plan.mesh.size("cp")
    assert math.ceil(tokens * 2 * experts["capacity_factor"] / 8) == tokens * 2 * capacity / 8
    assert 0 < experts["capacity_factor"] < 8 / 2  # from there on NxD sends all tokens through all experts


def test_experts_with_a_function_that_nxd_computes_otherwise_have_no_form() -> None:
    card = replace(load_model("mixtral-8x7b"), activation="gelu_tanh")
    plan = planned(card, "trn1.32xlarge", "tp=8,pp=4,dp=2", 4096, "bf16", 2.0)
    faults = [str(fault) for fault in plan_forms(plan, plan_programs(plan))[1]]
    assert any("router: no layer of NxD is einsum, top_k" in fault and "gelu_tanh" in fault for fault in faults)


def test_layers_follow_from_layouts() -> None:
    forms = forms_of(planned(*LLAMA))
    loss = ("logits_fp32", "top", "shifted", "power", "total", "log_total", "picked", "token_loss")
    assert [(form.layer, form.leaves) for block in forms.values() for form in block if form.layer != "leaf"] == [
        ("ParallelEmbedding", ("embed",)),
        ("GQAQKVColumnParallelLinear", ("q", "k", "v")),
        ("RowParallelLinear", ("o",)),
        ("ColumnParallelLinear", ("up", "gate")),
        ("RowParallelLinear", ("down",)),
        ("ColumnParallelLinear", ("unembed",)),
        ("parallel_cross_entropy", loss),
    ]
    heads = forms["layer"][1]
    assert heads.arguments["kv_size_multiplier"] == 4 and heads.arguments["output_sizes"] == (8192, 1024)
    assert [(one.name, one.copies) for one in heads.parameters] == [("weight_q", 1), ("weight_k", 4), ("weight_v", 4)]


@pytest.mark.parametrize(("sp", "sequence"), [("true", True), ("false", False)])
def test_sequence_parallelism_and_sums_are_read_off_the_table(sp: str, sequence: bool) -> None:
    layer = forms_of(planned("llama2-13b", "trn1.32xlarge", f"tp=8,pp=4,dp=2,sp={sp}"))["layer"]
    (weight,) = layer[1].parameters  # without copies of keys one weight holds queries, keys and values
    assert [piece.tensor for piece in weight.pieces] == ["q.weight", "k.weight", "v.weight"]
    linear = [form for form in layer if form.layer.endswith("Linear")]
    assert linear and all(form.arguments["sequence_parallel_enabled"] == sequence for form in linear)
    assert {one.summed for form in layer if form.layer == "leaf" for one in form.parameters} == {sequence}
    # NxD drops the reduced copy of a column layer's gradient when the formats differ.
    assert all(form.arguments["reduce_dtype"] == form.arguments["dtype"] for form in linear)


@pytest.mark.parametrize(
    ("case", "entry", "old", "new", "layer"),
    [
        (LLAMA, "layer.attn_out", "F reduce_scatter seq/tp", "F all_reduce /tp, slice seq/kv, slice seq/rep", "RowPar"),
        (LLAMA, "layer.mlp_in", "I reduce_scatter seq/tp", "I all_reduce /tp, slice seq/kv, slice seq/rep", "Column"),
        (LLAMA, "layer.k_in", "I all_reduce /rep", "I reduce_scatter seq/rep, all_gather seq/rep", "GQAQKV"),
        (LLAMA, "head.picked_out", "F all_reduce /tp", "F reduce_scatter seq/tp, all_gather seq/tp", "parallel_cross"),
        (LLAMA, "embed.embed_out", "F reduce_scatter seq/tp", "F all_reduce /tp, slice seq/kv, slice seq/rep", "Par"),
        (MIXTRAL, "layer.mlp_in", "I all_reduce /tp, slice seq/tp", "I reduce_scatter seq/tp", "MoE"),
        (DROPS, "layer.expert_in", "I all_reduce /tp", "I reduce_scatter slots/tp, all_gather slots/tp", "MoE"),
        (MIXTRAL, "layer.router_out", "F all_gather seq/tp", "F all_to_all seq>experts/tp, all_gather experts/tp", "M"),
        (DROPS, "layer.mlp_out", "F reduce_scatter seq/tp", "F all_reduce /tp, slice seq/tp", "MoE"),
        (DROPS, "layer.share_out", "I all_reduce /tp", "I reduce_scatter seq/tp, all_gather seq/tp", "MoE"),
    ],
)  # fmt: skip
def test_other_collectives_with_the_same_result_are_refused(
    case: Any, entry: str, old: str, new: str, layer: str
) -> None:
    plan = replace(planned(*case), prediction=None)
    assert verify(plan) == ()
    block, _, name = entry.partition(".")
    line = plan.strategies[block][name]
    assert old in line
    table = {**plan.strategies[block], name: line.replace(old, new)}
    edited = replace(plan, strategies={**plan.strategies, block: table})
    (rejection,) = verify(edited)
    assert rejection.rule_id == "nxd-form" and rejection.message.startswith(f"strategies.{entry}: {layer}")
    assert verify(replace(edited, engine="torch"))[0].rule_id != "nxd-form"
