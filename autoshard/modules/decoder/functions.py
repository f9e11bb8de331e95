"""What some code computes, told by the numbers that it gives, because one function is written in many ways."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's users call it)

from autoshard.modules.decoder.pieces import NormDetail, Piece, SegmentFlow, is_same, shape
from autoshard.modules.dims import Dim
from autoshard.modules.program import Traced, TracedStep, name_of
from autoshard.modules.region import Local, constant, expand
from autoshard.spec.model import Activation

NORMS = ("layer_norm", "rms_norm")  # functions of torch
_MEANS = ("mean", "var", "var_mean", "std", "linalg_vector_norm", "norm", *NORMS)
_LARGEST_EPS = 1e-2
_UNSTATED_EPS = torch.finfo(torch.float32).eps  # of torch's rms_norm, in the format in which it computes
_FURTHEST, _POINTS = 6.0, 101  # numbers at which functions are compared
_RTOL, _ATOL = 1e-6, 1e-6  # means may be taken in FP32
_NORMED, _SMALL = 2, 1e-2  # how long the other dims are; numbers so small that what a norm adds to them shows


def known_function(steps: Sequence[TracedStep], x: Traced, flow: SegmentFlow) -> Activation | None:
    """Return which of the planner's functions some steps compute of each number of ``x``; None where it is none."""
    points = torch.linspace(-_FURTHEST, _FURTHEST, _POINTS, dtype=torch.float64)
    sizes = {dim: 1 if place else _POINTS for place, dim in enumerate(x.dims)}
    result = _computed(steps, {x: points.reshape([sizes[dim] for dim in x.dims])}, sizes, flow)
    activations: Mapping[Activation, torch.Tensor] = {
        "silu": F.silu(points),
        "gelu": F.gelu(points),
        "gelu_tanh": F.gelu(points, approximate="tanh"),
        "relu": F.relu(points),
        "relu2": F.relu(points).square(),
    }
    if result is None or result.numel() != _POINTS:
        return None
    same: Iterator[Activation] = (
        name for name, values in activations.items() if torch.allclose(result.flatten(), values, rtol=_RTOL, atol=_ATOL)
    )
    return next(same, None)


def as_norm(piece: Piece, flow: SegmentFlow) -> Piece:
    """Return a piece with one input and weights as the norm that it computes, or as it is."""
    over, names = averaged(piece.steps), [name_of(step) for step in piece.steps]
    if len(over) != 1 or not 1 <= len(piece.weights) <= 2 or any({*weight.dims} != over for weight in piece.weights):
        return piece
    is_layer = len(piece.weights) > 1 or sum(name in _MEANS for name in names) > 1 or "layer_norm" in names
    norm = NormDetail(function="layer" if is_layer else "rms", over=next(iter(over)), eps=_eps(piece.steps))
    return replace(piece, kind="norm", norm=norm) if _is_norm(piece, norm, flow) else piece


def averaged(steps: Sequence[TracedStep]) -> set[Dim]:
    """Return the dims over which the first mean of some steps is taken; none where they take no mean."""
    first = next((step for step in steps if name_of(step) in _MEANS), None)
    if first is None:
        return set()
    if name_of(first) in NORMS:
        return {*first.whole_leaves()}
    return {dim for dim in shape(first.reads[0].positions) if dim not in first.makes.dims}


def _eps(steps: Sequence[TracedStep]) -> float:
    """Return what a norm adds before it takes the root: a small number among its arguments, or torch's default."""
    floats = (
        argument
        for step in steps
        for argument in (*step.arguments, *step.keywords.values())
        if isinstance(argument, float)
    )
    return next((value for value in floats if 0 < value <= _LARGEST_EPS), _UNSTATED_EPS)


def _is_norm(piece: Piece, norm: NormDetail, flow: SegmentFlow) -> bool:
    """Say whether the steps of a piece compute a norm over one dim, with a weight or one more than a weight."""
    (x,), count = piece.reads, norm.over.size
    sizes = {dim: count if dim is norm.over else _NORMED for dim in x.dims}
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in piece.weights]
    inputs = _SMALL * torch.randn([sizes[dim] for dim in x.dims], generator=generator, dtype=torch.float64)
    weights = {part.value: tensor for part, tensor in zip(piece.weights, numbers, strict=True)}
    result = _computed(piece.steps, {x: inputs, **weights}, sizes, flow)
    if result is None or {*piece.makes.dims} != {*x.dims}:
        return False
    order = [dim for dim in x.dims if dim is not norm.over] + [norm.over]
    moved, normed = (
        tensor.permute([dims.index(dim) for dim in order])
        for tensor, dims in ((inputs, x.dims), (result, piece.makes.dims))
    )
    centred = moved - moved.mean(-1, keepdim=True) if norm.function == "layer" else moved
    eps = torch.finfo(moved.dtype).eps if norm.eps == _UNSTATED_EPS else norm.eps
    plain = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    weight, shift = numbers[0], numbers[1] if len(numbers) > 1 else 0.0
    return any(torch.allclose(normed, plain * scale + shift, rtol=_RTOL, atol=_ATOL) for scale in (weight, 1 + weight))


def only_turns(piece: Piece, tables: Sequence[Traced], flow: SegmentFlow) -> bool:
    """Test whether a piece is linear in its input, as a product with its tables is: f(0) = 0 and f(2x) = 2 f(x)."""
    (x,), generator = piece.reads, torch.Generator().manual_seed(0)
    dims = {dim for step in piece.steps for read in step.reads for dim in (*shape(read.positions), *step.makes.dims)}
    sizes = {dim: dim.size if dim is x.dims[-1] or dim not in x.dims else _NORMED for dim in dims}
    sizes |= {dim: sizes[dim] for table in tables for dim in table.dims}
    inputs = {
        value: torch.randn([sizes[dim] for dim in value.dims], generator=generator, dtype=torch.float64)
        for value in (x, *tables)
    }
    once, twice, none = (_computed(piece.steps, {**inputs, x: factor * inputs[x]}, sizes, flow) for factor in (1, 2, 0))
    if once is None or twice is None or none is None:
        return False
    return not none.any() and torch.allclose(twice, 2 * once, rtol=_RTOL, atol=_ATOL) and bool(once.any())


def _computed(
    steps: Sequence[TracedStep], inputs: Mapping[Traced, torch.Tensor], sizes: Mapping[Dim, int], flow: SegmentFlow
) -> torch.Tensor | None:
    """Return the result of steps in FP64; None where they read other tensors than these, or have other dims."""
    names = {dim: f"d{number}" for number, dim in enumerate(sizes)}
    numbers, values = {value: place for place, value in enumerate(inputs)}, list(inputs.values())
    for step in steps:
        if is_same(step):
            continue
        read = [flow.root(operand.value) for operand in step.reads]
        dims = {*step.makes.dims, *(dim for operand in step.reads for dim in shape(operand.positions))}
        if not {*read} <= {*numbers} or not dims <= {*sizes} or step.function in (constant, expand):
            return None
        local = Local(
            name=step.name, function=step.function, arguments=step.arguments, keywords=step.keywords,
            reads=tuple(
                (numbers[value], tuple(names[dim] for dim in reading.dims), _along(reading.positions, names))
                for value, reading in zip(read, step.reads, strict=True)
            ),
            gives=_along(step.makes.positions, names),
        )  # fmt: skip
        try:
            values.append(local.run(values, {names[dim]: size for dim, size in sizes.items()}).double())
        except (IndexError, RuntimeError, TypeError, ValueError):  # it needs the sizes of the code
            return None
        numbers[step.makes] = len(values) - 1
    return values[-1]


def _along(positions: Sequence[tuple[Dim, ...]], names: Mapping[Dim, str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[dim] for dim in shape([position])) for position in positions)
