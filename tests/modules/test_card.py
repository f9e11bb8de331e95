"""A layer of Llama traced from its code, beside the layer of its card: the same layouts, and the same seconds."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from autoshard.blocks.cutting import Meshes, Terms, operator_problem
from autoshard.blocks.operators import solve
from autoshard.blocks.problem import OperatorProblem, roofline_s
from autoshard.cost.built_in import built_in
from autoshard.cost.compute import kernel_time
from autoshard.cost.setting import BlockSizes, BlockWork, Question, block_work
from autoshard.cost.sharded import LoweredBlock, step_block
from autoshard.errors import InputError
from autoshard.layout.layout import Cuts
from autoshard.modules.shard import ModuleSharding, shard_module
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.modules.modules import Rotated, with_attention

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CLUSTER, MESH = load_cluster("h100-80", 8), "dp=8,tp=8"
AXES = {"edp": "dp", "kv": "tp"}
NAMES = {
    **{f"layer_self_attn_{one}_proj": one for one in "qkvo"},
    **{f"layer_mlp_{one}_proj": one for one in ("gate", "up", "down")},
    "scaled_dot_product_attention": "attend",
}


def question() -> Question:
    work = Workload(seq_len=8192, global_batch=8, precision=Precision.named("bf16"))
    return Question(
        model=load_model("llama3-8b"), cluster=CLUSTER, workload=work, kernels=CLUSTER.kernels,
        calibration=built_in(CLUSTER.name),
    )  # fmt: skip


def of_the_card() -> OperatorProblem:
    candidate = Candidate.parse(MESH, num_ranks=64)
    terms = Terms.of(candidate, CLUSTER.engine)
    return replace(operator_problem(question(), Meshes.of(question(), candidate), terms, "layer"), allowed={})


@functools.cache
def of_the_code() -> ModuleSharding:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = with_attention(LlamaConfig, "sdpa", **sizes, num_hidden_layers=1)
    with torch.device("meta"):
        layer = Rotated(LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)).to(torch.bfloat16)
        given = torch.empty(8, 8192, 4096, requires_grad=True, dtype=torch.bfloat16), torch.arange(8192)[None]
    return shard_module(layer, given, CLUSTER, MESH, hints={"x": ("batch", "seq", "hidden")}, batch="dp")


def seconds(problem: OperatorProblem, name: str, cuts: Cuts) -> float:
    """Forward and backward of an operation on one rank."""
    parts = [part for part in problem.block.select("micro_batch") if part.source == name]
    return sum(float(roofline_s(problem, part, [cuts])[0]) for part in parts)


def named(found: ModuleSharding) -> Mapping[str, str]:
    """The card's names of the dims that were found in the code."""
    heads, groups, head_dim = found.dims["layer.self_attn.q_proj.weight"][0].split(".")
    values = found.dims["layer.self_attn.v_proj.weight"][0].split(".")[1]
    ffn = found.dims["layer.mlp.up_proj.weight"][0]
    own = {heads: "kv_heads", groups: "q_group", head_dim: "head_dim", values: "head_dim", ffn: "ffn"}
    return {**own, "batch": "batch", "seq": "seq", "hidden": "hidden"}


@pytest.mark.slow
def test_products_and_attention_are_cut_as_the_card_says_and_take_as_long():
    card, found = of_the_card(), of_the_code()
    between = {"batch": ("dp",), "seq": ("tp",)}  # as the card's hidden state lies between layers
    traced = replace(found.problem, boundary=between, state_bytes_per_weight=0.0, cuts_rest=False)
    ours, its, names = solve(traced), solve(card), named(found)
    for mine, own in NAMES.items():
        cuts = {names[dim]: cut for dim, cut in ours.cuts[mine].items() if cut}
        wanted = {dim: tuple(AXES[atom] for atom in cut) for dim, cut in its.cuts[own].items() if cut}
        assert cuts == wanted, mine
        assert seconds(traced, mine, ours.cuts[mine]) == pytest.approx(seconds(card, own, its.cuts[own]), rel=1e-9)
    # Norms and residuals are grouped otherwise, the card gathers again for backward what the traced layer keeps, and
    # only its cuts count what hosts take to start messages.
    assert ours.gap == its.gap == 0.0 and ours.cost_s == pytest.approx(its.cost_s, rel=0.12)


def reported(problem: OperatorProblem, lowered: LoweredBlock) -> tuple[BlockWork, Mapping[tuple[str, str], float]]:
    """What a block does, and the seconds of its kernels by pass and first operation."""
    sizes = BlockSizes(sizes=problem.sizes, atoms=problem.atoms, cp_order="contiguous")
    work = block_work(lowered, lowered, sizes, problem.rates.matrix_tile)
    return work, {
        (run.pass_, run.ops[0].source): float(kernel_time(kernel, problem.rates)) for run, kernel in work.kernels
    }


def test_what_is_reported_of_a_product_is_what_a_plan_says_of_the_card():
    card, found = of_the_card(), of_the_code()
    between = {"batch": ("dp",), "seq": ("tp",)}
    problem = replace(found.problem, boundary=between, state_bytes_per_weight=0.0, cuts_rest=False)
    program = problem.table_setting(has_inputs=True).lowered(problem.block, solve(problem).cuts)
    step_program = card.table_setting().lowered(card.block, solve(card).cuts)
    its_work, its = reported(card, step_block(question().step, "layer", Recompute(), step_program))
    our_work, ours = reported(problem, replace(found, problem=problem, program=program).lowered)
    for name in ("layer_self_attn_o_proj", "layer_mlp_down_proj"):  # other products have joint kernels in the card
        for pass_ in "FIW":
            assert ours[pass_, name] == pytest.approx(its[pass_, NAMES[name]], rel=1e-12), (name, pass_)
    assert list(our_work.memory.weights.values()) == list(its_work.memory.weights.values())


def test_bytes_are_those_by_which_the_solver_keeps_a_limit_and_follow_the_optimizer():
    found = of_the_code()
    assert found.sharding.memory_bytes == found.solution.kept_bytes
    module, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
    cluster = load_cluster("local", ranks=1)
    adamw, sgd = (shard_module(module, [x], cluster, "a=1", optimizer=name).sharding for name in ("adamw", "sgd"))
    assert adamw.memory_bytes - sgd.memory_bytes == 2 * 4 * (64 * 64 + 64)  # two moments in FP32
    with pytest.raises(InputError, match="optimizer: 'adam' is not known"):
        shard_module(module, [x], cluster, "a=1", optimizer=cast(Any, "adam"))
