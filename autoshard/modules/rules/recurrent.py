"""Rules of recurrent nets, whose steps need the whole state before."""

from autoshard.modules.dims import factors, fresh
from autoshard.modules.nodes import Node, argument, tensors_of
from autoshard.modules.program import View
from autoshard.modules.rules.reader import Reader


def recurrent(reader: Reader, node: Node) -> None:
    """Read a net over time, of which the batch alone may be cut."""
    if node.target._overloadname == "data":  # sequences of several lengths, one after the other
        reader.whole(node)
        return
    states = tensors_of(node.args[1])  # one of them may be both the first state and the first cell
    axis, views = 0 if argument(node, "batch_first") else 1, list[View]()
    for number, value in enumerate(node.meta["val"]):
        x, *operands = reader.readings(node)
        batch = x.positions[axis]
        for state in operands[: len(states)]:
            state.agree(1, batch)
        positions = [fresh(size) for size in value.shape]
        positions[axis if number == 0 else 1] = batch
        all_positions = [position for reading in (x, *operands) for position in reading.positions] + positions
        whole = [position for position in all_positions if factors(position) != factors(batch)]
        views.append(reader.step(node, ([x, *operands], positions), whole=whole, number=number))
    reader.views[node] = tuple(views)
