"""Prepared steps of a rank and their execution, for plans and sharded modules: values by name, dropped early."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.engine.observing import Observation
from autoshard.engine.routing import CountRows
from autoshard.graph.op import OpKind
from autoshard.layout.program import Compute, CountOnce, Instruction, Sum
from autoshard.run.protocol import HOST

Values = dict[str, Any]  # what a rank holds while a program runs, by name: tensors, and what torch keeps of regions
# Returns a weight, input or gradient from outside the block, by its tensor's name; several as one row of numbers.
InputSource = Callable[..., torch.Tensor]
StepFunction = Callable[..., Sequence[Any]]
# By documents the host decides what attends to what, for every batch anew.
BY_BATCH = ("document_starts",)
ANY_COUNT = -1  # the size of a dim of which nothing is known before a batch: rows of experts routed to this rank
# Numbers of one tensor that are alive at a time. On a host what its caches hold: measured on 2 cores of an AMD EPYC
# with torch 2.13, 2026-11-22. On a device enough to keep all of it busy: estimated, nobody has measured it.
_HOST_NUMBERS, _DEVICE_NUMBERS = 2**19, 2**26
_ALIGNED = 64  # rows, so that parts begin where compilers may expect it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """An instruction, or several that are computed as one, ready to run on a rank.

    Without ``run`` the step takes a tensor from outside, or several that lie one behind the other; ``reads`` has their
    names. Steps that a graph of torch's operations has to leave whole, since they talk to other ranks or are the
    user's, say with ``stand_in`` how their results look.
    """

    run: StepFunction | None = None
    reads: tuple[str, ...]  # names of values, in the order of the arguments of ``run``
    writes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()  # of what is written, if they are known
    drops: tuple[str, ...] = ()  # values without a later reader
    empties: bool = False  # run gets one list, which it empties, so that what it drops is free while it runs
    entry: Instruction | CountRows | Observation | None = None  # the instruction, or one of several
    about: str = ""  # what generated text says of the step, if not what the entry is
    adds: bool = False  # a product into a sum
    counted: bool = False  # works on as many rows as the host has counted
    few: "FewRows | None" = None  # a run by rows
    layer: str = ""  # the submodule, one of several equal ones, for which the step runs
    stand_in: StepFunction | None = None

    @property
    def touched(self) -> tuple[str, ...]:
        """Every value that it reads or writes, once."""
        return tuple(dict.fromkeys((*(self.reads if self.run else ()), *self.writes)))

    @property
    def is_local(self) -> bool:
        """Whether it computes the same operations for every batch, and talks to no other rank.

        A user's kernel may do either, so it is not local unless its class names an engine that it was checked with.
        """
        if self.counted:
            return False
        match self.entry:
            case Compute(op=op, reads=reads, ring=ring):
                kind = type(op.kind)
                unchecked = kind.torch_kernel is not OpKind.torch_kernel and not vars(kind).get("engines")
                is_called = unchecked or kind.in_turns  # each part of a sequence would be written out
                return not (is_called or ring or any(value.tensor in BY_BATCH for value in reads))
            case CountOnce() | Sum() | Observation() | CountRows():
                return True
            case _:
                return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRows:
    """A run by rows, ready to run for ``rows`` of them at a time, and the formats of its results."""

    steps: tuple[RankStep, ...]
    reads: tuple[str, ...]  # inputs, and then the places of results
    rows: int
    dtypes: tuple[torch.dtype, ...]

    def __call__(self, few: list[torch.Tensor]) -> None:
        """Run for a few rows of all inputs."""
        run_steps(self.steps, dict(zip(self.reads, few, strict=True)))

    def run(self, shapes: Sequence[tuple[int, ...]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run for all rows."""
        results = self.empty(shapes, tensors[0].device)
        by_rows(self, (*tensors, *results), self.rows)
        return results

    def empty(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return memory for the results of all rows."""
        return tuple(
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, self.dtypes, strict=True)
        )


def run_steps(steps: Iterable[RankStep], values: Values, source: InputSource | None = None) -> None:
    """Run one step after the other; values from outside come from a source."""
    for step in steps:
        if step.run is None:
            assert source, "nothing comes from outside here"
            values[step.writes[0]] = source(*step.reads)
            dropped = step.drops
        elif step.empties:
            reads = [values[name] for name in step.reads]
            for name in step.drops:
                values.pop(name, None)
            values.update(zip(step.writes, step.run(reads), strict=True))
            dropped = tuple(name for name in step.drops if name in step.writes)
        else:
            results = step.run(*[values[name] for name in step.reads])
            for name, tensor, shape in zip(step.writes, results, step.shapes, strict=False):
                assert fits(tensor, shape), f"{name} is {tuple(tensor.shape)}, not {shape}"
            values.update(zip(step.writes, results, strict=True))
            dropped = step.drops
        for name in dropped:
            del values[name]


def dropping(steps: Iterable[RankStep], ends: Collection[str]) -> Iterator[RankStep]:
    """Let each step drop the values that no later step reads, except the ``ends`` of all steps."""
    listed = tuple(steps)
    last = {name: number for number, step in enumerate(listed) for name in step.touched}
    for number, step in enumerate(listed):
        yield replace(step, drops=tuple(name for name in step.touched if last[name] == number and name not in ends))


def fits(tensor: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has a shape, as far as the shape is known."""
    return len(shape) == tensor.dim() and all(
        expected in (size, ANY_COUNT) for size, expected in zip(tensor.shape, shape, strict=True)
    )


def num_rows(count: int, width: int, device: torch.device) -> int:
    """Return how many rows of a width are computed at a time, of a total.

    >>> num_rows(8192, 128_256, torch.device("cuda")), num_rows(100, 32_000, torch.device("cpu"))
    (512, 16)
    """
    most = max(1, (_HOST_NUMBERS if device.type == HOST else _DEVICE_NUMBERS) // max(1, width))
    return min(count, most - most % _ALIGNED if most > _ALIGNED else most)


def by_rows(function: Callable[[list[torch.Tensor]], object], tensors: Sequence[torch.Tensor], rows: int) -> None:
    """Call a function with a few rows of each [batch, position, ...] at a time; the last rows overlap the others."""
    whole = [flat_rows(tensor) for tensor in tensors]
    count = whole[0].shape[1]
    for first in range(0, count, rows or 1):
        start = min(first, count - rows)
        function([tensor.narrow(1, start, rows) for tensor in whole])


def flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return [batch, position, ...] as one sequence."""
    return tensor.reshape(1, -1, *tensor.shape[2:])
