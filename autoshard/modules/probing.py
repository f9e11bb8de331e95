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

    def overlaps(self, cut: "PartCut") -> bool:
        """Say whether both cut an axis of the same tensor in the same place."""
        pairs = [*zip(self.inputs, cut.inputs, strict=True), *zip(self.results, cut.results, strict=True)]
        return any(axis is not None and axis == cut_axis for axis, cut_axis in pairs)


def found_cuts(
    function: Function,
    example_inputs: Sequence[torch.Tensor],
    example_results: Sequence[torch.Tensor],
    constants: Sequence[int] = (),
) -> tuple[PartCut, ...]:
    """Return cuts that may be combined; the examples say which shapes and formats inputs and results have.

    ``constants`` are the integers among the arguments. An operation that is too large to be run is run in smaller
    sizes, unless one of them may be a length.
    """
    probe, cuts = _Probing(function, example_inputs, example_results, constants), list[PartCut]()
    for cut in itertools.islice(candidates(example_inputs, example_results), _TRIES):
        if not any(cut.overlaps(earlier) for earlier in cuts) and probe.allows(cut):
            cuts.append(cut)
    return tuple(cuts)


def candidates(example_inputs: Sequence[torch.Tensor], example_results: Sequence[torch.Tensor]) -> Iterator[PartCut]:
    """Yield cuts of axes that have the same length; those that leave sums come last."""

    def axes(tensors: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int | None, ...]]:
        axes_of_tensors = [[axis for axis, length in enumerate(tensor.shape) if length == size] for tensor in tensors]
        return itertools.product(*([*tensor_axes, None] for tensor_axes in axes_of_tensors))

    sizes = sorted({size for tensor in example_inputs for size in tensor.shape if size > 1})
    cuts = [
        PartCut(inputs, results)
        for size in sizes
        for results in axes(example_results, size)
        for inputs in axes(example_inputs, size)
        if any(axis is not None for axis in inputs)
    ]
    return iter(sorted(cuts, key=lambda cut: cut.results.count(None)))


class _Probing:
    """Runs of a function in some sizes, each with several kinds of numbers."""

    def __init__(
        self,
        function: Function,
        example_inputs: Sequence[torch.Tensor],
        example_results: Sequence[torch.Tensor],
        constants: Sequence[int],
    ) -> None:
        self.function, self.example_inputs = function, example_inputs
        shapes = [tuple(tensor.shape) for tensor in (*example_inputs, *example_results)]
        sizes = sorted({size for shape in shapes for size in shape if size > 1})
        maps: list[Mapping[int, int]] = []
        if sum(tensor.numel() for tensor in (*example_inputs, *example_results)) <= LARGEST:
            maps.append({})
        elif all(abs(constant) < _SMALL[0][0] - 1 for constant in constants):  # numbers of axes, not lengths
            maps += [{size: first + step * place for place, size in enumerate(sizes)} for first, step in _SMALL]
        self.sized = [[tuple(sized.get(size, size) for size in shape) for shape in shapes] for sized in maps]
        self.runs: dict[tuple[Shape, ...], list[ProbeRun]] = {}

    def allows(self, cut: PartCut) -> bool:
        """Say whether all runs agree with a cut, with the axes as long as they are and longer."""
        axes = (*cut.inputs, *cut.results)
        longer = [
            [
                tuple(size + _MORE * (axis == place) for place, size in enumerate(shape))
                for shape, axis in zip(shapes, axes, strict=True)
            ]
            for shapes in self.sized
        ]
        runs = [self._run(tuple(shapes)) for shapes in (*self.sized, *longer)]
        return bool(runs) and all(
            len(shape_runs) > 1 and all(run.agrees(cut) for run in shape_runs) for shape_runs in runs
        )

    def _run(self, shapes: tuple[Shape, ...]) -> list["ProbeRun"]:
        """Return runs on several kinds of numbers in these shapes; none where the results have other shapes."""
        if shapes not in self.runs:
            random, probe_runs = torch.Generator().manual_seed(0), list[ProbeRun]()
            for kind in ("normal", "far apart", "ties"):
                inputs = [
                    random_like(example, shape, kind, random)
                    for example, shape in zip(self.example_inputs, shapes, strict=False)
                ]
                run = ProbeRun.of(self.function, inputs, random)
                if run is not None and run.shapes != shapes[len(self.example_inputs) :]:
                    probe_runs.clear()
                    break
                if run is not None and run.is_finite():
                    probe_runs.append(run)
            self.runs[shapes] = probe_runs
        return self.runs[shapes]


def random_like(like: torch.Tensor, shape: Sequence[int], kind: str, random: torch.Generator) -> torch.Tensor:
    """Return random numbers of a kind: whole ones or truth values where the tensor holds such, else FP64."""
    if like.dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=random).bool()
    if not like.is_floating_point():
        return torch.randint(0, 3, tuple(shape), generator=random).to(like.dtype)
    normal = torch.randn(tuple(shape), generator=random, dtype=torch.float64)
    if kind == "far apart":  # so that one part has the large ones
        return normal * 10 ** (3 * torch.randn(tuple(shape), generator=random, dtype=torch.float64))
    return torch.round(normal) if kind == "ties" else normal


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
            seeds = tuple(torch.randn(result.shape, generator=random, dtype=torch.float64) for result in results)
            _, gradients = _differentiated(function, inputs, seeds)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            return None
        return cls(function=function, inputs=tuple(inputs), results=results, seeds=seeds, gradients=gradients)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the results."""
        return tuple(tuple(result.shape) for result in self.results)

    def is_finite(self) -> bool:
        """Say whether all numbers can be compared."""
        return all(bool(tensor.isfinite().all()) for tensor in (*self.results, *self.gradients) if tensor is not None)

    def agrees(self, cut: PartCut) -> bool:
        """Say whether parts of the inputs give parts of the results, cut after the first place and in the middle."""
        lengths = {
            tensor.shape[axis] for tensor, axis in zip(self.inputs, cut.inputs, strict=True) if axis is not None
        }  # fmt: skip
        (length,) = lengths
        return length > 1 and all(self._agrees(cut, place) for place in {1, length // 2})

    def _agrees(self, cut: PartCut, place: int) -> bool:
        results: list[Tensors] = []
        gradients: list[tuple[torch.Tensor | None, ...]] = []
        for part in (slice(0, place), slice(place, None)):
            inputs = _part(self.inputs, cut.inputs, part)
            try:
                part_results, back = _differentiated(self.function, inputs, _part(self.seeds, cut.results, part))
            except (RuntimeError, ValueError, IndexError, TypeError):
                return False
            results.append(part_results)
            gradients.append(back)
        whole = [*self.results, *self.gradients]
        axes = [*cut.results, *cut.inputs]
        parts = zip(
            *((*part_results, *back) for part_results, back in zip(results, gradients, strict=True)), strict=True
        )
        return all(
            _same(tensor, tensor_parts, axis, self.rounding)
            for tensor, tensor_parts, axis in zip(whole, parts, axes, strict=True)
        )


def _part(tensors: Sequence[torch.Tensor], axes: Sequence[int | None], part: slice) -> Tensors:
    pairs = zip(tensors, axes, strict=True)
    return tuple(tensor if axis is None else tensor[(slice(None),) * axis + (part,)] for tensor, axis in pairs)


def _differentiated(
    function: Function, inputs: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
) -> tuple[Tensors, tuple[torch.Tensor | None, ...]]:
    """Return the results, and the gradients of the inputs: None where there is none."""
    copies = [tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    with torch.enable_grad(), warnings.catch_warnings(action="ignore"):  # of the variance of one number
        results = function(copies)
    pairs = [(result, seed) for result, seed in zip(results, seeds, strict=True) if result.requires_grad]
    if any(result.shape != seed.shape for result, seed in pairs):
        raise ValueError
    floats = [copy for copy in copies if copy.requires_grad]
    gradients = (
        torch.autograd.grad([result for result, _ in pairs], floats, [seed for _, seed in pairs], allow_unused=True)
        if pairs and floats
        else [None] * len(floats)
    )
    gradient_of = dict(zip(map(id, floats), gradients, strict=True))
    return tuple(result.detach() for result in results), tuple(gradient_of.get(id(copy)) for copy in copies)


def _same(whole: torch.Tensor | None, parts: Sequence[torch.Tensor | None], axis: int | None, rounding: float) -> bool:
    """Say whether parts make up a whole tensor: joined along an axis, or summed where there is none."""
    tensors = [part for part in parts if part is not None]
    if whole is None or not tensors:
        return all(tensor is None or not tensor.any() for tensor in (whole, *parts))
    if len(tensors) < len(parts):
        tensors += [torch.zeros_like(tensors[0])] * (axis is None)
    joined = sum(tensors[1:], tensors[0]) if axis is None else torch.cat(tensors, axis)
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        return False
    if not whole.is_floating_point():
        return axis is not None and torch.equal(joined, whole)
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    return torch.allclose(joined, whole, rtol=_CLOSE, atol=rounding * largest)
