"""Products of tensors as matrix products: dims are sorted into those of both, of one, and those summed over."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, kernel_of, shape_of
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.op import Call, Dims


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factor:
    """How a factor becomes a matrix, or one for each element of the dims that both share."""

    order: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dims: Dims, groups: tuple[Dims, ...], call: Call) -> "_Factor":
        """Put these groups of dims one after the other, each as one axis."""
        sizes = tuple(call.elements(group) for group in groups)
        return cls(order=tuple(dims.index(dim) for group in groups for dim in group), shape=sizes)

    def change(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes the matrix of a tensor; a view, where memory allows."""
        order, shape = self.order, self.shape
        if order == tuple(range(len(order))):
            return lambda tensor: tensor.reshape(shape)
        if order == (1, 0) and len(shape) == 2:
            return torch.t
        return lambda tensor: tensor.permute(order).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """An einsum as a product of matrices, or as one for each element of the dims that both factors keep."""

    first: Callable[[torch.Tensor], torch.Tensor]
    second: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, ...]  # of the result, its dims in the order in which the product makes them
    order: list[int] | None  # in which they are wanted, if that is another

    @classmethod
    def of(cls, kind: Einsum, call: Call) -> "_Product":
        """Sort the dims of both factors."""
        left, right = (tensor.dims for tensor in call.inputs)
        both = tuple(dim for dim in left if dim in right and dim in kind.dims)
        summed = tuple(dim for dim in left if dim in right and dim not in kind.dims)
        alone = tuple(tuple(dim for dim in own if dim not in (*both, *summed)) for own in (left, right))
        made = (*both, *alone[0], *alone[1])
        order = [made.index(dim) for dim in kind.dims]
        return cls(
            first=_Factor.of(left, (*((both,) if both else ()), alone[0], summed), call).change(),
            second=_Factor.of(right, (*((both,) if both else ()), summed, alone[1]), call).change(),
            shape=shape_of(call, made),
            order=None if order == sorted(order) else order,
        )


@kernel_of.register
def _einsum(kind: Einsum, call: Call, context: KernelContext) -> Kernel:
    product = _Product.of(kind, call)
    first, second, shape, order = product.first, product.second, product.shape, product.order

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        made = torch.matmul(first(x), second(y)).reshape(shape)
        return (made.permute(order) if order else made,)

    return run


def adding(kind: Einsum, call: Call) -> Kernel | None:
    """Return what adds an einsum to a sum (its first argument) as it is computed; None if the sum lies otherwise."""
    product = _Product.of(kind, call)
    if product.order:
        return None
    first, second = product.first, product.second

    def run(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        left, right = first(x), second(y)
        into = total.view(*left.shape[:-1], right.shape[-1])
        (into.addmm_ if left.dim() == 2 else into.baddbmm_)(left, right)
        return (total,)

    return run
