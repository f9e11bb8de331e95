"""Rules against two oracles that nobody here wrote: probing, and the sharding propagation of torch's DTensor."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.modules.capture import Captured, capture
from autoshard.modules.dims import Dim, factors
from autoshard.modules.probing import PartCut, candidates, found_cuts
from autoshard.modules.rules import RULES
from tests.modules.operations import samples
from tests.slower import each_third_is_fast

SAMPLES = samples()


class Call(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


@functools.cache
def captured_of(name: str) -> Captured:
    function, given = SAMPLES[name]
    return capture(Call(function), [one.clone().requires_grad_(one.is_floating_point()) for one in given])


def rule_cuts(name: str) -> tuple[set[PartCut], set[PartCut]]:
    """Return the cuts of a rule that are of whole axes, and those of them whose sums it sends inside."""
    program, names = captured_of(name).program, tuple(captured_of(name).exported.arguments)
    (result,) = program.results
    assert result.read
    values = {one.name: one.positions for one in program.values}
    tensors = [*(values.get(one, ()) for one in names), result.read.positions]
    reads = [read for step in program.steps for read in step.reads]
    apart = {dim for read in reads for pair in read.renamed.items() for dim in factors(pair)}
    apart |= {dim for step in program.steps for dim in step.whole_leaves()}
    found, inside = set[PartCut](), set[PartCut]()
    for dim in dict.fromkeys(dim for positions in tensors for position in positions for dim in factors(position)):
        axes = [_axis_of(dim, positions) for positions in tensors]
        if dim in apart or -1 in axes or axes[:-1] == [None] * len(names):
            continue
        if len({SAMPLES[name][1][place].shape[axis] for place, axis in enumerate(axes[:-1]) if axis is not None}) > 1:
            continue
        cut = PartCut(tuple(axes[:-1]), (axes[-1],))
        found.add(cut)
        losing = [one for one in program.steps if dim not in one.makes.dims]
        sums = [one for one in losing if any(dim in read.dims for read in one.reads)]
        if sums and (axes[-1] is not None or any(one.makes is not result.read.value for one in sums)):
            inside.add(cut)
    return found, inside


def _axis_of(dim: Dim, positions: Sequence[Any]) -> int | None:
    """Return the axis that a cut of a dim cuts in contiguous parts; -1 where it is an inner factor of one."""
    for axis, position in enumerate(positions):
        if dim in factors(position):
            return axis if factors(position)[0] is dim else -1
    return None


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Give two ranks of which only one exists, and which send nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def dtensor_cuts(name: str, mesh: DeviceMesh) -> set[PartCut] | None:
    """Return the cuts that DTensor takes as they are, and hands on as we do; None of operations that it lacks."""
    function, given = SAMPLES[name]
    found = set[PartCut]()
    for cut in candidates(given, [function(*given)]):
        if any(axis is not None and one.shape[axis] < 2 for one, axis in zip(given, cut.inputs, strict=True)):
            continue
        cut_tensors = [_distributed(one, axis, mesh) for one, axis in zip(given, cut.inputs, strict=True)]
        try:
            with torch.no_grad(), ExplicitRedistributionContext(strict=True):
                result = function(*cut_tensors)
        except NotImplementedError:
            return None
        except (RuntimeError, AssertionError, ValueError, IndexError):
            continue
        (placement,) = result.placements
        (axis,) = cut.results
        if placement.is_partial() if axis is None else placement == Shard(axis):
            found.add(cut)
    return found


def _distributed(tensor: torch.Tensor, axis: int | None, mesh: DeviceMesh) -> DTensor:
    local = tensor if axis is None else tensor.chunk(2, axis)[0]
    placement = Replicate() if axis is None else Shard(axis)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.stride())


def differences(name: str, oracle: str, cuts: set[PartCut]) -> None:
    """Compare the cuts of a rule with those of an oracle; a table says why they differ where they do."""
    found, inside = rule_cuts(name)
    more, less = found - cuts - inside, cuts - found
    assert bool(more) == (name in MORE[oracle]), f"the rule cuts more: {more}"
    assert bool(less) == (name in LESS[oracle]), f"the rule cuts less: {less}"


_FACTOR = "an axis is cut in parts of a factor's length, which the oracle does not try"
_COUNT = "the rule divides by the count of all numbers, the function by that of its own"
_ROWS = "a rank looks up the rows that it has, and others give zeros"
_GROUPS = "groups of channels are cut, and the function is told their number"
_LOCAL = "DTensor lacks it, though nothing is sent"
_FLAT = "DTensor merges axes first, and cannot cut the inner one"
_LONGER = "a part of the result is longer than that of the input, which the oracle does not try"
MORE: Mapping[str, Mapping[str, str]] = {
    "probing": {
        **dict.fromkeys(("view", "view apart", "view otherwise", "flatten", "unflatten", "slice in turns"), _FACTOR),
        **dict.fromkeys(("mean of all", "mean of the first"), _COUNT),
        **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"), _COUNT),
        **dict.fromkeys(("l1_loss", "smooth_l1_loss", "huber_loss"), _COUNT),
        "copy": "torch does not differentiate it",
        "embedding": _ROWS,
        "embedding of one row": "the oracle draws numbers of rows that are not there",
        "group_norm": _GROUPS,
        "repeat_interleave": _LONGER,
        "pow": "some of the oracle's numbers overflow",
        "grouped_mm": "ends of groups that the oracle draws lie in no order",
    },
    "dtensor": {
        **dict.fromkeys(("view", "view apart", "view otherwise", "flatten", "unflatten", "slice in turns"), _FACTOR),
        **dict.fromkeys(("linear", "linear with bias", "matmul", "matmul of many", "einsum"), _FLAT),
        **dict.fromkeys(("matmul of a vector", "scaled_dot_product_attention"), _FLAT),
        **dict.fromkeys(("attention with a mask", "causal attention"), _FLAT),
        **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), "DTensor cuts a batch alone"),
        **dict.fromkeys(("tril", "triu", "batch_norm", "broadcast_tensors", "new_ones"), _LOCAL),
        "batch_norm beside a change in place": _LOCAL,
        "cat with nothing": "DTensor gathers it",
        "embedding": _ROWS,
        "group_norm": _GROUPS,
        "repeat_interleave": _LONGER,
    },
}
_HEADS = "kernels of attention take keys and values of one length"
LESS: Mapping[str, Mapping[str, str]] = {
    "probing": {"attention with a mask": _HEADS},
    "dtensor": {
        **dict.fromkeys(("attention with a mask", "scaled_dot_product_attention", "attention in groups"), _HEADS),
        "any": "a pending disjunction, which layouts do not have",
        "norm": "a pending norm, which layouts do not have",
        "embedding by frequency": "DTensor counts rows in a part of the batch, and scales their gradients by that",
    },
}
# Torch ends the process where there are fewer heads of queries than of keys, and where weights do not fit a state or
# their norms.
ABORTS = ("attention in groups", "gru", "weight_norm")


@pytest.mark.parametrize("name", each_third_is_fast([*SAMPLES]))
def test_a_rule_cuts_what_probing_finds_and_what_dtensor_takes_without_sending(name: str, mesh: DeviceMesh):
    function, given = SAMPLES[name]
    if name not in ABORTS:
        probed = found_cuts(lambda given: (function(*given),), given, [function(*given)])
        differences(name, "probing", set(probed))
    cuts = dtensor_cuts(name, mesh)
    assert (cuts is None) == (name in UNKNOWN)
    if cuts is not None:
        differences(name, "dtensor", cuts)


UNKNOWN = ("copy", "fill", "gru")  # to DTensor


@pytest.mark.slow
def test_every_rule_has_a_sample_and_every_reason_is_one_of_a_sample():
    called = {getattr(node.target, "_opname", "") for name in SAMPLES for node in captured_of(name).exported.nodes}
    assert {*RULES.values()} == {RULES[name] for name in called & {*RULES}}
    assert {name for table in (MORE, LESS) for names in table.values() for name in names} <= {*SAMPLES}
    whole = {name for name in SAMPLES if captured_of(name).program.kept_whole}
    assert whole == {"as_strided"}, "it reads memory, of which parts say nothing"
