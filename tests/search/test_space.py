"""The outer space: every way to divide ranks and batch; what is pinned stays."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.candidate import Candidate
from autoshard.search.request import Request
from autoshard.search.space import Space, divisors, recompute_choices, whole_space
from tests.search.brute_force import ask, kinds_of_recompute, layouts
from tests.search.test_rule_filter import PINS


def space_of(request: Request) -> Space:
    return whole_space(request.model, request.cluster, request.workload, request.engines[0], request.pins)


def everything(space: Space) -> list[Candidate]:
    return [space.candidate(row, kind) for row in range(space.num_layouts) for kind in range(len(space.recomputes))]


def every_candidate(request: Request) -> set[Candidate]:
    """Every layout with every kind of recompute."""
    kinds = [(kind,) for kind in kinds_of_recompute(request.cluster.kernels)]
    tried = [request.pins["recompute"]] if "recompute" in request.pins else kinds
    return {replace(layout, recompute=kind) for layout in layouts(request) for kind in tried}


@given(st.integers(1, 5000))
def test_divisors_are_what_divides(number: int):
    assert list(divisors(number)) == [size for size in range(1, number + 1) if number % size == 0]


@given(
    model=st.sampled_from(["tiny-llama", "tiny-mixtral", "gpt2-xl"]),
    ranks=st.integers(1, 24),
    batch=st.integers(1, 40),
    seq_len=st.sampled_from([1, 7, 256]),
)
def test_the_space_is_every_product_of_whole_numbers(model: str, ranks: int, batch: int, seq_len: int):
    request = ask(model, ranks=ranks, global_batch=batch, seq_len=seq_len)
    found = everything(space_of(request))
    assert len(found) == len(set(found))
    assert set(found) == every_candidate(request)


@pytest.mark.parametrize("pins", PINS)
def test_what_is_pinned_stays_and_the_rest_is_complete(pins: str):
    request = ask("tiny-llama", global_batch=8, pins=pins)
    found = everything(space_of(request))
    if "kernels" not in pins:  # other Kernels have other kinds of recompute
        assert set(found) == every_candidate(request)
    for candidate in found:
        for key, value in request.pins.items():
            shown = candidate.sequence_parallel if key == "sp" else getattr(candidate, key)
            assert shown == value or (key == "recompute" and candidate.recompute * candidate.num_stages == value)


@pytest.mark.parametrize("kernels", ["nxd", "te", "torch_cpu", "torch_cuda"])
def test_every_kind_of_recompute_is_tried_once(kernels: str):
    choices = recompute_choices(kernels)
    assert len(choices) == len(set(choices))
    assert choices == tuple((kind,) for kind in kinds_of_recompute(kernels))


def test_a_cluster_too_large_to_enumerate_is_refused():
    with pytest.raises(InputError, match="nodes: a search takes at most 131072 nodes"):
        ask("tiny-llama", "trn1.32xlarge", 10**15)


def test_a_prime_number_of_nodes_is_enumerated_too():
    request = ask("llama3-8b", "h100-80", 13)
    assert {row["tp"] for row in ({"tp": int(size)} for size in space_of(request).rows["tp"])} >= {1, 2, 4, 8, 13, 26}
