"""Products by groups, and experts of transformers that are such products: as on one process, with parts of weights."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autoshard.modules.capture import capture
from autoshard.modules.rules.products import aligned_product
from autoshard.modules.shard import shard_module
from autoshard.modules.sharded import shard
from autoshard.spec.cluster_catalogue import load_cluster
from tests.modules.comparing import cut_on_ranks, devices_of, difference
from tests.modules.models import in_groups
from tests.modules.modules import numbers
from tests.ranks.spawn import each_rank

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
_ENDS = (3, 3, 8)  # of three groups, the second without a row


def by_hand(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Multiply group by group."""
    slices = [slice(start, end) for start, end in zip((0, *_ENDS), _ENDS, strict=False)]
    if second.dim() == 3:
        return torch.cat([first[rows] @ second[group] for group, rows in enumerate(slices)])
    if first.dim() == 3:
        return torch.cat([first[group] @ second[:, columns] for group, columns in enumerate(slices)], 1)
    return torch.stack([first[:, inner] @ second[inner] for inner in slices])


_FORMS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # shapes of both operands
    "rows": ((8, 16), (3, 16, 24)),
    "columns": ((3, 16, 24), (24, 8)),
    "inner numbers": ((16, 8), (8, 24)),
    "every matrix": ((3, 8, 16), (3, 16, 24)),
}


@pytest.mark.parametrize("form", ["rows", "columns", "inner numbers"])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_parts_of_any_length_are_multiplied_as_by_hand(form: str, width: int):
    names = [[size if size in (3, 8) else size // 8 * width for size in shape] for shape in _FORMS[form]]
    first, second = (torch.randn(*shape).mT.contiguous().mT.requires_grad_() for shape in names)
    copies = [tensor.detach().double().requires_grad_() for tensor in (first, second)]
    result, expected = aligned_product(first, second, torch.tensor(_ENDS, dtype=torch.int32)), by_hand(*copies)
    seed = torch.randn(*expected.shape[::-1]).permute(
        *range(expected.dim())[::-1]
    )  # which lies in another order in memory
    gradients = torch.autograd.grad(result, (first, second), seed)
    by_hand_gradients = torch.autograd.grad(expected, copies, seed.double())
    for tensor, exact in zip((result, *gradients), (expected, *by_hand_gradients), strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=1e-5)


def test_matrices_that_begin_anywhere_are_moved_to_where_kernels_read_them(monkeypatch: pytest.MonkeyPatch):
    first, second = torch.randn(8 * 16 + 1)[1:].view(8, 16), torch.randn(3, 16, 24)
    seen: list[torch.Tensor] = []
    kernel = torch.ops.aten._grouped_mm

    def called(*tensors: torch.Tensor) -> torch.Tensor:
        seen.extend(tensors)
        return kernel(*tensors)

    monkeypatch.setattr(torch.ops.aten, "_grouped_mm", called)
    result = aligned_product(first, second, torch.tensor(_ENDS, dtype=torch.int32))
    torch.testing.assert_close(result, by_hand(first, second))
    assert seen[0].storage_offset() == 0 and seen[1] is second, "what lies right is not copied"


class Grouped(nn.Module):
    """A product by groups in 16 bits, between numbers of 64 bits."""

    def __init__(self, first: tuple[int, ...], second: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*second))
        self.ends = None if len(first) == len(second) == 3 else torch.tensor(_ENDS, dtype=torch.int32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = F.grouped_mm(torch.tanh(x).bfloat16(), self.weight.bfloat16(), offs=self.ends)
        return torch.tanh(product.double())


@pytest.mark.parametrize("form", _FORMS)
def test_offsets_keep_the_axis_that_they_count_and_the_groups_whole(form: str):
    captured = capture(Grouped(*_FORMS[form]).double(), [numbers(*_FORMS[form][0])])
    product = next(step for step in captured.program.steps if step.products or step.sort == "product")
    whole, summed = ({dim.size for dim in dims} for dims in (product.whole_leaves(), product.summed))
    assert not captured.program.kept_whole
    assert whole == (set[int]() if form == "every matrix" else {3, 8})
    assert summed == {"rows": {16}, "columns": {24}}.get(form, set[int]())


@pytest.mark.slow
@pytest.mark.parametrize("form", _FORMS)
@each_rank(4)
def test_products_by_groups_in_random_layouts_train_as_on_one_process(form: str):
    torch.manual_seed(0)
    plain, x = Grouped(*_FORMS[form]).double(), numbers(*_FORMS[form][0])
    sharding = shard_module(plain, [x], load_cluster("local", ranks=4), "data=2,model=2", precision="fp32")
    devices = devices_of("data=2,model=2")
    for seed in range(4):
        module = cut_on_ranks(copy.deepcopy(plain), sharding, seed, devices)
        assert difference(plain, module, [x]) < 2e-2, seed  # of which 4e-3 is a rounding to 16 bits


def never(*_: Any) -> bool:
    return False


# torch's kernel takes no numbers of 64 bits; the function of transformers beside it does.
IN_DOUBLE = [("transformers.integrations.moe", "_can_use_grouped_mm", never)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [("Qwen3Moe", 0), ("GptOss", 1), ("Mixtral", 2)])
@each_rank(4, replaced=IN_DOUBLE)
def test_mixtures_in_random_layouts_train_as_on_one_process(kind: str, seed: int):
    torch.manual_seed(0)
    plain, inputs = in_groups(kind, 24)
    plain = plain.double().eval()
    sharding = shard_module(
        plain, inputs, load_cluster("local", ranks=4), "data=2,model=2", precision="fp32", results=["loss"]
    )
    assert not sharding.kept_whole
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*step by step")
        module = cut_on_ranks(copy.deepcopy(plain), sharding, seed, devices_of("data=2,model=2"))
        assert difference(plain, module, inputs) < 1e-6  # norms are computed in FP32


_LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "Qwen3Moe": {
        "*.gate_up_proj": "[_, down_proj_dim2/model, _]",
        "*.experts.down_proj": "[_, _, down_proj_dim2/model]",
    },
    "GptOss": {"*.gate_up_proj": "[_, _, down_proj_dim1/model]", "*.experts.down_proj": "[_, down_proj_dim1/model, _]"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "dtype", "bar"),
    [
        ("GptOss", 4, torch.float32, 1e-5),
        ("Qwen3Moe", 4, torch.float32, 1e-5),
        ("Qwen3Moe", 2, torch.bfloat16, 5e-2),  # parts of 12 numbers, which torch's kernel does not take
    ],
)
@each_rank("ranks")
def test_a_rank_holds_its_part_of_the_weights_of_all_experts(kind: str, ranks: int, dtype: torch.dtype, bar: float):
    """Experts are cut along their inner numbers."""
    torch.manual_seed(0)
    plain, inputs = in_groups(kind, 24)
    plain = plain.to(dtype).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*step by step")
        pins, mesh = _LAYOUTS[kind], f"model={ranks}"
        module = shard(copy.deepcopy(plain), inputs, mesh, pins=pins, results=["loss"])
        assert difference(plain, module, inputs) < bar
    weights = cast(dict[str, Any], dict(module.named_parameters()))
    shares = {path: weight.to_local().numel() / weight.numel() for path, weight in weights.items() if weight.dim() == 3}
    held = {path.rpartition(".")[2]: share for path, share in shares.items()}
    assert (held["down_proj"], held["gate_up_proj"]) == (1 / ranks, 1 / ranks)
