"""A captured program before it becomes a graph: values with dims, and operations that read and make them."""

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from autoshard.modules.dims import Collision, Dim, Position, factors, fresh, separate, unify

Sort = Literal["product", "rows", "local", "cheap", "sum"]
Origin = Literal["parameter", "input", "carried", "made"]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor among the arguments of a torch function."""

    number: int


@dataclass(eq=False, kw_only=True)
class Traced:
    """One tensor of the program, stored along all of its dims in their order."""

    number: int
    name: str
    positions: tuple[Position, ...]
    origin: Origin
    format: torch.dtype
    is_index: bool = False
    is_wide: bool = False  # of FP32, in a module of 16 bits

    @property
    def dims(self) -> Position:
        """Its dims, outermost first."""
        return factors(dim for position in self.positions for dim in position)


@dataclass(frozen=True, eq=False, kw_only=True)
class Read:
    """How an operation reads a tensor: by positions, with other dims in the place of some of the tensor's own."""

    value: Traced
    positions: tuple[Position, ...]
    renamed: Mapping[Dim, Dim] = field(default_factory=dict[Dim, Dim])

    @property
    def dims(self) -> Position:
        """The dims of the tensor in its own order, as this reader calls them."""
        pairs = ((factors((old,)), factors((new,))) for old, new in self.renamed.items())
        names = {before: now for old, new in pairs for before, now in zip(old, new, strict=False)}
        return tuple(names.get(dim, dim) for dim in self.value.dims)


@dataclass(eq=False, kw_only=True)
class TracedStep:
    """One operation: a torch function on tensors, laid out by positions, and what may be cut in it.

    A dim that is not ``whole`` may be cut: each part of the result needs that part of the inputs only, or is a part of
    a sum. A ``sum`` has no reader in its own region, so that its sums may wait; what is ``cheap``,
    each reader does itself.
    """

    name: str
    path: str  # of the submodule that does it
    sort: Sort
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # with a TensorPlace for each tensor
    keywords: Mapping[str, Any]
    reads: tuple[Read, ...]
    makes: Traced
    whole: frozenset[Dim] = frozenset()
    summed: frozenset[Dim] = frozenset()  # parts of the result, where these are cut, wait to be summed
    products: tuple[Position, ...] = ()  # of matrices: a multiplication and an addition for each combination of dims

    def whole_leaves(self) -> frozenset[Dim]:
        """Return the dims that must not be cut."""
        return frozenset(factors(self.whole))


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Something that a module returns, or a buffer that it changes: made by the program, or by nodes without it.

    ``name`` is its place in what is returned (loss, 0), or the path of the buffer.
    """

    name: str
    read: Read | None = None
    otherwise: Any = None  # where the program does not make it: a node, or a number
    is_buffer: bool = False
    is_seeded: bool = False  # whether a gradient begins here
    is_trained: bool = False  # whether one could: a trained parameter, or an input with a gradient, moves it


@dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """The forward pass of a module."""

    values: tuple[Traced, ...]
    steps: tuple[TracedStep, ...]
    results: tuple[Result, ...]
    modules: Mapping[str, Read]  # the last value that each submodule makes, by path
    trained: frozenset[Traced]  # parameters and inputs that get a gradient
    kept_whole: tuple[str, ...]  # what could not be cut, with the line of the user's code


@dataclass(frozen=True)
class View:
    """How a node of the captured graph lays out a value."""

    value: Traced
    positions: tuple[Position, ...]


@dataclass
class Reading:
    """A view that an operation is about to read, while its dims are made to agree with those of others."""

    view: View
    positions: list[Position]
    renamed: dict[Dim, Dim] = field(default_factory=dict[Dim, Dim])

    def agree(self, axis: int, target: Position) -> None:
        """Make a position the same as another; read it under new names where some tensor would have a dim twice."""
        try:
            unify(self.positions[axis], target)
        except Collision:
            self.rename(axis)
            unify(self.positions[axis], target)

    def rename(self, axis: int) -> None:
        """Give the dims of a position new names, for this reading alone."""
        new: list[Dim] = []
        for old in factors(self.positions[axis]):
            (fresh_dim,) = fresh(old.size, old.hint)
            fresh_dim.weight = old.weight
            separate(fresh_dim, old)
            self.renamed[old] = fresh_dim
            new.append(fresh_dim)
        self.positions[axis] = tuple(new)


def agreed(readings: Sequence[Reading], rank: int, axes: Iterable[int]) -> list[Position]:
    """Make the tensors agree along some axes of a result of this rank, counted from its end as broadcasting does.

    Where one dim would stand on two axes, as in the differences of all pairs, the second is read under another name.
    """
    positions: list[Position] = []
    for axis in axes:
        together: Position = ()
        for reading in readings:
            reading_axis = axis - rank + len(reading.positions)
            if reading_axis >= 0 and reading.positions[reading_axis]:
                if together:
                    reading.agree(reading_axis, together)
                    continue
                if {*factors(reading.positions[reading_axis])} & {
                    dim for position in positions for dim in factors(position)
                }:
                    reading.rename(reading_axis)
                together = reading.positions[reading_axis]
        positions.append(together)
    return positions


def in_double(program: TracedProgram) -> TracedProgram:
    """Return a program whose steps round no numbers to a shorter format than double."""
    steps = tuple(
        replace(
            step, function=_doubled(step.function), arguments=_doubled(step.arguments), keywords=_doubled(step.keywords)
        )
        for step in program.steps
    )
    return replace(program, steps=steps)


def _doubled(value: Any) -> Any:
    """Return an argument with double in the place of each format of numbers with fractions."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, functools.partial):
        return functools.partial(value.func, *_doubled(value.args), **_doubled(value.keywords))
    if isinstance(value, dict):
        return {name: _doubled(part) for name, part in value.items()}
    return type(value)(map(_doubled, value)) if type(value) in (tuple, list) else value


def name_of(step: TracedStep) -> str:
    """Return the name of a step's function as torch has it."""
    function = step.function
    if isinstance(function, functools.partial):
        function = function.keywords.get("function", function.func)
    name = str(getattr(function, "_opname", getattr(function, "__name__", function)))
    return "mean" if name == "part_of_total" else name


def shown(value: Any) -> str:
    """Write an argument or a function down, without the place in memory that Python prints."""
    if isinstance(value, TensorPlace):
        return f"#{value.number}"
    if isinstance(value, functools.partial):
        return f"{shown(value.func)}({shown(value.args)}, {shown(value.keywords)})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shown(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, torch.device):  # where a module was traced
        return "device"
    return str(getattr(value, "__qualname__", value))


def free_name(name: str, used_names: Container[str]) -> str:
    """Return a name that nothing has yet: this one, or with a number."""
    return next(
        candidate
        for number in itertools.count(1)
        if (candidate := f"{name}_{number}" if number > 1 else name) not in used_names
    )
