"""Products in FP8: which operations have them, how far from the exact products they lie, and the same in all modes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from autoshard.engine.torch import compiled
from autoshard.engine.torch.fake import count_rank
from autoshard.engine.torch.formats import NOWHERE
from autoshard.engine.torch.kernels import grouped, matrices as dense
from autoshard.engine.torch.kernels.grouped import GroupedMultiplier, multiplies_groups_fp8
from autoshard.engine.torch.kernels.matrices import ALIGNED, GRADIENTS, VALUES, Multiplier, Smaller, multiplies_fp8
from autoshard.errors import InputError
from autoshard.plan.verify import unrun_precision
from autoshard.run.protocol import EngineMode
from autoshard.spec.workload import Precision
from tests.ranks.cases import AS_PLANNED, StepShare, Task, hold, llama, plan_of, run_steps, same, whole
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
FP8 = "bf16,products=fp8"
WIDE = {"hidden": 64, "ffn": 96, "head_dim": 16, "vocab": 32}  # 16 divides what a rank multiplies
WEIGHTS = 7  # of a layer: q, k, v, out, gate, up, down
EXPERTS: dict[str, Any] = {"num_experts": 16, "experts_per_token": 4}
SHARED: dict[str, Any] = {"shared_ffn": 48}
OF_EXPERTS = 3  # of a layer: gate, up, down
HALF_A_DIGIT = {VALUES: 2.0**-4, GRADIENTS: 2.0**-3}  # relative, of 4 and 3 significant bits
SMALLEST = {VALUES: 2.0**-9 / 448, GRADIENTS: 2.0**-16 / 57344}  # steps below normal numbers, of the largest number


def fp8_task(text: str, num_steps: int = 1, precision: str = FP8, capacity: float | None = None, **sizes: Any) -> Task:
    work = {"precision": Precision.named(precision), "expert_capacity": capacity}
    return Task.of(plan_of(text, llama(**(WIDE | sizes)), **work), num_steps)


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 3), depth=st.integers(1, 4), size=st.integers(-20, 20),
    smaller=st.sampled_from([(VALUES, VALUES), (GRADIENTS, VALUES)]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_product_lies_as_near_to_the_exact_one_as_its_rounded_factors_allow(
    rows, columns, depth, size, smaller, seed
):
    random = torch.Generator().manual_seed(seed)
    shapes = (rows, depth * ALIGNED), (depth * ALIGNED, columns * ALIGNED)
    first, second = ((torch.randn(*shape, generator=random) * 2.0**size).bfloat16() for shape in shapes)
    product = Multiplier(CPU, smaller).product(first, second).double()
    total = torch.full_like(product, 3.0, dtype=torch.float32)
    Multiplier(CPU, smaller).add(total, first, second)
    exact, bound = first.double() @ second.double(), torch.zeros_like(product)
    offs = [
        HALF_A_DIGIT[form] * factor.double().abs() + SMALLEST[form] * factor.double().abs().max()
        for form, factor in zip(smaller, (first, second), strict=True)
    ]
    bound = offs[0] @ second.double().abs() + first.double().abs() @ offs[1] + offs[0] @ offs[1]
    assert ((product - exact).abs() <= bound + 2.0**-8 * product.abs()).all()
    assert ((total.double() - 3.0 - exact).abs() <= bound + 2.0**-20 * (3.0 + exact.abs() + bound)).all()
    assert not torch.equal(product, (first.double() @ second.double()).bfloat16().double()), "nothing was rounded"


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), depth=st.integers(2, 4),
    columns=st.integers(1, 3), size=st.integers(-20, 20), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_experts_are_those_of_rounded_factors_however_rows_lie_and_are_cut(
    counts, depth, columns, size, seed
):
    """Scales are powers of two, so that parts of rows are rounded as whole ones are, but for their smallest numbers."""
    random, width = torch.Generator().manual_seed(seed), depth * ALIGNED
    rows = (torch.randn(sum(counts), width, generator=random) * 2.0**size).bfloat16()
    matrices = torch.randn(len(counts), columns * ALIGNED, width, generator=random).bfloat16().transpose(1, 2)
    multiplier, ends = GroupedMultiplier(CPU, in_fp8=True), torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    product = multiplier.product(rows, matrices, ends).double()
    exact, bound = torch.zeros_like(product), torch.zeros_like(product)
    for expert, (matrix, end, count) in enumerate(zip(matrices.double(), ends.tolist(), counts, strict=True)):
        here = slice(end - count, end)
        of_rows, of_matrix = (
            HALF_A_DIGIT[VALUES] * factor.abs() + 2 * SMALLEST[VALUES] * factor.abs().amax(dim, keepdim=True)
            for factor, dim in ((rows[here].double(), 1), (matrix, 0))
        )
        exact[here] = rows[here].double() @ matrix
        bound[here] = of_rows @ matrix.abs() + rows[here].double().abs() @ of_matrix + of_rows @ of_matrix
        alone = multiplier.product(rows[here], matrices[expert : expert + 1], torch.tensor([count]).int())
        padded = multiplier.product(rows[here].expand(2, count, width), matrices[expert].expand(2, -1, -1))
        for same_rows in (alone, *padded):
            torch.testing.assert_close(same_rows.double(), product[here], rtol=2**-7, atol=0.0)
    assert ((product - exact).abs() <= bound + 2.0**-8 * product.abs()).all()
    assert not torch.equal(product, exact.bfloat16().double()), "nothing was rounded"
    parts = [
        multiplier.product(rows[:, part], matrices[:, part], ends).double()
        for part in (slice(0, ALIGNED), slice(ALIGNED, width))
    ]
    smallest = 4 * width * SMALLEST[VALUES] * float(rows.abs().max()) * float(matrices.abs().max())
    torch.testing.assert_close(
        parts[0] + parts[1], product, rtol=0, atol=smallest + 2.0**-7 * float(torch.stack(parts).abs().sum(0).max())
    )


def test_factors_that_kernels_do_not_take_are_multiplied_in_their_own_format():
    first, second = torch.randn(3, 24).bfloat16(), torch.randn(24, 16).bfloat16()
    for_batches = first.expand(2, 3, 24), second.expand(2, 24, 16)
    for factors in ((first, second), for_batches):
        assert torch.equal(Multiplier(CPU, (VALUES, VALUES)).product(*factors), Multiplier(CPU).product(*factors))
    rows, matrices = for_batches
    assert torch.equal(GroupedMultiplier(CPU, in_fp8=True).product(rows, matrices), rows @ matrices)


def test_zeros_stay_zero_and_what_is_not_finite_stays_so():
    multiplier, ones = Multiplier(CPU, (VALUES, VALUES)), torch.ones(16, 16).bfloat16()
    assert torch.equal(multiplier.product(0 * ones, ones), 0 * ones)
    for number in (float("inf"), float("nan")):
        assert not multiplier.product(ones.clone().fill_(number), ones).isfinite().any()
        one_row = ones.clone()
        one_row[3, 5] = number
        product = GroupedMultiplier(CPU, in_fp8=True).product(one_row.unsqueeze(0), ones.unsqueeze(0))[0]
        assert product.isfinite().all(1).tolist() == [row != 3 for row in range(16)]


def test_a_device_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch):
    multiplies_fp8.cache_clear()
    monkeypatch.setattr(
        dense, "_scaled_product", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no such kernel"))
    )
    with pytest.raises(InputError, match=r"precision: cpu has no products of matrices in fp8. Use --precision bf16"):
        Multiplier(CPU, (VALUES, VALUES))
    multiplies_fp8.cache_clear()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("tp=2,pp=1,dp=1", {}),
    ("tp=1,pp=2,dp=2,schedule=zb_h1", {}),
    ("tp=1,pp=1,dp=2,zero=3", {}),
    ("tp=1,pp=1,cp=2,dp=1,recompute=full", {}),
    ("tp=1,pp=1,dp=2,ep=2", EXPERTS),
    ("tp=1,pp=1,dp=2,ep=2", {"num_experts": 2, "experts_per_token": 1}),
    ("tp=1,pp=1,dp=2,ep=2", EXPERTS | {"capacity": 1.0}),
    ("tp=2,pp=1,dp=2,ep=2,fold=none", EXPERTS),
    ("tp=1,pp=2,dp=1,schedule=zb_h1", EXPERTS | SHARED),
    ("tp=1,pp=1,cp=2,dp=1,recompute=full", EXPERTS),
]


@pytest.mark.parametrize(("text", "sizes"), rest_is_slow(CASES, 0, 4))
def test_all_else_is_as_planned_and_gradients_are_near_those_of_one_process(text, sizes):
    expected, shares = hold(fp8_task(text, **sizes))
    pairs = [(whole(name, exact, shares, "gradients"), exact) for name, exact in expected.gradients.items()]
    found, exact = (np.concatenate([array.reshape(-1) for array in arrays]) for arrays in zip(*pairs, strict=True))
    off = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    # BF16 alone is 0.01 off, and 0.05 where a few tokens choose other experts.
    assert 0.02 < off < (0.25 if "num_experts" in sizes else 0.15), off
    assert shares[0].loss == pytest.approx(expected.loss, rel=0.01)


def run_counting(task: Task) -> tuple[StepShare, list[Smaller], list[tuple[int, ...]]]:
    """A step, the formats of the factors of each product in FP8, and the shapes of experts' rounded factors."""
    assert multiplies_fp8(CPU)  # the rank itself tries it once, before products are counted
    calls, scaled = list[Smaller](), dense._scaled_product
    factors, rounded = list[tuple[int, ...]](), grouped._rounded
    assert not multiplies_groups_fp8(CPU)

    def counted(
        first: torch.Tensor, second: torch.Tensor, smaller: Smaller, dtype: torch.dtype, *, on_host: bool
    ) -> torch.Tensor:
        calls.append(smaller)
        return scaled(first, second, smaller, dtype, on_host=on_host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_scaled_product", counted)
        patch.setattr(grouped, "_rounded", lambda matrix: (factors.append(tuple(matrix.shape)), rounded(matrix))[1])
        (share,) = run_steps(task, AS_PLANNED)
    return share, calls, factors


def test_the_products_with_weights_of_layers_are_in_fp8_in_all_passes_and_no_others():
    task = fp8_task("tp=1,pp=1,dp=1,mbs=2")
    ((_, calls, factors),) = on_ranks(1, run_counting, task)
    number = 2 * task.plan.model.num_layers * WEIGHTS  # two micro-batches
    assert not factors
    assert calls.count((VALUES, VALUES)) == number
    assert calls.count((GRADIENTS, VALUES)) == 2 * number
    assert len(calls) == 3 * number


@pytest.mark.parametrize("capacity", [None, pytest.param(1.0, marks=pytest.mark.slow)])
def test_of_experts_the_products_that_make_rows_are_in_fp8_and_those_of_routers_and_gradients_are_not(capacity):
    task = fp8_task("tp=1,pp=1,dp=1,mbs=2", capacity=capacity, **EXPERTS, **SHARED)
    ((_, calls, factors),) = on_ranks(1, run_counting, task)
    number = 2 * task.plan.model.num_layers
    assert len(calls) == 3 * number * WEIGHTS  # of attention, and of what lies beside the experts; 16 logits would fit
    of_rows = [shape for shape in factors if (len(shape) == 2 if capacity is None else shape[1] not in (64, 96))]
    assert len(of_rows) == 2 * number * OF_EXPERTS and len(factors) == 2 * len(of_rows)


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("sizes", [EXPERTS, {"num_experts": 2, "experts_per_token": 1}])
def test_kernels_of_gpus_take_what_is_handed_to_them(capacity, sizes, monkeypatch: pytest.MonkeyPatch):
    """torch checks formats, strides, and shapes of scales without numbers as it does on GPUs."""
    calls, product = list[torch.Tensor](), grouped._scaled_product

    def counted(*factors: Any) -> torch.Tensor:
        calls.append(factors[0])
        return product(*factors)

    monkeypatch.setattr(grouped, "_scaled_product", counted)
    plan = fp8_task("tp=1,pp=1,dp=2,ep=2", capacity=capacity, **sizes).plan
    assert not unrun_precision(plan)
    count_rank(plan, 1)
    micro_batches = plan.schedule.num_micro_batches
    assert len(calls) == 2 * OF_EXPERTS * plan.model.num_layers * micro_batches
    assert {(factor.dim(), factor.device) for factor in calls} == {(2 if capacity is None else 3, NOWHERE)}


def run_in_modes(task: Task) -> tuple[list[StepShare], set[str]]:
    """A step of the interpreter, of generated functions, and of those whose products are joined: how wide these are."""
    columns, product = set[str](), dense._scaled_product

    def noted(first: torch.Tensor, second: torch.Tensor, *formats: Any, on_host: bool) -> torch.Tensor:
        columns.add(str(second.shape[1]))
        return product(first, second, *formats, on_host=on_host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compiler_of", lambda _: lambda piece, _: piece)
        modes: tuple[EngineMode, ...] = ("literal", "generated", "compiled")
        apart = [share for mode in modes[:2] for share in run_steps(task, AS_PLANNED, mode)]
        patch.setattr(dense, "_scaled_product", noted)
        return [*apart, *run_steps(task, AS_PLANNED, modes[2])], columns


@pytest.mark.parametrize("sizes", [{}, EXPERTS | SHARED])
def test_generated_functions_round_as_the_interpreter_does_and_joined_products_nearly(sizes):
    (((literal, generated, joined), columns),) = on_ranks(1, run_in_modes, fp8_task("tp=1,pp=1,dp=1", **sizes))
    same(literal, generated)
    width = WIDE["ffn"] if not sizes else SHARED["shared_ffn"]  # a router, beside these, stays alone
    assert str(2 * width) in columns
    apart, together = (
        np.concatenate([share.gradients[name].array.reshape(-1) for name in literal.gradients])
        for share in (literal, joined)
    )
    assert 0 < np.linalg.norm(apart - together) < 0.15 * np.linalg.norm(apart)  # a scale for several weights


@pytest.mark.thorough
def test_a_model_learns_as_fast_as_in_bf16():
    losses = [
        np.array([share.loss for share in on_ranks(1, run_steps, fp8_task("tp=1,pp=1,dp=1", 30, name), AS_PLANNED)[0]])
        for name in (FP8, "bf16")
    ]
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=0.02) and (losses[0] != losses[1]).any()
