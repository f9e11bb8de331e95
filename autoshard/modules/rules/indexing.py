"""Rules of operations that take, put or count rows by number."""

from autoshard.modules.dims import factors, fresh, note
from autoshard.modules.nodes import Node, argument
from autoshard.modules.program import agreed
from autoshard.modules.rules.reader import Reader
from autoshard.modules.rules.unknown import unknown


def embedding(reader: Reader, node: Node) -> None:
    """Take rows of a table."""
    table, index = reader.readings(node)
    is_padded = argument(node, "padding_idx") not in (None, -1)  # then the gradient is not just that of the rows
    if is_padded or argument(node, "scale_grad_by_freq") or not table.positions[0]:
        counted = index.positions if argument(node, "scale_grad_by_freq") else []  # how often a row is taken
        positions = [*index.positions, table.positions[1]]
        reader.local(node, ([table, index], positions), [table.positions[0], *counted])
        return
    index_dims = factors(dim for position in index.positions for dim in position)
    if {*index_dims} & {*factors(table.positions[0])}:
        table.rename(0)
    note(next(reader.numbers), [table.positions[0], *index.positions])  # a cut of both would look up some rows by some
    reader.step(node, ([table, index], [*index.positions, table.positions[1]]), sort="rows")


def one_hot(reader: Reader, node: Node) -> None:
    """Write each number as a row, which is needed whole."""
    (index,), classes = reader.readings(node), fresh(node.meta["val"].shape[-1])
    reader.local(node, ([index], [*index.positions, classes]), [classes])


def take_rows(reader: Reader, node: Node) -> None:
    """Take rows by number along one axis, or along several neighbouring axes; these are needed whole."""
    axes = [argument(node, "dim") % node.args[0].meta["val"].dim()] if node.target._opname == "index_select" else []
    if not axes:
        indices = {place: index for place, index in enumerate(node.args[1]) if index is not None}
        axes, numbers = [*indices], [index.meta["val"] for index in indices.values()]
        is_mask = any(tensor.dtype.is_floating_point or tensor.element_size() < 4 for tensor in numbers)
        is_split = axes != [*range(axes[0], axes[-1] + 1)]
        if is_mask or is_split or len({*indices.values()}) < len(indices):
            reader.whole(node)
            return
    x, *index = reader.readings(node)
    rank = max(len(reading.positions) for reading in index)
    positions = [*x.positions[: axes[0]], *agreed(index, rank, range(rank)), *x.positions[axes[-1] + 1 :]]
    reader.local(node, ([x, *index], positions), [x.positions[axis] for axis in axes])


def along(reader: Reader, node: Node) -> None:
    """Take or put numbers along one axis, by an index of the same rank.

    The axis is needed whole of the tensor from which numbers are taken, and of all tensors where numbers are put.
    """
    x, *readings = reader.readings(node)
    axis = argument(node, "dim") % len(x.positions)
    puts = node.target._opname.startswith("scatter")
    positions = list(x.positions if puts else readings[0].positions)
    for reading in readings:
        for place in range(len(x.positions)):
            if place == axis:
                continue
            if reader.shape_of(reading)[place] != reader.shape_of(x)[place]:
                reader.whole(node)
                return
            reading.agree(place, x.positions[place])
            positions[place] = x.positions[place]
    reader.local(
        node, ([x, *readings], positions), [reading.positions[axis] for reading in ((x, *readings) if puts else (x,))]
    )


def put_part(reader: Reader, node: Node) -> None:
    """Put a tensor in the place of a part of another along one axis, which is needed whole."""
    x, part = reader.readings(node)
    axis = argument(node, "dim") % len(x.positions)
    positions, part_positions = list(x.positions), list(x.positions)
    if node.target._opname == "select_scatter":
        del part_positions[axis]
    else:
        part_positions[axis] = part.positions[axis]
    for place, position in enumerate(part_positions):
        if position and part.positions[place]:
            part.agree(place, position)
    reader.local(
        node,
        ([x, part], positions),
        [positions[axis], *([part_positions[axis]] if len(part_positions) == len(positions) else [])],
    )


def put(reader: Reader, node: Node) -> None:
    """Add rows to the rows of these numbers along one axis, or put them there; the axis is needed whole."""
    if node.target._opname == "index_put" and not _puts_rows(node):
        unknown(reader, node)
        return
    x, index, rows = reader.readings(node)
    axis = (argument(node, "dim") or 0) % len(x.positions)
    index.agree(0, rows.positions[axis])
    for place in range(len(x.positions)):
        if place != axis and rows.positions[place]:
            rows.agree(place, x.positions[place])
    reader.local(node, ([x, index, rows], x.positions), [x.positions[axis], rows.positions[axis]])


def _puts_rows(node: Node) -> bool:
    """Say whether it puts different tensors together: a row for each of several numbers along the first axis."""
    x, indices, rows = node.args[:3]
    index = indices[0].meta["val"] if len(indices) == 1 else None
    return (
        index is not None and index.dim() == 1 and index.element_size() >= 4 and len({x, *indices, rows}) == 3
        and rows.meta["val"].shape == (*index.shape, *x.meta["val"].shape[1:])
    )  # fmt: skip
