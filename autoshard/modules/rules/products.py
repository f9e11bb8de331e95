"""Rules of products: of matrices, of rows with the matrices of their groups, of queries with keys."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's users call it)

from autoshard.errors import InputError
from autoshard.modules.dims import Position, factors, fresh, size_of
from autoshard.modules.nodes import Node, argument, is_repeated, line_of, tensors_of
from autoshard.modules.program import Reading, TensorPlace, View
from autoshard.modules.rules.reader import Reader
from autoshard.modules.rules.unknown import unknown

_GROUPED = {  # by the ranks of the operands: the names of their axes and of the result's, and the axis that has groups
    (2, 3): (("row", "inner"), ("group", "inner", "column"), ("row", "column"), "row"),
    (3, 2): (("group", "row", "inner"), ("inner", "column"), ("row", "column"), "column"),
    (2, 2): (("row", "inner"), ("inner", "column"), ("group", "row", "column"), "inner"),
}
_ALIGNED_BYTES = 16  # lengths of rows that kernels of grouped products take; source: torch 2.13, GroupedMMUtils.h
_BY_ROW = torch.contiguous_format


def linear(reader: Reader, node: Node) -> None:
    """Multiply by a weight [out, in], and add a bias."""
    x, weight, *bias = reader.readings(node)
    if len(weight.positions) != 2:
        unknown(reader, node)
        return
    x.agree(-1, weight.positions[1])
    positions = [*x.positions[:-1], weight.positions[0]]
    if not bias:
        reader.step(node, ([x, weight], positions), sort="product")
        return
    product = reader.step(node, ([x, weight], positions), sort="product", name=f"{node.name}_product", arguments=())
    bias[0].agree(0, positions[-1])
    total, shift = Reading(product, list(positions)), _in_format(reader, node, bias[0], node.args[2])
    reader.local(node, ([total, shift], positions), function=torch.add, arguments=(TensorPlace(0), TensorPlace(1)))


def addmm(reader: Reader, node: Node) -> None:
    """Multiply matrices, or batches of them, and add the first argument; each of both has a factor."""
    batch = ["batch"] if node.meta["val"].dim() > 2 else []
    names = [*batch, "row", "inner"], [*batch, "inner", "column"], [*batch, "row", "column"]
    product = _product(reader, node, node.args[1:3], names, f"{node.name}_product")
    if product is None:
        return
    positions, shift = list(product.positions), reader.readings(node)[0]
    for axis in range(-len(shift.positions), 0):
        if shift.positions[axis]:
            shift.agree(axis, positions[axis])
    shift = _in_format(reader, node, shift, node.args[0])
    factors = [node.kwargs.get(name, 1) for name in ("alpha", "beta")]
    function = torch.add if factors == [1, 1] else functools.partial(_weighted, factors=tuple(factors))
    reader.local(
        node,
        ([Reading(product, positions), shift], positions),
        function=function,
        arguments=(TensorPlace(0), TensorPlace(1)),
    )


def _weighted(product: torch.Tensor, shift: torch.Tensor, *, factors: tuple[float, float]) -> torch.Tensor:
    return factors[0] * product + factors[1] * shift


def _in_format(reader: Reader, node: Node, bias: Reading, source: Node) -> Reading:
    """Return a bias as a product under autocast adds it."""
    return reader.formatted(node, bias, source.meta["val"].dtype, f"{node.name}_bias")


def matmul(reader: Reader, node: Node) -> None:
    """Multiply matrices, or a vector; what stands before the last two axes goes along."""
    shapes = [operand.meta["val"].dim() for operand in node.args[:2]]
    rank = max(*shapes, 2)
    batch = [f"batch {axis}" for axis in range(-rank, -2)]
    first_names = [*batch[rank - shapes[0] :], "row", "inner"] if shapes[0] > 1 else ["inner"]
    second_names = [*batch[rank - shapes[1] :], "inner", "column"] if shapes[1] > 1 else ["inner"]
    result = [*batch, *(["row"] if shapes[0] > 1 else []), *(["column"] if shapes[1] > 1 else [])]
    _product(reader, node, node.args[:2], (first_names, second_names, result))


def einsum(reader: Reader, node: Node) -> None:
    """Multiply two tensors as an equation says, where each letter stands in two of the three."""
    equation, operands = node.args[0].replace(" ", ""), node.args[1]
    operand_text, arrow, result = equation.partition("->")
    letters = [list(text) for text in operand_text.split(",")]
    plain = arrow and len(operands) == 2 and "." not in equation and len(node.args) == 2
    counts = Counter("".join(["".join({*names}) for names in letters] + [result]))
    if not plain or min(counts.values()) < 2 or any(len({*names}) < len(names) for names in letters):
        unknown(reader, node)
        return
    _product(reader, node, operands, (*letters, list(result)))


def _product(
    reader: Reader, node: Node, operands: Sequence[Node], names: Sequence[Sequence[str]], called: str = ""
) -> View | None:
    """Multiply two tensors whose axes have names; what the result lacks is summed. None where both are one tensor."""
    first, second, positions = _paired(reader, operands, names)
    if first.view.value is second.view.value and not second.renamed:
        reader.whole(node)
        return None
    result_positions = [positions[name] for name in names[2]]
    return reader.step(
        node, ([first, second], result_positions), sort="product", name=called, arguments=() if called else None
    )


def _paired(
    reader: Reader, operands: Sequence[Node], names: Sequence[Sequence[str]]
) -> tuple[Reading, Reading, Mapping[str, Position]]:
    """Return how a product reads two tensors whose axes have names, and the position of each name."""
    first, second = (Reading(view, list(view.positions)) for view in map(reader.view_of, operands))
    positions = dict(zip(names[0], first.positions, strict=True))
    for axis, name in enumerate(names[1]):
        if name in positions and positions[name] and second.positions[axis]:
            second.agree(axis, positions[name])
    first_dims = factors(dim for position in positions.values() for dim in position)
    for axis, name in enumerate(names[1]):
        if name not in positions and {*first_dims} & {*factors(second.positions[axis])}:
            second.rename(axis)
        positions[name] = positions.get(name) or second.positions[axis]
    return first, second, positions


def grouped(reader: Reader, node: Node) -> None:
    """Multiply rows, columns or inner numbers by the matrices of their groups, which offsets tell apart.

    Offsets count all that has groups, so that this axis and the groups are needed whole.
    """
    *operands, offsets = tensors_of((node.args, node.kwargs))
    if len(operands) < 2:  # without offsets each matrix is a group; or else one tensor is both operands
        matmul(reader, node) if argument(node, "offs") is None else reader.whole(node)
        return
    *names, along = _GROUPED[operands[0].meta["val"].dim(), operands[1].meta["val"].dim()]
    first, second, positions = _paired(reader, operands, names)
    bounds = Reading(reader.view_of(offsets), list(reader.view_of(offsets).positions))
    if "group" in positions:
        bounds.agree(0, positions["group"])
    positions = {"group": bounds.positions[0], **positions}
    if first.view.value is second.view.value and not second.renamed:
        reader.whole(node)
        return
    is_torch = node.target.namespace == "aten"
    reader.step(
        node,
        ([first, second, bounds], [positions[name] for name in names[2]]),
        whole=[positions["group"], positions[along]],
        summed=[] if along == "inner" else [positions["inner"]],
        sort="local" if along == "inner" else "sum",
        products=[[positions[name] for name in ("row", "inner", "column")]],
        function=aligned_product if is_torch else None,
        arguments=(TensorPlace(0), TensorPlace(1), TensorPlace(2)) if is_torch else None,
    )


def aligned_product(first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply by groups, with zeros beside parts whose rows kernels do not take.

    >>> x, weights, offsets = torch.ones(3, 5), torch.ones(2, 5, 7), torch.tensor([1, 3], dtype=torch.int32)
    >>> aligned_product(x, weights, offsets).sum()
    tensor(105.)
    """
    multiple = _ALIGNED_BYTES // first.element_size()
    inner, columns = -first.shape[-1] % multiple, second.shape[-1]
    kernel, beside = torch.ops.aten._grouped_mm, -columns % multiple
    result = kernel(_aligned(first, (0, inner), multiple), _aligned(second, (0, beside, 0, inner), multiple), offsets)
    return result.flatten().view(result.shape)[..., :columns]  # so that the gradient comes back side by side in memory


def _aligned(matrices: torch.Tensor, zeros: Sequence[int], multiple: int) -> torch.Tensor:
    """Return matrices with zeros beside them of which each row, or column, begins at a multiple of numbers."""
    if any(zeros):
        return F.pad(matrices, zeros)
    by_column = matrices.mT.is_contiguous() and matrices.shape[-2] % multiple == 0
    begins = matrices.storage_offset() % multiple == 0
    return matrices if begins and (by_column or matrices.is_contiguous()) else matrices.clone(memory_format=_BY_ROW)


def attention(reader: Reader, node: Node) -> None:
    """Attend: batch and heads may be cut; keys are needed whole, and queries where a mask counts them."""
    stated = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    stated |= node.kwargs
    if stated.get("dropout_p"):
        raise InputError.of(line_of(node), "attention draws random numbers; call .eval()")
    ranks = {stated[name].meta["val"].dim() for name in ("query", "key", "value")}
    if is_repeated(node) or len(ranks) > 1:
        reader.whole(node)
        return
    query, key, value, *mask = reader.readings(node)
    rank = len(query.positions)
    for axis in range(rank - 3):
        key.agree(axis, query.positions[axis])
        value.agree(axis, query.positions[axis])
    if rank > 2:
        groups = size_of(query.positions[-3]) // size_of(key.positions[-3])
        query.agree(rank - 3, (*key.positions[-3], *fresh(groups, "group")))
        value.agree(rank - 3, key.positions[-3])
    key.agree(rank - 1, query.positions[-1])
    if {*factors(query.positions[-2])} & {*factors(key.positions[-2])}:
        key.rename(rank - 2)
    value.agree(rank - 2, key.positions[-2])
    positions = [*query.positions[:-1], value.positions[-1]]
    if {*factors(value.positions[-1])} & {*factors(dim for p in query.positions for dim in p)}:
        value.rename(rank - 1)
        positions[-1] = value.positions[-1]
    for mask_reading in mask:
        along = [*query.positions[:-1], key.positions[-2]]
        for axis in range(-len(mask_reading.positions), 0):
            if mask_reading.positions[axis]:
                mask_reading.agree(axis, along[axis])
    whole = [query.positions[-1], key.positions[-2], value.positions[-1]]
    whole += [query.positions[-2]] if stated.get("is_causal") else []
    pairs = [*query.positions[:-1], key.positions[-2]]
    products = [[*pairs, query.positions[-1]], [*pairs, value.positions[-1]]]
    reader.local(node, ([query, key, value, *mask], positions), whole, products=products)
