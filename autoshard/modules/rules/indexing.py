"""Rules of operations that take, put or count rows by number."""

from autoshard.modules.dims import fresh
from autoshard.modules.nodes import Node, argument
from autoshard.modules.program import agreed
from autoshard.modules.rules.reader import Reader


def embedding(reader: Reader, node: Node) -> None:
    """Take rows of a table."""
    table, index = reader.readings(node)
    is_padded = argument(node, "padding_idx") not in (None, -1)  # then the gradient is not just that of the rows
    if is_padded or argument(node, "scale_grad_by_freq") or not table.positions[0]:
        counted = index.positions if argument(node, "scale_grad_by_freq") else []  # how often a row is taken
        made = [*index.positions, table.positions[1]]
        reader.local(node, ([table, index], made), [table.positions[0], *counted])
        return
    reader.step(node, ([table, index], [*index.positions, table.positions[1]]), sort="rows")


def one_hot(reader: Reader, node: Node) -> None:
    """Write each number as a row, which is needed whole."""
    (index,), classes = reader.readings(node), fresh(node.meta["val"].shape[-1])
    reader.local(node, ([index], [*index.positions, classes]), [classes])


def taken(reader: Reader, node: Node) -> None:
    """Take rows along one axis, or along several beside each other, needed whole: by numbers, the same for all else."""
    axes = [argument(node, "dim") % node.args[0].meta["val"].dim()] if node.target._opname == "index_select" else []
    if not axes:
        given = {place: one for place, one in enumerate(node.args[1]) if one is not None}
        axes, numbers = [*given], [one.meta["val"] for one in given.values()]
        is_mask = any(one.dtype.is_floating_point or one.element_size() < 4 for one in numbers)
        apart = axes != [*range(axes[0], axes[-1] + 1)]
        if is_mask or apart or len({*given.values()}) < len(given):
            reader.whole(node)
            return
    x, *index = reader.readings(node)
    rank = max(len(one.positions) for one in index)
    made = [*x.positions[: axes[0]], *agreed(index, rank, range(rank)), *x.positions[axes[-1] + 1 :]]
    reader.local(node, ([x, *index], made), [x.positions[axis] for axis in axes])


def along(reader: Reader, node: Node) -> None:
    """Take or put numbers along one axis, which is needed whole where they are taken from or put.

    The numbers of the places differ for all else.
    """
    x, *others = reader.readings(node)
    axis = argument(node, "dim") % len(x.positions)
    puts = node.target._opname.startswith("scatter")
    made = list(x.positions if puts else others[0].positions)
    for one in others:
        for place in range(len(x.positions)):
            if place == axis:
                continue
            if reader.shape_of(one)[place] != reader.shape_of(x)[place]:
                reader.whole(node)
                return
            one.agree(place, x.positions[place])
            made[place] = x.positions[place]
    reader.local(node, ([x, *others], made), [one.positions[axis] for one in ((x, *others) if puts else (x,))])


def put_part(reader: Reader, node: Node) -> None:
    """Put a tensor in the place of a part of another along one axis, which is needed whole."""
    x, part = reader.readings(node)
    axis = argument(node, "dim") % len(x.positions)
    made, own = list(x.positions), list(x.positions)
    if node.target._opname == "select_scatter":
        del own[axis]
    else:
        own[axis] = part.positions[axis]
    for place, one in enumerate(own):
        if one and part.positions[place]:
            part.agree(place, one)
    reader.local(node, ([x, part], made), [made[axis], *([own[axis]] if len(own) == len(made) else [])])


def put(reader: Reader, node: Node) -> None:
    """Add rows to those of some numbers along one axis, which is needed whole."""
    x, index, rows = reader.readings(node)
    axis = argument(node, "dim") % len(x.positions)
    index.agree(0, rows.positions[axis])
    for place in range(len(x.positions)):
        if place != axis and rows.positions[place]:
            rows.agree(place, x.positions[place])
    reader.local(node, ([x, index, rows], x.positions), [x.positions[axis], rows.positions[axis]])
