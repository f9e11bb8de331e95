"""Traced modules: on virtual ranks they give the module's own result and every gradient, however they are cut."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, strategies as st

from autoshard.blocks.choices import op_cuts
from autoshard.blocks.operators import solve
from autoshard.errors import InputError
from autoshard.layout.legal import cut_operations, op_dims
from autoshard.layout.lower import lower
from autoshard.layout.program import Communicate
from autoshard.layout.table import program_of, strategies, strategy_lines
from autoshard.modules.blocks import TracedBlock, traced_block
from autoshard.modules.capture import Captured, capture
from autoshard.modules.dims import Collision, NotAligned, factors, fresh, note, separate, size_of, unify
from autoshard.modules.proof import ModuleRun
from autoshard.modules.shard import shard_module
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.workload import Precision
from tests.modules.comparing import compared, largest_error, random_cuts, run_to_compare
from tests.modules.models import MODELS, model
from tests.modules.modules import MODULES, SINGLE, Own, Rotated, made, numbers, with_attention
from tests.slower import rest_is_slow

PAGE = Path(__file__).parents[2] / "docs" / "developers" / "modules.md"
_CUTS = 6  # random ones of each module
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@functools.cache
def traced(name: str) -> ModuleRun:
    return run_to_compare(*made(name))


QUICK = (
    "GPT-2 block", "BERT layer with padding", "MLP-Mixer", "language model, tied", "scan along the sequence",
    "convolutions with a skip", "selective scan", "mixture of experts by masks", "convnet, batch norm in training",
    "changes in place", "Qwen3 layer",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", rest_is_slow(sorted(MODULES, key=lambda name: name not in QUICK), len(QUICK), len(MODULES))
)
def test_any_legal_cut_gives_the_result_and_every_gradient(name: str):
    run = traced(name)
    block = run.traced
    assert row(name, run.captured, block) in PAGE.read_text(encoding="utf-8").splitlines(), "see the table below"
    chosen = random.Random(0)
    bar = 1e-6 if name in SINGLE else 1e-12
    for trial in range(_CUTS):
        cuts = random_cuts(block, chosen)
        boundary = {} if not block.block.takes or trial % 2 else {block.dims[block.block.takes[0]][0][0]: ("edp",)}
        found = compared(run, cuts, boundary)
        assert {one.name for one in found} >= {f"{tensor.name}.sum" for tensor in block.block.parameters}
        assert max(one.error for one in found) < bar, [one for one in found if one.error >= bar]


def row(name: str, captured: Captured, block: TracedBlock) -> str:
    """The line of a module in the docs."""
    count = len(cut_operations(block.block))
    dims = len({dim for tensor in block.block.tensors.values() for dim in tensor.dims})
    return f"| {name} | {count} | {dims} | {len(captured.program.kept_whole)} |"


@pytest.mark.slow
def test_the_table_of_modules_in_the_docs_is_what_the_tests_see(
    section_of_any_module: Callable[[str, Sequence[str]], None],
):
    rows = ["| module | operations | dims | kept whole |", "| --- | ---: | ---: | ---: |"]
    rows += [row(name, traced(name).captured, traced(name).traced) for name in MODULES]
    for name in MODELS:
        captured = capture(*model(name, 2))
        block = traced_block(captured.program, Precision.named("fp32"))
        rows.append(row(f"whole model, 2 layers: {name}", captured, block))
    section_of_any_module("modules", rows)


@pytest.mark.parametrize(
    "name", rest_is_slow(["MLP-Mixer", "BERT layer with padding", "Llama layer", "language model with loss"], 2, 2)
)
def test_the_cheapest_layouts_are_proven_as_well(name: str):
    module, inputs = made(name)
    found = shard_module(module, inputs, load_cluster("local", ranks=4), "dp=2,tp=2", batch="dp", precision="fp32")
    assert found.solution.gap == 0.0 and not found.kept_whole
    assert found.sharding.memory_bytes == found.solution.kept_bytes  # counted in two ways
    assert max(one.error for one in found.prove(module, inputs)) < 1e-6


def test_the_statistics_of_a_cut_batch_are_sums_of_a_few_numbers():
    block = traced("convnet, batch norm in training").traced
    batch = block.dims["x"][0][0]
    cuts = {
        op.name: {batch: ("edp",)} if batch in op_dims(block.block, op) else {} for op in cut_operations(block.block)
    }
    program = lower(block.block, cuts, {"edp": 4}, lambda change: 1.0, boundary={batch: ("edp",)}, keeps_gathered=True)
    sent = [one for one in program.instructions if isinstance(one, Communicate) and one.pass_ == "F"]
    assert {one.collective.kind for one in sent} == {"all_reduce"}
    sizes = [block.block.tensors[one.reads.tensor].num_elements(block.sizes) for one in sent]
    assert sorted(sizes) == [1, 1, 8, 8, 8, 8], "a mean and a variance for each norm, the loss and its count"


def test_a_fault_in_what_may_be_cut_is_found():
    run = traced("scan along the sequence")
    block = run.traced
    region = next(op for op in block.block.select("micro_batch", "F") if op.kind.whole_dims())
    seq = block.dims["x"][1][0]
    assert seq in region.kind.whole_dims()
    cuts: dict[str, Any] = {op.name: {} for op in cut_operations(block.block)}
    assert max(one.error for one in compared(run, cuts)) < 1e-12
    cuts[region.name] = {seq: ("kv",)}  # which the region says it needs whole
    assert max(one.error for one in compared(run, cuts)) > 1e-3


def test_heads_groups_and_head_dims_are_found_in_plain_products():
    module, inputs = made("Llama layer")
    hints = {"x": ("batch", "seq", "hidden")}
    found = shard_module(module, inputs, load_cluster("local", ranks=1), "tp=1", hints=hints)
    size = found.traced.sizes
    q, k, v, o = (found.dims[f"layer.self_attn.{one}_proj.weight"] for one in "qkvo")
    assert [size[dim] for dim in q[0].split(".")] == [2, 3, 8] and q[1] == "hidden"
    assert k[0].split(".") == [q[0].split(".")[0], q[0].split(".")[2]]  # keys have the heads of values, not the groups
    assert v[0].split(".")[0] == k[0].split(".")[0] and size[v[0].split(".")[1]] == 8
    assert o[0] == "hidden" and o[1].split(".")[:2] == q[0].split(".")[:2]
    assert found.dims["layer.mlp.gate_proj.weight"] == found.dims["layer.mlp.up_proj.weight"]


def test_megatron_comes_out_of_plain_code_where_weights_stay_and_better_where_they_may_rest_in_pieces():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = with_attention(LlamaConfig, "sdpa", **sizes, num_hidden_layers=1)
    with torch.device("meta"):
        large = Rotated(LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config))
        given = torch.empty(8, 8192, 4096, requires_grad=True), torch.arange(8192)[None]
    hints = {"x": ("batch", "seq", "hidden")}
    found = shard_module(large, given, load_cluster("h100-80", 8), "dp=8,tp=8", hints=hints, batch="dp")
    kept = replace(found.problem, cuts_rest=False, state_bytes_per_weight=0.0)
    megatron = solve(kept)
    program = kept.table_setting(has_inputs=True).lowered(kept.block, megatron.cuts)
    table = strategy_lines(strategies(program, kept.block), kept.atoms)
    heads = [found.dims[f"layer.self_attn.{one}_proj.weight"][0].split(".")[0] for one in "qkv"]
    assert all(f"{heads[0]}/tp" in table[f"layer_self_attn_{one}_proj"] for one in "qkv")
    assert "/tp, hidden]" in table["layer_mlp_up_proj"] and table["layer_mlp_down_proj"].endswith("+tp")
    assert len([line for line in table.values() if "F all_reduce /tp" in line]) == 2
    assert all("batch/dp" in line for line in table.values() if "[batch" in line)
    assert found.solution.gap == megatron.gap == 0.0 and found.solution.cost_s < megatron.cost_s


class Straight(torch.autograd.Function):
    """Rounds, and passes gradients on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def test_a_weight_without_numbers_changes_nothing():
    """A weight with no row, as of a model whose two sizes are equal."""
    module = Own(lambda own, x: x @ torch.cat([own.a.weight, own.more]).T, more=torch.nn.Parameter(torch.ones(0, 8)))
    module, x = module.double(), torch.randn(4, 8, dtype=torch.float64)
    found = shard_module(module, [x], load_cluster("local", ranks=4), "tp=4")
    assert {one.name for one in found.prove(module, [x])} >= {"result", "p_a_weight.sum"}
    assert max(one.error for one in found.prove(module, [x])) < 1e-12


def test_a_module_that_gives_no_numbers_proves_nothing():
    module, x = torch.nn.Linear(4, 4).double(), torch.full((4, 4), torch.inf, dtype=torch.float64)
    found = shard_module(module, [x], load_cluster("local", ranks=4), "tp=4")
    with pytest.raises(InputError, match="inputs: make the module give NaN or infinity"):
        found.prove(module, [x])


def test_a_backward_pass_of_the_users_own_is_read_and_not_sharded():
    module, x = Own(lambda own, x: Straight.apply(own.a(x))), torch.randn(2, 8)
    assert [step.name for step in capture(module, [x]).program.steps][-1] == "round_1"
    with pytest.raises(InputError, match=r"Straight.apply\(own.a.*: Straight has a backward pass of its own"):
        shard_module(module, [x], load_cluster("local", ranks=4), "tp=4")


class Traps(torch.nn.Module):
    """What is easily misread: axes that are no first argument, detached and rounded numbers, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(8, 6, padding_idx=0), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.table(tokens)
        y = y * torch.linalg.vector_norm(y, 2, dim=1, keepdim=True).detach() + torch.roll(y, 1, dims=2)
        positive = y > 0
        return (
            torch.where(positive, y, -y) * positive.to(torch.int64) + F.glu(torch.cat([y, y], -1)) + y.to(torch.int64)
        )


def test_axes_by_name_detached_rounded_and_padded_numbers_are_read_as_torch_means_them():
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 6, dtype=torch.float64), torch.tensor([[0, 1, 2, 0], [3, 0, 7, 1]])
    module = Traps().double()
    assert largest_error(run_to_compare(module, inputs), 12) < 1e-12
    assert all(one.grad is None for one in (*module.parameters(), inputs[0]))  # a proof leaves nothing behind


class Rounded(torch.nn.Module):
    """Numbers of FP32 that two norms and a product read, as in a module of another format."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + (self.linear(y.to(x.dtype)) + torch.sin(y) * normed.to(x.dtype)) * self.scale


def test_numbers_are_rounded_where_the_module_rounds_them():
    torch.manual_seed(0)
    module, inputs = Rounded().double(), (torch.randn(4, 6, 8, dtype=torch.float64),)
    run, chosen = run_to_compare(module, inputs), random.Random(0)
    block = run.traced
    for trial in range(4):
        cuts = random_cuts(block, chosen) if trial else {op.name: {} for op in cut_operations(block.block)}
        found = compared(run, cuts)
        assert max(one.error for one in found if one.name == "result") < 1e-12  # never rounded, it differs by 1e-8
        assert max(one.error for one in found) < 1e-6
    assert "to" not in {op.name for op in cut_operations(block.block)}  # each reader rounds itself


class Crossed(torch.nn.Module):
    """A weight and its bias that are read as products of other dims: 6 as 2 x 3, and as 3 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left, self.right = (
            torch.nn.Linear(4, 6),
            torch.nn.Parameter(torch.randn(2, 3)),
            torch.nn.Parameter(torch.randn(3, 2)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.linear.weight.view(2, 3, 4).sum(-1) * self.left
        second = self.linear.bias.view(3, 2) * self.right
        return self.linear(x).sum() * (first.sum() + second.sum())


def test_dims_that_cannot_be_told_apart_keep_an_operation_whole_and_leave_nothing_of_its_rule():
    torch.manual_seed(0)
    module, inputs = Crossed().double(), (torch.randn(2, 4, dtype=torch.float64),)
    run = run_to_compare(module, inputs)
    (line,) = run.captured.program.kept_whole
    assert "linear" in line
    assert not any(step.sort == "product" for step in run.captured.program.steps)
    assert largest_error(run, 6, seed=1) < 1e-12


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 2)


class Unknown(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return doubled(super().forward(input))


def test_what_nobody_knows_is_kept_whole_and_said_with_its_line():
    torch.manual_seed(0)
    run = run_to_compare(Unknown(6, 6).double(), [numbers(2, 6, 6)])
    (line,) = run.captured.program.kept_whole
    assert "tests.doubled" in line and "doubled(super().forward(input))" in line
    assert largest_error(run, 3, seed=1) < 1e-12


def weights_first(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Two layers whose products have their weights on the left."""
    return (own.b.weight @ torch.tanh(own.a.weight @ x.transpose(1, 2)).sin()).tanh()


def test_gradients_of_inputs_wait_for_none_of_weights_where_weights_stand_first():
    inputs = [torch.randn(4, 4, 8).requires_grad_()]
    found = shard_module(Own(weights_first), inputs, load_cluster("local", ranks=4), "a=2,b=2", precision="fp32")
    block, chosen = found.traced.block, random.Random(0)
    for _ in range(20):
        cuts = {op.name: dict(chosen.choice(op_cuts(block, op, ["a", "b"]))) for op in cut_operations(block)}
        program = found.problem.table_setting(has_inputs=True).lowered(block, cuts)
        passes = program.by_pass(*block.gives)
        assert passes.inputs and passes.weights
        lines = replace(found, program=program, solution=replace(found.solution, cuts=cuts, rests={})).sharding.table
        again = program_of(block, lines, found.problem.table_setting(has_inputs=True))
        assert again.instructions == program.instructions


SIZES = st.lists(st.sampled_from([2, 3, 4, 5]), min_size=1, max_size=5)


@given(SIZES, st.data())
def test_products_that_are_made_equal_have_the_same_dims(sizes: list[int], data: st.DataObject):
    """Group the same factors in two ways: afterwards both are products of the same dims, in the same order."""

    def grouped() -> list[Any]:
        found, left = [], list(sizes)
        while left:
            count = data.draw(st.integers(1, len(left)))
            total = 1
            for size in left[:count]:
                total *= size
            found.append(fresh(total))
            left = left[count:]
        return found

    one, other = grouped(), grouped()
    first, second = (tuple(dim for position in positions for dim in position) for positions in (one, other))
    before = [size_of(position) for position in (*one, *other)]
    unify(first, second)
    assert factors(first) == factors(second)
    assert [size_of(position) for position in (*one, *other)] == before


def test_dims_that_a_tensor_has_both_or_that_were_set_apart_never_become_one():
    one, other, third = fresh(4), fresh(4), fresh(4)
    note(0, [one, other])
    with pytest.raises(Collision):
        unify(one, other)
    separate(one[0], third[0])
    with pytest.raises(Collision):
        unify(third, one)
    with pytest.raises(NotAligned):
        unify((*fresh(2), *fresh(3)), (*fresh(3), *fresh(2)))


def of_shared_table(own: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """An encoder and a decoder that read one table."""
    return (own.mix(own.table(source)).sum(1, keepdim=True) * own.table(target)).square().mean()


def test_the_gradient_of_a_weight_with_two_readers_is_summed_over_its_copies_once_a_step() -> None:
    module = Own(of_shared_table, table=torch.nn.Embedding(32, 16), mix=torch.nn.Linear(16, 16, bias=False)).double()
    ids = torch.arange(16 * 4).reshape(16, 4) % 32
    pins = {"table.weight": "[_, _]", "mix": "[/dp, _, _]", "table": "[/dp, _, _]"}
    found = shard_module(module, [ids, ids.flip(0)], "h100-80", "dp=8", pins=pins)
    (name,) = (name for name, path in found.captured.parameters.items() if path == "table.weight")
    assert found.program.results[f"{name}.sum"].layout.sums == ("dp",), "and so ZeRO may share its states"
    assert not [entry for entry in found.program.collectives() if "table" in entry.reads.tensor]
    assert max(one.error for one in found.prove(module, [ids, ids.flip(0)])) < 1e-12
