"""Products of tensors as matrix products: each dim is kept from both factors, from one of them, or summed over."""

from collections.abc import Callable

import torch

from autoshard.engine.torch.kernels.grouped import GroupedMultiplier
from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels, shape_of
from autoshard.engine.torch.kernels.matrices import Multiplier
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.op import Call, Dims

Matrix = Callable[[torch.Tensor], torch.Tensor]
_Factors = tuple[torch.Tensor, torch.Tensor]


def _matrix(dims: Dims, groups: tuple[Dims, ...], call: Call) -> Matrix:
    """Return a function that makes a factor a matrix, one axis for each group of dims; a view, if strides allow."""
    shape = tuple(call.elements(group) for group in groups)
    order = tuple(dims.index(dim) for group in groups for dim in group)
    if order == tuple(range(len(order))):
        return lambda tensor: tensor.reshape(shape)
    if [*map(len, groups)] == [1, 1]:  # in the other order
        return torch.t
    return lambda tensor: tensor.permute(order).reshape(shape)


def _product(kind: Einsum, call: Call) -> tuple[Matrix, Matrix, tuple[int, ...], list[int] | None]:
    """Turn an einsum into one product of matrices, or a batch of them over the dims that both factors keep.

    Return the functions that make both factors matrices, the shape of the result, and the wanted order of its dims, if
    the product makes them in another.
    """
    left, right = (tensor.dims for tensor in call.inputs)
    both = tuple(dim for dim in left if dim in right and dim in kind.dims)
    summed = tuple(dim for dim in left if dim in right and dim not in kind.dims)
    alone = tuple(tuple(dim for dim in dims if dim not in (*both, *summed)) for dims in (left, right))
    result_dims, batch = (*both, *alone[0], *alone[1]), (both,) if both else ()
    order = [result_dims.index(dim) for dim in kind.dims]
    first = _matrix(left, (*batch, alone[0], summed), call)
    second = _matrix(right, (*batch, summed, alone[1]), call)
    return first, second, shape_of(call, result_dims), None if order == sorted(order) else order


def _einsum(kind: Einsum, call: Call, context: KernelContext) -> Kernel:
    device, smaller = context.formats.device, context.smaller
    multiplier = GroupedMultiplier(device, bool(smaller)) if of_experts(call) else Multiplier(device, smaller)
    if context.packed and isinstance(multiplier, GroupedMultiplier):
        return _grouped(kind, call, multiplier)
    first, second, shape, order = _product(kind, call)

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        result = multiplier.product(first(x), second(y)).reshape(shape)
        return (result.permute(order) if order else result,)

    return run


def of_experts(call: Call) -> bool:
    """Whether an operation multiplies each expert's rows with a tensor of that expert."""
    return {"experts", "slots"} <= {*call.inputs[0].dims}


def _grouped(kind: Einsum, call: Call, multiplier: GroupedMultiplier) -> Kernel:
    """Return a function with a product for each expert; its last argument says where the rows of each expert end.

    Rows are dims of the result (F, I), or are summed over (W). The host reads no number.
    """
    as_it_is = call.inputs[1].dims[-1] == kind.dims[-1]  # or else it is summed over

    def run(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
        if "slots" in kind.dims:
            return (multiplier.product(x[0], y if as_it_is else y.transpose(1, 2), ends).unsqueeze(0),)
        return (multiplier.gradients(x[0].t(), y[0], ends),)

    return run


def _of_only_expert(kind: Einsum, call: Call) -> Callable[[torch.Tensor, torch.Tensor], _Factors]:
    """Return the functions that make the factors two matrices where all rows are those of one expert."""
    if "slots" not in kind.dims:
        return lambda x, y: (x[0].t(), y[0])
    as_it_is = call.inputs[1].dims[-1] == kind.dims[-1]
    return lambda x, y: (x[0], y[0] if as_it_is else y[0].t())


def adding(kind: Einsum, call: Call, multiplier: Multiplier, *, packed: bool = False) -> Kernel | None:
    """Return a function that adds an einsum to its first argument, a sum; None if the sum has another order of dims.

    The sum may be of a wider format than the factors, where the multiplier adds such products. Grouped products (of
    ``packed`` rows of several experts), and those of experts in FP8, cannot add to a sum.
    """
    if of_experts(call) and multiplier.smaller:
        return None
    if packed and of_experts(call):
        return _adding_of_only_expert(kind, call, multiplier) if call.sizes["experts"] == 1 else None
    first, second, _, order = _product(kind, call)
    if order:
        return None

    def run(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        left, right = first(x), second(y)
        multiplier.add(total.view(*left.shape[:-1], right.shape[-1]), left, right)
        return (total,)

    return run


def _adding_of_only_expert(kind: Einsum, call: Call, multiplier: Multiplier) -> Kernel:
    factors = _of_only_expert(kind, call)

    def run(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        multiplier.add(total[0], *factors(x, y))
        return (total,)

    return run


register_kernels({Einsum: _einsum})
