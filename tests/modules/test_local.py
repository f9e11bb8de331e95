"""Functions that the user marks: one operation each, whatever they do inside; what their text promises is checked."""

import copy
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import InputError
from autoshard.modules.blocks import traced_block
from autoshard.modules.capture import capture
from autoshard.modules.fingerprint import block_hash
from autoshard.modules.local import LocalDims
from autoshard.modules.shard import shard_module
from autoshard.modules.sharded import shard
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.workload import Precision
from tests.modules.comparing import (
    compared,
    cut_on_ranks,
    devices_of,
    difference,
    largest_error,
    random_cuts,
    run_to_compare,
)
from tests.modules.modules import numbers
from tests.ranks.spawn import each_rank

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def loop(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Halve each sequence until it is small, with a loop over numbers and a change in place."""
    y = x.clone()
    for row, length in enumerate(lengths.tolist()):
        for token in range(x.shape[1]):
            while y[row, token].norm() > 1:
                y[row, token] *= 0.5
            y[row, token, :length] += 0.25
    return y


settled = autoshard.local("batch seq _, batch -> batch seq _")(loop)


@autoshard.local("batch seq _, _heads _ -> batch _heads, batch seq 2")
def parted(x: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give two results: one is summed over the sequence."""
    found = torch.einsum("bsh,kh->bk", x.tanh(), keys)
    return found, torch.stack([x.amax(-1), x.amin(-1)], -1)


@autoshard.local
def sorted_whole(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[torch.argsort(x.flatten())].view_as(x).T.contiguous().T


class Marked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.settled = settled
        self.keys = torch.nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y = x + self.settled(self.linear(x), lengths)
        heads, ends = parted(y, self.keys)
        return self.out(y) * ends.sum(-1, keepdim=True) + sorted_whole(heads).sum(-1)[:, None, None]


def made() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    x = numbers(4, 6, 8).mul(3).requires_grad_()
    return Marked().double(), (x, torch.tensor([1, 2, 0, 2]))


@pytest.mark.slow
def test_any_legal_cut_gives_the_result_and_every_gradient():
    module, inputs = made()
    run, chosen = run_to_compare(module, inputs), random.Random(0)
    block = run.traced
    (line,) = run.captured.program.kept_whole
    assert "sorted_whole(heads)" in line and "test_local.py" in line
    batch, seq, _ = (one[0] for one in block.dims["x"])
    regions = {op.name: op.kind.whole_dims() for op in block.block.ops if "loop" in op.name}
    assert regions and not any({batch, seq} & {*whole} for whole in regions.values())
    seen: set[str] = set()
    for _ in range(12):
        cuts = random_cuts(block, chosen)
        seen |= {dim for name in regions for dim, axes in cuts.get(name, {}).items() if axes}
        found = compared(run, cuts)
        assert len(found) == 7, "a result, five parameters, an input"
        assert max(one.error for one in found) < 1e-12
    assert seen >= {batch, seq}


def test_a_function_that_is_not_traced_runs_as_before():
    x = numbers(4, 6, 8).mul(3).requires_grad_()
    lengths = torch.tensor([1, 2, 0, 2])
    (plain,) = torch.autograd.grad(loop(x, lengths).square().sum(), x)
    (own,) = torch.autograd.grad(settled(x, lengths).square().sum(), x)
    assert torch.equal(plain, own) and plain.any()
    with torch.inference_mode():
        assert torch.equal(settled(x, lengths), loop(x, lengths))


@pytest.mark.slow
@each_rank(2)
def test_each_of_two_processes_runs_it_on_its_part():
    _, (x, lengths) = made()
    seen: list[int] = []

    @autoshard.local("batch seq _, batch -> batch seq _")
    def watched(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return loop(x, lengths)

    module = torch.nn.Sequential(Calls(watched, lengths, size=8)).double()
    plain = copy.deepcopy(module)
    hints = {"input": ("batch", "seq", "hidden")}
    shard(module, (x,), "data=2", batch="data", hints=hints, pins={"0": "[batch/data, _, _]"})
    found: list[list[torch.Tensor]] = []
    for one in (plain, module):
        own = x.detach().clone().requires_grad_()
        result = one(own)
        result = result.full_tensor() if isinstance(result, DTensor) else result
        result.square().mean().backward()
        gradients = [part.grad for part in one.parameters()] + [own.grad]
        whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in gradients]
        found.append([result.detach(), *(part for part in whole if part is not None)])
    assert len(found[0]) == len(found[1]) == 4
    errors = [float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in zip(*found, strict=True)]
    assert max(errors) < 1e-11
    assert {*seen[-2:]} == {2}, "the batch that the function had, forward and again in backward"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@each_rank(2)
def test_two_steps_on_two_processes_are_those_of_one(seed: int):
    module, inputs = made()
    found = shard_module(module, inputs, load_cluster("local", ranks=2), "data=2", precision="fp32")
    assert difference(copy.deepcopy(module), cut_on_ranks(module, found, seed, devices_of("data=2")), inputs) < 1e-11


class Calls(torch.nn.Module):
    """A module that gives what it is given, with a weight, to a function."""

    def __init__(self, function: Any, *more: Any, size: int = 4) -> None:
        super().__init__()
        self.linear, self.function, self.more = torch.nn.Linear(size, size), function, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x), *self.more)


def written(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


@pytest.mark.parametrize(
    ("dims", "function", "says"),
    [
        ("batch _ -> batch _", lambda x: x - x.mean(0), "self.function.*parts along batch"),
        ("_ seq -> _ seq", lambda x: x.cumsum(1), "self.function.*parts along seq"),
        ("batch _hidden -> _hidden", lambda x: x.sum(0) ** 2, "parts along batch"),
        ("batch _ -> batch _", lambda x: x * torch.rand_like(x), "other numbers when it runs again"),
        ("batch _ -> batch _", lambda x: x[:, :2], r"returns \[\(6, 2\)\], and its dims say \[\(6, 4\)\]"),
        ("batch _ -> batch _", lambda x: (x, x), r"returns \[\(6, 4\), \(6, 4\)\]"),
        ("batch _ -> batch _", lambda x: None, "returns .*NoneType"),
        ("batch _ -> batch _", written, "changes a tensor in place"),
        ("batch _, batch -> batch _", lambda x, y: x, "takes 2 tensors, not 1"),
        ("batch -> batch", lambda x: x, "names 1 dims of tensor 1, which has 2"),
    ],
)  # fmt: skip
def test_what_a_function_does_not_keep_is_refused_by_name(dims: str, function: Any, says: str):
    with pytest.raises(InputError, match=says):
        capture(Calls(autoshard.local(dims)(function)), (torch.randn(8, 4),))


def test_dims_of_one_name_have_one_length_and_only_tensors_are_taken():
    both = autoshard.local("batch _, batch -> batch _")(lambda x, y: x * y[:, None])
    with pytest.raises(InputError, match="batch is 3 long in tensor 2, and 8 before"):
        capture(Calls(both, torch.ones(3)), (torch.randn(8, 4),))
    with pytest.raises(InputError, match=r"test_local.py.*takes tensors only"):
        both(torch.ones(3, 3), 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch seq", "is not like"),
        ("batch -> batch -> batch", "is not like"),
        ("batch/dp -> batch", "batch/dp is no name"),
        ("seq seq -> seq", "seq stands twice"),
        ("batch 4 -> batch", "4 is a number, which only results have"),
        ("batch _ -> batch seq", "how long seq of a result is"),
        ("batch -> batch _", "how long _ of a result is"),
    ],
)
def test_texts_that_say_nothing_are_refused(text: str, says: str):
    with pytest.raises(InputError, match=f"here: .*{says}"):
        LocalDims.of(text, "here")


def only_eight(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] not in (4, 8):
        raise RuntimeError("a kernel for 4 or 8")
    return x - x.mean(0)


def endless(x: torch.Tensor) -> torch.Tensor:
    while (x < 0).any():
        x = x * 0.5 - 1
    return x - x.mean(0)


@pytest.mark.parametrize("function", [only_eight, endless])
def test_what_cannot_be_probed_is_taken_as_promised(function: Any):
    captured = capture(Calls(autoshard.local("batch _ -> batch _")(function)), (torch.randn(8, 4),))
    assert not captured.program.kept_whole


def test_one_tensor_given_twice_is_cut_in_one_place_only():
    outer = autoshard.local("rows _, columns _ -> rows columns")(lambda x, y: x @ y.T)
    torch.manual_seed(0)
    module = Calls(lambda y: outer(y, y)).double()
    assert largest_error(run_to_compare(module, [numbers(6, 4)]), 8) < 1e-12


def scaled(factor: float) -> Any:
    @autoshard.local("batch _ -> batch _")
    def times(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return times


def test_functions_of_one_name_stay_two():
    two, three = scaled(2.0), scaled(3.0)
    assert float(two(torch.ones(1, 1))) == 2 and float(three(torch.ones(1, 1))) == 3


def test_a_file_that_is_run_again_has_the_same_program():
    def hashed(order: tuple[int, ...]) -> str:
        functions = scaled(2.0), scaled(3.0)  # a second run of a file marks its functions again
        module = Calls(lambda y: sum((functions[place](y) for place in order), y))
        captured = capture(module, (torch.randn(6, 4),))
        return block_hash(traced_block(captured.program, Precision.named("fp32")))

    assert hashed((0, 1)) == hashed((0, 1)) != hashed((0, 0))
