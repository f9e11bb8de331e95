"""Which dims of an operation may be cut, found by running it on parts of small inputs.

A cut is taken only if parts of the inputs give the same parts of the results, and of the gradients, for two lengths,
two places of the cut and several kinds of numbers. Any doubt leaves a dim whole.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Tensors = tuple[torch.Tensor, ...]
Shape = tuple[int, ...]
Function = Callable[[Sequence[torch.Tensor]], Tensors]
LARGEST = 1 << 18  # numbers of an operation that is run in its own size; derived: a few milliseconds
_MORE = 3  # by which an axis that is cut is longer in a second run
_SMALL = ((6, 2), (7, 3))  # sizes instead: first, and steps to the next ones, which are not multiples of each other
_CLOSE, _ROUNDING = 1e-9, 1e-12  # of a number, of the largest; in FP64
_TRIES = 600  # ways to cut that are tried; derived: three tensors of rank 4, all dims equal


@dataclass(frozen=True, slots=True)
class PartCut:
    """Axes that may be cut together: one of each input, or None; one of each result, or None where parts are summed."""

    inputs: tuple[int | None, ...]
    results: tuple[int | None, ...]

    def overlaps(self, other: "PartCut") -> bool:
        """Say whether both cut an axis of the same tensor in the same place."""
        pairs = [*zip(self.inputs, other.inputs, strict=True), *zip(self.results, other.results, strict=True)]
        return any(one is not None and one == two for one, two in pairs)


def found_cuts(
    function: Function, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], constants: Sequence[int] = ()
) -> tuple[PartCut, ...]:
    """Return cuts that may be combined; ``given`` and ``made`` have the shapes and formats of inputs and results.

    ``constants`` are the integers among the arguments. An operation that is too large to be run is run in smaller
    sizes, unless one of them may be a length.
    """
    probe, found = _Probing(function, given, made, constants), list[PartCut]()
    for cut in itertools.islice(candidates(given, made), _TRIES):
        if not any(cut.overlaps(other) for other in found) and probe.allows(cut):
            found.append(cut)
    return tuple(found)


def candidates(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Iterator[PartCut]:
    """Yield cuts of axes that have the same length; those that leave sums come last."""

    def axes(tensors: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int | None, ...]]:
        own = [[axis for axis, length in enumerate(one.shape) if length == size] for one in tensors]
        return itertools.product(*([*some, None] for some in own))

    sizes = sorted({size for one in given for size in one.shape if size > 1})
    every = [
        PartCut(inputs, results)
        for size in sizes
        for results in axes(made, size)
        for inputs in axes(given, size)
        if any(one is not None for one in inputs)
    ]
    return iter(sorted(every, key=lambda cut: cut.results.count(None)))


class _Probing:
    """Runs of a function in some sizes, each with several kinds of numbers."""

    def __init__(
        self, function: Function, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], constants: Sequence[int]
    ) -> None:
        self.function, self.given = function, given
        shapes = [tuple(one.shape) for one in (*given, *made)]
        sizes = sorted({size for shape in shapes for size in shape if size > 1})
        maps: list[Mapping[int, int]] = []
        if sum(one.numel() for one in (*given, *made)) <= LARGEST:
            maps.append({})
        elif all(abs(one) < _SMALL[0][0] - 1 for one in constants):  # numbers of axes, not lengths
            maps += [{size: first + step * place for place, size in enumerate(sizes)} for first, step in _SMALL]
        self.sized = [[tuple(sized.get(size, size) for size in shape) for shape in shapes] for sized in maps]
        self.runs: dict[tuple[Shape, ...], list[ProbeRun]] = {}

    def allows(self, cut: PartCut) -> bool:
        """Say whether nothing speaks against a cut, of axes as long as they are and of longer ones."""
        axes = (*cut.inputs, *cut.results)
        longer = [
            [
                tuple(size + _MORE * (axis == place) for place, size in enumerate(shape))
                for shape, axis in zip(shapes, axes, strict=True)
            ]
            for shapes in self.sized
        ]
        runs = [self._run(tuple(shapes)) for shapes in (*self.sized, *longer)]
        return bool(runs) and all(len(some) > 1 and all(run.agrees(cut) for run in some) for some in runs)

    def _run(self, shapes: tuple[Shape, ...]) -> list["ProbeRun"]:
        """Run a function on several kinds of numbers; without any where the results have other shapes than these."""
        if shapes not in self.runs:
            random, found = torch.Generator().manual_seed(0), list[ProbeRun]()
            for kind in ("normal", "far apart", "ties"):
                inputs = [numbers(one, shape, kind, random) for one, shape in zip(self.given, shapes, strict=False)]
                run = ProbeRun.of(self.function, inputs, random)
                if run is not None and run.shapes != shapes[len(self.given) :]:
                    found.clear()
                    break
                if run is not None and run.is_finite():
                    found.append(run)
            self.runs[shapes] = found
        return self.runs[shapes]


def numbers(like: torch.Tensor, shape: Sequence[int], kind: str, random: torch.Generator) -> torch.Tensor:
    """Return random numbers of a kind, in double where the tensor they are like holds no whole ones."""
    if like.dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=random).bool()
    if not like.is_floating_point():
        return torch.randint(0, 3, tuple(shape), generator=random).to(like.dtype)
    found = torch.randn(tuple(shape), generator=random, dtype=torch.float64)
    if kind == "far apart":  # so that one part has the large ones
        return found * 10 ** (3 * torch.randn(tuple(shape), generator=random, dtype=torch.float64))
    return torch.round(found) if kind == "ties" else found


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun:
    """A function of whole inputs: its results and the gradients of the inputs, for some gradients of the results."""

    function: Function
    inputs: Tensors
    results: Tensors
    seeds: Tensors
    gradients: tuple[torch.Tensor | None, ...]
    rounding: float = _ROUNDING

    @classmethod
    def of(cls, function: Function, inputs: Sequence[torch.Tensor], random: torch.Generator) -> "ProbeRun | None":
        """Run a function; None where it does not take such inputs."""
        try:
            with warnings.catch_warnings(action="ignore"):
                results = function(inputs)
            seeds = tuple(torch.randn(one.shape, generator=random, dtype=torch.float64) for one in results)
            _, gradients = _differentiated(function, inputs, seeds)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return None
        return cls(function=function, inputs=tuple(inputs), results=results, seeds=seeds, gradients=gradients)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the results."""
        return tuple(tuple(one.shape) for one in self.results)

    def is_finite(self) -> bool:
        """Say whether all numbers can be compared."""
        return all(bool(one.isfinite().all()) for one in (*self.results, *self.gradients) if one is not None)

    def agrees(self, cut: PartCut) -> bool:
        """Say whether parts give the same parts, cut behind the first and in the middle."""
        lengths = {
            one.shape[axis] for one, axis in zip(self.inputs, cut.inputs, strict=True) if axis is not None
        }  # fmt: skip
        (length,) = lengths
        return length > 1 and all(self._agrees(cut, place) for place in {1, length // 2})

    def _agrees(self, cut: PartCut, place: int) -> bool:
        results: list[Tensors] = []
        gradients: list[tuple[torch.Tensor | None, ...]] = []
        for part in (slice(0, place), slice(place, None)):
            inputs = _part(self.inputs, cut.inputs, part)
            try:
                made, back = _differentiated(self.function, inputs, _part(self.seeds, cut.results, part))
            except (RuntimeError, ValueError, IndexError, TypeError):
                return False
            results.append(made)
            gradients.append(back)
        whole = [*self.results, *self.gradients]
        axes = [*cut.results, *cut.inputs]
        parts = zip(*((*made, *back) for made, back in zip(results, gradients, strict=True)), strict=True)
        return all(_same(one, two, axis, self.rounding) for one, two, axis in zip(whole, parts, axes, strict=True))


def _part(tensors: Sequence[torch.Tensor], axes: Sequence[int | None], part: slice) -> Tensors:
    pairs = zip(tensors, axes, strict=True)
    return tuple(one if axis is None else one[(slice(None),) * axis + (part,)] for one, axis in pairs)


def _differentiated(
    function: Function, inputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
) -> tuple[Tensors, tuple[torch.Tensor | None, ...]]:
    """Return the results, and the gradients of the inputs: None where there is none."""
    wanted = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
    with torch.enable_grad(), warnings.catch_warnings(action="ignore"):  # of the variance of one number
        results = function(wanted)
    pairs = [(one, seed) for one, seed in zip(results, seeds, strict=True) if one.requires_grad]
    if any(one.shape != seed.shape for one, seed in pairs):
        raise ValueError
    floats = [one for one in wanted if one.requires_grad]
    found = (
        torch.autograd.grad([one for one, _ in pairs], floats, [seed for _, seed in pairs], allow_unused=True)
        if pairs and floats
        else [None] * len(floats)
    )
    own = dict(zip(map(id, floats), found, strict=True))
    return tuple(one.detach() for one in results), tuple(own.get(id(one)) for one in wanted)


def _same(whole: torch.Tensor | None, parts: Sequence[torch.Tensor | None], axis: int | None, rounding: float) -> bool:
    """Say whether parts are a whole: joined along an axis, or summed."""
    found = [one for one in parts if one is not None]
    if whole is None or not found:
        return all(one is None or not one.any() for one in (whole, *parts))
    if len(found) < len(parts):
        found += [torch.zeros_like(found[0])] * (axis is None)
    made = sum(found[1:], found[0]) if axis is None else torch.cat(found, axis)
    if made.shape != whole.shape or made.dtype != whole.dtype:
        return False
    if not whole.is_floating_point():
        return axis is not None and torch.equal(made, whole)
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    return torch.allclose(made, whole, rtol=_CLOSE, atol=rounding * largest)
