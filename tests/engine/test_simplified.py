"""Graphs that are simplified give the same bits with fewer operations, also where numbers are equal or no numbers."""

from collections import Counter
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from autoshard.engine.torch import compiled
from autoshard.engine.torch.compiled import traced
from autoshard.engine.torch.kernels.indexing import is_chosen
from autoshard.engine.torch.simplified import simplify

Tensors = Sequence[torch.Tensor]


def both(function: Callable[..., Tensors], *tensors: torch.Tensor) -> tuple[Counter[str], Counter[str]]:
    """Compare the results of a graph with those of the simplified one; count the operations of both."""
    before, after = (graph_of(function, tensors, simplified) for simplified in (False, True))
    for result, simplified in zip(before(*tensors), after(*tensors), strict=True):
        assert (result.shape, result.dtype) == (simplified.shape, simplified.dtype) and simplified.is_contiguous()
        assert torch.equal(result.isnan(), simplified.isnan())
        assert torch.equal(bits(result), bits(simplified))
    return operations(before), operations(after)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of numbers; a nan may have any."""
    plain = tensor.nan_to_num(7.0, torch.inf, -torch.inf) if tensor.is_floating_point() else tensor
    return plain.view(-1).view(torch.uint8)


def graph_of(function: Callable[..., Tensors], tensors: Tensors, simplified: bool) -> GraphModule:
    fake = FakeTensorMode()
    there = [fake.from_tensor(tensor) for tensor in tensors]
    with mock.patch.object(compiled, "simplify", simplify if simplified else lambda _: None):
        return traced(lambda inputs: list(function(*inputs)), there, fake)


def operations(graph: GraphModule) -> Counter[str]:
    return Counter(node.name.rstrip("_0123456789") for node in graph.graph.nodes if node.op == "call_function")


def ranked(count: int) -> Callable[[torch.Tensor], Tensors]:
    def run(numbers: torch.Tensor) -> Tensors:
        values, order = torch.sort(numbers, dim=-1, descending=True, stable=True)
        return values[..., :count].contiguous(), order[..., :count].contiguous()

    return run


@given(data=st.data())
def test_the_first_few_of_a_row_are_those_of_a_sort(data: st.DataObject) -> None:
    """Also where numbers are equal, infinite, of two zeros, or nan, and where all of a row are."""
    size = data.draw(st.integers(2, 12))
    count = data.draw(st.integers(1, min(size - 1, 8)))
    odd = st.sampled_from([0.0, -0.0, 1.0, 2.0, float("inf"), float("-inf"), float("nan")])
    rows = data.draw(st.lists(st.lists(odd, min_size=size, max_size=size), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    before, after = both(ranked(count), torch.tensor(rows, dtype=dtype))
    assert before["sort"] and not after["sort"]


@pytest.mark.parametrize(("size", "count"), [(12, 9), (1025, 2)])
def test_many_are_sorted(size: int, count: int) -> None:
    _, after = both(ranked(count), torch.randn(3, size))
    assert after["sort"]


@given(data=st.data())
def test_few_numbers_are_written_as_by_a_scatter(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, min(size, 8)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    expert = torch.rand(2, 5, size, generator=generator).argsort(-1)[..., :count].contiguous()
    upstream = torch.randn(2, 5, count, generator=generator)
    upstream[0, 0, 0] = -0.0

    def run(upstream: torch.Tensor, expert: torch.Tensor) -> Tensors:
        return (upstream.new_zeros((2, 5, size)).scatter_(-1, expert, upstream),)

    before, after = both(run, upstream, expert)
    assert before["scatter"] and not after["scatter"]


@pytest.mark.parametrize(("dim", "size"), [(-1, 32_000), (1, 3), (0, 1)])
def test_the_gradient_at_a_label_is_written_where_it_is_read(dim: int, size: int) -> None:
    shape = [2, 3, 5]
    shape[dim] = size
    label = torch.randint(size, [1 if length == size and at == dim % 3 else length for at, length in enumerate(shape)])

    def run(label: torch.Tensor, factor: torch.Tensor) -> Tensors:
        return (torch.zeros(shape).scatter(dim, label, -1.5) * factor,)

    before, after = both(run, label, torch.randn(()))
    assert before["scatter"] and not after["scatter"]


def test_numbers_at_several_places_of_a_row_stay_a_scatter() -> None:
    def run(base: torch.Tensor, label: torch.Tensor) -> Tensors:
        zeros = torch.zeros(4, 12)
        return (
            zeros.scatter(-1, label, 2.0), zeros.scatter(-1, label[:2, :1], 2.0), base.scatter(-1, label[:, :1], 2.0),
            zeros.scatter(-1, label[:, :1], 2.0, reduce="add"),
        )  # fmt: skip

    before, after = both(run, torch.randn(4, 12), torch.randint(12, (4, 2)))
    assert before["scatter"] == after["scatter"] == 4


def test_other_scatters_stay() -> None:
    """Those along another dim, of more numbers, of fewer rows, and into what is no constant."""
    base, along = torch.randn(4, 12), torch.arange(4).view(1, 4)
    wide, few = torch.arange(9).expand(4, 9), torch.zeros(2, 1, dtype=torch.int64)

    def run(base: torch.Tensor, along: torch.Tensor, wide: torch.Tensor, few: torch.Tensor) -> Tensors:
        zeros = torch.zeros(4, 12)
        return (
            zeros.scatter(0, along, base[:1, :4]), zeros.scatter(-1, wide, base[:, :9]),
            zeros.scatter(-1, few, base[:2, :1]), base.scatter(-1, few, base[:2, :1]),
        )  # fmt: skip

    before, after = both(run, base, along, wide, few)
    assert before["scatter"] == after["scatter"] == 4


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_counts_are_the_ends_of_scans_and_what_is_equal_is_computed_once(num_tokens: int) -> None:
    def run(expert: torch.Tensor) -> Tensors:
        return is_chosen(expert, 5).sum(0), is_chosen(expert, 5).cumsum(0), is_chosen(expert, 5).sum(0).float()

    before, after = both(run, torch.randint(0, 5, (1, num_tokens, 2)))
    assert (before["eq"], before["sum"], after["eq"], after["sum"]) == (3, 2, 1, 0)


def test_what_differs_by_its_options_draws_or_is_returned_twice_is_computed_twice() -> None:
    def run(x: torch.Tensor) -> Tensors:
        return (
            x + 1,
            x + 1.0,
            x + 1,
            x.cumsum(0),
            x.cumsum(1),
            torch.rand_like(x.float()) * 0,
            torch.rand_like(x.float()) * 0,
        )

    before, after = both(run, torch.arange(6).view(2, 3))
    assert (before["add"], before["cumsum"]) == (after["add"], after["cumsum"]) == (3, 2)
