"""Torch functions as one operation of the graph: what a rank does on its parts, and the gradient by torch itself."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels
from autoshard.graph.op import Array, Call, Differentiable, Dims, GradientStep, OpKind, Output, Tensor
from autoshard.modules.local import NAMESPACE
from autoshard.modules.nodes import fill_slots
from autoshard.modules.program import shown
from autoshard.spec.workload import Dtype

Positions = tuple[Dims, ...]  # of a tensor as torch sees it: each a product of dims


def expand(array: torch.Tensor, *, shape: Sequence[int]) -> torch.Tensor:
    """Repeat a tensor to a shape; regions give the shape of a rank's part."""
    return array.expand(tuple(shape))


def constant(
    value: float, dtype: torch.dtype, *, shape: Sequence[int], device: torch.device | None = None
) -> torch.Tensor:
    """Return one number everywhere."""
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """One torch function: how it reads what came before (by number: inputs first, then results), and what it gives."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    reads: tuple[tuple[int, Dims, Positions], ...]  # number, dims in memory, positions
    gives: Positions
    products: tuple[Dims, ...] = ()  # of matrices: a multiplication and an addition for each combination of these dims

    def run(
        self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int], device: torch.device | None = None
    ) -> torch.Tensor:
        """Call the function on the local parts, and return the result with an axis for each of its dims.

        A function without inputs creates its tensor on the ``device``.
        """
        read = [_along(tensors[number], dims, positions, sizes) for number, dims, positions in self.reads]
        keywords = {key: fill_slots(value, read) for key, value in self.keywords.items()}
        if self.function in (expand, constant):
            keywords["shape"] = _lengths(self.gives, sizes)
        if self.function is constant:
            keywords["device"] = device
        result = self.function(*(fill_slots(argument, read) for argument in self.arguments), **keywords)
        return result.reshape([sizes[dim] for position in self.gives for dim in position])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region(Differentiable):
    """Torch functions that depend on each other; the last one's result is that of the region.

    A dim that is not ``whole`` may be cut: no function joins numbers along it. An input that lacks a cut dim is used by
    all parts, so that parts of its gradient wait to be summed.
    """

    name: str
    locals: tuple[Local, ...]
    dims: Dims  # of the result
    dtype: Dtype
    format: torch.dtype  # of the result, as the module has it
    whole: Dims
    empty: Dims = ()  # those that have no numbers on any rank

    @property
    def label(self) -> str:
        return self.name

    @property
    def is_own(self) -> bool:
        """Whether it calls a function that the user marks, into which nothing of torch sees."""
        return any(NAMESPACE in shown(local.function) for local in self.locals)

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        return (Output(dims=self.dims, dtype=self.dtype),)

    def whole_dims(self) -> Dims:
        return self.whole

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return (self.run([torch.from_numpy(np.asarray(array, order="C")) for array in arrays], call.sizes).numpy(),)

    def run(
        self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int], device: torch.device | None = None
    ) -> torch.Tensor:
        """Run all functions on parts of these sizes; a rank without a part has nothing to run, or to add to a sum.

        The device is that of the rank; without it, that of what the region reads.
        """
        device = device or (tensors[0].device if tensors else None)
        reads = [read for local in self.locals for read in local.reads]
        read_dims = [dim for number, dims, _ in reads if number < len(tensors) for dim in dims]
        if not all(
            sizes[dim] for dim in (*read_dims, *self.dims) if dim not in self.empty
        ):  # which not all functions of torch take
            return torch.zeros([sizes[dim] for dim in self.dims], dtype=self.format, device=device)
        values = list(tensors)
        for local in self.locals:
            values.append(local.run(values, sizes, device))
        return values[-1]

    def torch_kernel(self, call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda *tensors: (self.run(tensors, call.sizes),)

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Let torch differentiate the functions on each rank's parts."""
        kind = RegionGradient(region=self, needed=tuple(needed))
        reads = ("d0", *(f"in{number}" for number in range(len(inputs))))
        return (GradientStep(kind=kind, reads=reads, gives=tuple(needed)),)

    def matrix_flops(self, call: Call) -> int:
        return sum(2 * call.elements(dims) for local in self.locals for dims in local.products)

    def vector_flops(self, call: Call) -> int:
        """Count an operation for each element of every result."""
        return sum(call.elements([dim for position in local.gives for dim in position]) for local in self.locals)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegionGradient(OpKind):
    """The gradients of a region's inputs, from that of its result."""

    region: Region
    needed: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.region.name}_gradient"

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        region_inputs = inputs[1:]
        return tuple(
            Output(
                dims=region_inputs[number].dims,
                dtype=region_inputs[number].dtype,
                suffix=f"in{number}" if place else "",
            )
            for place, number in enumerate(self.needed)
        )

    def whole_dims(self) -> Dims:
        return self.region.whole

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        upstream, *region_inputs = [torch.from_numpy(np.asarray(array, order="C")) for array in arrays]
        tape = Tape.of(self, region_inputs, call.sizes)
        return tuple(gradient.numpy() for gradient in tape.gradients(self.laid_out(upstream, call.inputs[0].dims)))

    def torch_kernel(self, call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
        dims = call.inputs[0].dims
        return lambda upstream, *region_inputs: Tape.of(self, region_inputs, call.sizes).gradients(
            self.laid_out(upstream, dims)
        )

    def laid_out(self, upstream: torch.Tensor, dims: Dims) -> torch.Tensor:
        """Lay the result's gradient, which lies along ``dims``, out as the result: a sum hands on its own order."""
        return upstream.permute([dims.index(dim) for dim in self.region.dims])

    def matrix_flops(self, call: Call) -> int:
        """Count each product of the forward pass twice."""
        return 2 * self.region.matrix_flops(call)

    def vector_flops(self, call: Call) -> int:
        """Count two operations for each element of every result."""
        return 2 * sum(call.elements([dim for part in local.gives for dim in part]) for local in self.region.locals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """A region that has run: its result, and what torch keeps of it for the gradients of some inputs."""

    result: torch.Tensor
    sources: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        kind: RegionGradient,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
        device: torch.device | None = None,
    ) -> "Tape":
        """Run a region on parts of these sizes."""
        copies = [
            tensor.detach().requires_grad_() if number in kind.needed else tensor
            for number, tensor in enumerate(inputs)
        ]
        with torch.enable_grad():
            result = kind.region.run(copies, sizes, device)
        return cls(result=result, sources=tuple(copies[number] for number in kind.needed))

    def gradients(self, upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradient of each source; zero where the source does not reach the result."""
        if not self.result.requires_grad:  # a detached result
            return tuple(torch.zeros_like(source).detach() for source in self.sources)
        gradients = torch.autograd.grad(self.result, self.sources, upstream.to(self.result.dtype), allow_unused=True)
        pairs = zip(gradients, self.sources, strict=True)
        return tuple(torch.zeros_like(source).detach() if gradient is None else gradient for gradient, source in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias(Differentiable):
    """A tensor under another name, for a reader that calls its dims otherwise. Nothing is moved."""

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        """Sums stay pending: gradients of a weight with several readers are summed over its copies once a step."""
        return {0: (0,)}

    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        return arrays

    def torch_kernel(self, call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda *tensors: tensors

    def vector_flops(self, call: Call) -> int:
        return 0

    def traffic_bytes(self, call: Call) -> int:
        return 0

    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Hand the gradient on."""
        return (GradientStep(kind=Alias(), reads=("d0",), gives=(0,)),)


def _lengths(positions: Positions, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[dim] for dim in position) for position in positions]


def _along(tensor: torch.Tensor, dims: Dims, positions: Positions, sizes: Mapping[str, int]) -> torch.Tensor:
    """Lay a tensor that lies along ``dims`` out by positions."""
    order = [dims.index(dim) for position in positions for dim in position]
    return tensor.permute(order).reshape(_lengths(positions, sizes))


def _region(kind: Region, call: Call, context: KernelContext) -> Kernel:
    return lambda *tensors: (kind.run(tensors, call.sizes, context.formats.device),)


def _region_gradient(kind: RegionGradient, call: Call, context: KernelContext) -> Kernel:
    dims, device = call.inputs[0].dims, context.formats.device
    return lambda upstream, *inputs: Tape.of(kind, inputs, call.sizes, device).gradients(kind.laid_out(upstream, dims))


register_kernels({Region: _region, RegionGradient: _region_gradient})
