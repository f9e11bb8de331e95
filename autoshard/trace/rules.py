"""What operations of torch do to dims: which positions they read alike, which they make, and which they need whole."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's users call it)

from autoshard.errors import InputError
from autoshard.trace.dims import Collision, NotAligned, fresh, leaves, size_of, unify
from autoshard.trace.nodes import Node, argument, axes_of, line_of
from autoshard.trace.program import Reading, TensorPlace, View, agreed
from autoshard.trace.region import expand

if TYPE_CHECKING:
    from autoshard.trace.capture import ProgramReader

OVER = (  # a dim, or several, of the first input, which are needed whole
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp", "softmax", "log_softmax", "cumsum",
    "cumprod", "norm", "linalg_vector_norm", "flip", "roll", "argmax", "argmin", "glu",
)  # fmt: skip


def over(reader: "ProgramReader", node: Node) -> None:
    """Read an operation over some axes, which it needs whole; it keeps them, or drops them."""
    readings = reader.readings(node)
    if len(readings) > 1 or not isinstance(node.meta["val"], torch.Tensor):
        reader.whole(node)
        return
    (reading,), axes, shape = readings, axes_of(node), node.meta["val"].shape
    whole = [reading.positions[axis] for axis in axes]
    if len(shape) == len(reading.positions):  # a softmax, or kept as axes of size 1
        made = [() if size == 1 else one for one, size in zip(reading.positions, shape, strict=True)]
        made = [one if size == size_of(one) else fresh(size) for one, size in zip(made, shape, strict=True)]
        whole += [made[axis] for axis in axes]
    else:
        made = [one for axis, one in enumerate(reading.positions) if axis not in axes]
    reader.local(node, ([reading], made), whole)


def _reshape(reader: "ProgramReader", node: Node) -> None:
    """Group the dims otherwise; where the new positions are not made of the same dims, everything is kept whole."""
    view = reader.view_of(node.args[0])
    made = tuple(fresh(size) for size in node.meta["val"].shape)
    try:
        unify(tuple(one for position in view.positions for one in position), tuple(one for p in made for one in p))
    except (NotAligned, Collision):
        reader.whole(node)
        return
    reader.views[node] = View(view.value, made)


def _moved(reader: "ProgramReader", node: Node) -> None:
    """Put positions into another order: a transpose, or a permutation."""
    view = reader.view_of(node.args[0])
    order = list(range(len(view.positions)))
    name = node.target._opname
    if name == "permute":
        order = [axis % len(order) for axis in node.args[1]]
    else:
        a, b = (0, -1) if name in ("t", "numpy_T") else (node.args[1], node.args[2])
        a, b = a % len(order), b % len(order)
        order[a], order[b] = order[b], order[a]
    reader.views[node] = View(view.value, tuple(view.positions[axis] for axis in order))


def _squeezed(reader: "ProgramReader", node: Node) -> None:
    """Add or drop positions of size 1: those that are left keep their order."""
    view = reader.view_of(node.args[0])
    real = iter([one for one in view.positions if one])
    made = tuple(() if size == 1 else next(real) for size in node.meta["val"].shape)
    reader.views[node] = View(view.value, made)


def _expanded(reader: "ProgramReader", node: Node) -> None:
    """Repeat along new positions, and along those of size 1."""
    (reading,) = reader.readings(node)
    shape = node.meta["val"].shape
    old = [(), *[()] * (len(shape) - len(reading.positions)), *reading.positions][1:]
    made = [fresh(size) if size > 1 and not one else one for one, size in zip(old, shape, strict=True)]
    if made == list(reading.positions):
        reader.views[node] = reading.view
        return
    reader.local(node, ([reading], made), function=expand, arguments=(TensorPlace(0),))


def _sliced(reader: "ProgramReader", node: Node) -> None:
    """Take a part of one axis, or one place of it, which needs it whole."""
    (reading,) = reader.readings(node)
    (axis,) = axes_of(node)
    shape, whole = node.meta["val"].shape, reading.positions[axis]
    if tuple(shape) == tuple(node.args[0].meta["val"].shape):
        reader.views[node] = reading.view
        return
    rest = reading.positions[:axis], reading.positions[axis + 1 :]
    if len(shape) < len(reading.positions):  # one place
        reader.local(node, ([reading], [*rest[0], *rest[1]]), [whole])
        return
    start, length, size = (node.args[2] or 0) if len(node.args) > 2 else 0, shape[axis], size_of(whole)
    steps = node.args[4] if len(node.args) > 4 else 1
    if reader.is_product(reading, axis) and length and not (size % length or start % length) and steps == 1:
        parts, part = fresh(size // length), fresh(length)  # as queries, keys and values lie in one product
        try:
            unify(whole, (*parts, *part))
        except (NotAligned, Collision):
            pass
        else:
            reading.positions = [*rest[0], parts, part, *rest[1]]
            chosen = (TensorPlace(0), axis, start // length)
            reader.local(
                node, ([reading], [*rest[0], part, *rest[1]]), [parts], function=torch.select, arguments=chosen
            )
            return
    made = fresh(length)
    reader.local(node, ([reading], [*rest[0], made, *rest[1]]), [whole, made])


def _parted(reader: "ProgramReader", node: Node) -> None:
    """Split an axis into equal parts: its dims become (part, rest), and each result takes one part."""
    view = reader.view_of(node.args[0])
    results = node.meta["val"]
    axis = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(view.positions)
    if node.target._opname == "unbind":
        axis = (node.args[1] if len(node.args) > 1 else 0) % len(view.positions)
        parts, rest = view.positions[axis], ()
    else:
        if len({tuple(one.shape) for one in results}) > 1:
            raise InputError.of(line_of(node), "splits an axis into parts of several sizes, which is not supported yet")
        parts, rest = fresh(len(results)), fresh(results[0].shape[axis])
        try:
            unify(view.positions[axis], (*parts, *rest))
        except (NotAligned, Collision):
            raise InputError.of(line_of(node), "splits an axis across the dims that it is made of") from None
    positions = (*view.positions[:axis], parts, rest, *view.positions[axis + 1 :])
    found: list[View] = []
    for number, _ in enumerate(results):
        reading = Reading(view, list(positions))
        made = [one for place, one in enumerate(positions) if place != axis]
        if node.target._opname == "unbind":
            reading.positions, made = list(view.positions), [one for p, one in enumerate(view.positions) if p != axis]
        chosen = reader.step(
            node, ([reading], made), whole=[parts], function=torch.select, arguments=(TensorPlace(0), axis, number),
            name=f"{node.name}_{number}",
        )  # fmt: skip
        found.append(chosen)
    reader.views[node] = tuple(found)


def _joined(reader: "ProgramReader", node: Node) -> None:
    """Put tensors one after the other along an axis, which needs it whole; or along a new one."""
    readings = reader.readings(node)
    shape = node.meta["val"].shape
    axis = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
    is_new = node.target._opname == "stack"
    first, *others = readings
    for other in others:
        for place in range(len(other.positions)):
            if (is_new or place != axis) and other.positions[place]:
                other.agree(place, first.positions[place])
    whole = [] if is_new else [one.positions[axis] for one in readings]
    made = [*first.positions[:axis], fresh(shape[axis]), *first.positions[axis + (not is_new) :]]
    reader.local(node, (readings, made), [*whole, made[axis]])


def _linear(reader: "ProgramReader", node: Node) -> None:
    """Multiply by a weight [out, in], and add a bias."""
    x, weight, *bias = reader.readings(node)
    x.agree(-1, weight.positions[1])
    made = [*x.positions[:-1], weight.positions[0]]
    if not bias:
        reader.step(node, ([x, weight], made), sort="product")
        return
    product = reader.step(node, ([x, weight], made), sort="product", name=f"{node.name}_product", arguments=())
    total, shift = Reading(product, list(made)), bias[0]
    shift.agree(0, made[-1])
    reader.local(node, ([total, shift], made), function=torch.add, arguments=(TensorPlace(0), TensorPlace(1)))


def _addmm(reader: "ProgramReader", node: Node) -> None:
    """Multiply by a weight [in, out], and add a bias."""
    if node.kwargs:
        reader.whole(node)
        return
    shift, x, weight = reader.readings(node)
    weight.agree(0, x.positions[1])
    made = [x.positions[0], weight.positions[1]]
    product = reader.step(node, ([x, weight], made), sort="product", name=f"{node.name}_product", arguments=())
    for axis in range(-len(shift.positions), 0):
        if shift.positions[axis]:
            shift.agree(axis, made[axis])
    reader.local(
        node,
        ([Reading(product, list(made)), shift], made),
        function=torch.add,
        arguments=(TensorPlace(0), TensorPlace(1)),
    )


def _cross_entropy(reader: "ProgramReader", node: Node) -> None:
    """Take the loss of every token, which needs all classes; then join these numbers, which are few."""
    logits, target, *weights = reader.readings(node)
    if weights or len(logits.positions) != 2 or len(target.positions) != 1:
        reader.whole(node)
        return
    target.agree(0, logits.positions[0])
    given = dict(
        zip(("input", "target", "weight", "reduction", "ignore_index", "label_smoothing"), node.args, strict=False)
    )
    given |= node.kwargs
    ignored, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    each = functools.partial(F.cross_entropy, reduction="none", ignore_index=ignored, label_smoothing=smoothing)
    reduction, count = given.get("reduction", 1), [logits.positions[0]]
    tokens = reader.step(
        node, ([logits, target], count), whole=[logits.positions[1]], name=f"{node.name}_tokens",
        function=each, arguments=(TensorPlace(0), TensorPlace(1)),
    )  # fmt: skip
    if reduction == 0:
        return
    joined = functools.partial(_joined_loss, ignore_index=ignored, mean=reduction == 1)
    again = Reading(target.view, list(target.positions), dict(target.renamed))
    readings = [Reading(tokens, list(count)), again]
    reader.step(node, (readings, []), whole=count, function=joined, arguments=(TensorPlace(0), TensorPlace(1)))


def _joined_loss(losses: torch.Tensor, target: torch.Tensor, *, ignore_index: int, mean: bool) -> torch.Tensor:
    """Return the sum of the losses of tokens, or their mean over those that count."""
    return losses.sum() / (target != ignore_index).sum() if mean else losses.sum()


def _matmul(reader: "ProgramReader", node: Node) -> None:
    """Multiply matrices; what stands before the last two axes goes along."""
    left, right = reader.readings(node) if node.args[0] is not node.args[1] else [*reader.readings(node)] * 2
    if min(len(left.positions), len(right.positions)) < 2 or left is right:
        reader.whole(node)
        return
    right.agree(len(right.positions) - 2, left.positions[-1])
    rank = len(node.meta["val"].shape)
    made = agreed((left, right), rank, range(rank - 2))
    others = leaves(one for position in (*made, left.positions[-2], left.positions[-1]) for one in position)
    if {*others} & {*leaves(right.positions[-1])}:
        right.rename(len(right.positions) - 1)
    reader.step(node, ([left, right], [*made, left.positions[-2], right.positions[-1]]), sort="product")


def _embedding(reader: "ProgramReader", node: Node) -> None:
    """Take rows of a table."""
    table, index = reader.readings(node)
    if argument(node, "padding_idx") not in (None, -1) or argument(node, "scale_grad_by_freq"):
        made = [*index.positions, table.positions[1]]  # whose gradient is not just that of the rows
        reader.local(node, ([table, index], made), [table.positions[0]])
        return
    reader.step(node, ([table, index], [*index.positions, table.positions[1]]), sort="rows")


def _layer_norm(reader: "ProgramReader", node: Node) -> None:
    """Normalise the last axes, which need to be whole; scale and shift have just these."""
    x, *weights = reader.readings(node)
    count = len(node.args[1])
    for weight in weights:
        for axis in range(-count, 0):
            weight.agree(axis, x.positions[axis])
    reader.local(node, ([x, *weights], x.positions), x.positions[-count:])


def _attention(reader: "ProgramReader", node: Node) -> None:
    """Attend: batch and heads may be cut; keys are needed whole, and queries where a mask counts them."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    given |= node.kwargs
    if given.get("dropout_p"):
        raise InputError.of(line_of(node), "attention draws random numbers; call .eval()")
    query, key, value, *mask = reader.readings(node)
    rank = len(query.positions)
    for axis in range(rank - 3):
        key.agree(axis, query.positions[axis])
        value.agree(axis, query.positions[axis])
    if rank > 2:
        groups = size_of(query.positions[-3]) // size_of(key.positions[-3])
        unify(query.positions[-3], (*key.positions[-3], *fresh(groups, "group")))
        value.agree(rank - 3, key.positions[-3])
    key.agree(rank - 1, query.positions[-1])
    if {*leaves(query.positions[-2])} & {*leaves(key.positions[-2])}:
        key.rename(rank - 2)
    value.agree(rank - 2, key.positions[-2])
    made = [*query.positions[:-1], value.positions[-1]]
    if {*leaves(value.positions[-1])} & {*leaves(one for p in query.positions for one in p)}:
        value.rename(rank - 1)
        made[-1] = value.positions[-1]
    for one in mask:
        along = [*query.positions[:-1], key.positions[-2]]
        for axis in range(-len(one.positions), 0):
            if one.positions[axis]:
                one.agree(axis, along[axis])
    whole = [query.positions[-1], key.positions[-2], value.positions[-1]]
    whole += [query.positions[-2]] if given.get("is_causal") else []
    matrix = [*query.positions, key.positions[-2]]
    reader.local(node, ([query, key, value, *mask], made), whole, matrix=matrix)


def _convolution(reader: "ProgramReader", node: Node) -> None:
    """Convolve: the batch and the channels that are made may be cut, unless channels come in groups."""
    x, weight, *bias = reader.readings(node)
    shape, groups = node.meta["val"].shape, node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    made = [x.positions[0], weight.positions[0], *(fresh(size) for size in shape[2:])]
    whole = [*x.positions[1:], *made[2:], *weight.positions[2:]]
    if groups == 1:
        weight.agree(1, x.positions[1])
    else:
        whole += [*weight.positions, made[1]]
    for one in bias:
        one.agree(0, weight.positions[0])
    reader.local(node, ([x, weight, *bias], made), whole, matrix=[*made, *weight.positions[1:]])


def _batch_norm(reader: "ProgramReader", node: Node) -> None:
    """Keep the norm whole; refuse to lose the running statistics that training changes."""
    if argument(node, "training") and argument(node, "running_mean") is not None:
        raise InputError.of(line_of(node), "batch norm in training changes its running statistics in place")
    reader.whole(node)


RULES: Mapping[str, Callable[["ProgramReader", Node], None]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T"), _moved),
    **dict.fromkeys(("unsqueeze", "squeeze"), _squeezed),
    **dict.fromkeys(("expand", "expand_as"), _expanded),
    **dict.fromkeys(("slice", "select", "narrow"), _sliced),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind"), _parted),
    **dict.fromkeys(("cat", "stack"), _joined),
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "addmm": _addmm,
    "batch_norm": _batch_norm,
    "cross_entropy_loss": _cross_entropy,
    "embedding": _embedding,
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
}
