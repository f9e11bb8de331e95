"""Products of tensors as matrix products: each dim is kept from both factors, from one of them, or summed over."""

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

from autoshard.engine.torch.kernels.kernel import Kernel, KernelContext, register_kernels, shape_of
from autoshard.engine.torch.kernels.matrices import Multiplier, multiply
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
    if order == (1, 0) and len(shape) == 2:
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
    if context.packed and of_experts(call):
        return _grouped(kind, call, context.formats.device)
    first, second, shape, order = _product(kind, call)
    multiplier = Multiplier(context.formats.device, context.smaller)

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        result = multiplier.product(first(x), second(y)).reshape(shape)
        return (result.permute(order) if order else result,)

    return run


def of_experts(call: Call) -> bool:
    """Whether an operation multiplies each expert's rows with a tensor of that expert."""
    return {"experts", "slots"} <= {*call.inputs[0].dims}


def _grouped(kind: Einsum, call: Call, device: torch.device) -> Kernel:
    """Return a function with a product for each expert; its last argument says where the rows of each expert end.

    Rows are dims of the result (F, I), or are summed over (W). The host reads no number.
    """
    as_it_is = call.inputs[1].dims[-1] == kind.dims[-1]  # or else it is summed over
    if call.sizes["experts"] == 1:
        factors = _of_only_expert(kind, call)
        return lambda x, y, ends: (multiply(*factors(x, y), device).unsqueeze(0),)

    def run(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
        if "slots" in kind.dims:
            return (_grouped_product(x[0], y if as_it_is else y.transpose(1, 2), ends).unsqueeze(0),)
        return (_grouped_product(x[0].t(), y[0], ends),)

    return run


def _of_only_expert(kind: Einsum, call: Call) -> Callable[[torch.Tensor, torch.Tensor], _Factors]:
    """Return the functions that make the factors two matrices where all rows are those of one expert."""
    if "slots" not in kind.dims:
        return lambda x, y: (x[0].t(), y[0])
    as_it_is = call.inputs[1].dims[-1] == kind.dims[-1]
    return lambda x, y: (x[0], y[0] if as_it_is else y[0].t())


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply group by group: rows with a matrix, or columns with rows; torch has a kernel for aligned BF16."""
    if not left.numel():  # nobody chose an expert of this rank
        return left.new_zeros((left.shape[0], right.shape[2]) if right.dim() == 3 else (
            len(ends), left.shape[0], right.shape[1]
        ))  # fmt: skip
    aligned = all(
        size * left.element_size() % 16 == 0 for size in (left.shape[0 if right.dim() == 2 else 1], right.shape[-1])
    )
    if left.dtype == torch.bfloat16 and aligned:
        return functional.grouped_mm(left, right, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1))
    number = torch.repeat_interleave(counts, output_size=right.shape[0] if right.dim() == 2 else left.shape[0])
    if right.dim() == 3:
        return torch.bmm(left.unsqueeze(1), right[number]).squeeze(1)
    of_each_row = left.t().unsqueeze(2) * right.unsqueeze(1)
    return of_each_row.new_zeros((len(counts), *of_each_row.shape[1:])).index_add_(0, number, of_each_row)


@cache
def groups_products(device: torch.device) -> bool:
    """Whether a device has grouped products whose sizes are known to the device alone."""
    rows = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        functional.grouped_mm(rows, rows.view(1, 16, 16), offs=torch.full((1,), 16, dtype=torch.int32, device=device))
    except (RuntimeError, NotImplementedError):  # as torch says that it has none
        return False
    return True


def adding(kind: Einsum, call: Call, multiplier: Multiplier, *, packed: bool = False) -> Kernel | None:
    """Return a function that adds an einsum to its first argument, a sum; None if the sum has another order of dims.

    The sum may be of a wider format than the factors, where the multiplier adds such products. Grouped products (of
    ``packed`` rows of several experts) cannot add to a sum.
    """
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
