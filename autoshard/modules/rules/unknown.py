"""Operations without a rule of their own: what may be cut of them is found by running them on parts."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autoshard.modules.dims import Position, factors, fresh, note
from autoshard.modules.nodes import Node, fill_slots, replaced, tensors_of
from autoshard.modules.probing import PartCut, found_cuts
from autoshard.modules.program import Reading, TensorPlace, View
from autoshard.modules.rules.reader import Reader


def unknown(reader: Reader, node: Node) -> None:
    """Cut what probing finds, and keep the rest whole; what is not torch's own is kept whole.

    Torch's operations take the same way for all numbers. A user's own may do so only for the numbers of a probe.
    """
    cuts = probed(node) if node.target.namespace == "aten" else ()
    if not cuts:
        reader.whole(node)
        return
    value = node.meta["val"]
    is_one, views = isinstance(value, torch.Tensor), list[View]()
    for number, result in enumerate([value] if is_one else value):
        readings = reader.readings(node)
        positions, summed = [fresh(size) for size in result.shape], []
        cut_axes, read_axes = (
            {cut.results[number] for cut in cuts},
            [{cut.inputs[i] for cut in cuts} for i in range(len(readings))],
        )
        cut_positions = list[Position]()
        for cut in cuts:
            reads = [(reading, axis) for reading, axis in zip(readings, cut.inputs, strict=True) if axis is not None]
            first, at = reads[0]
            cut_positions.append(_together(reads, cut_positions))
            if (place := cut.results[number]) is None:
                summed.append(first.positions[at])
            else:
                positions[place] = first.positions[at]
        note(next(reader.numbers), cut_positions)  # so that no two of them become one
        whole = [position for axis, position in enumerate(positions) if axis not in cut_axes]
        for reading, axes in zip(readings, read_axes, strict=True):
            whole += [position for axis, position in enumerate(reading.positions) if axis not in axes]
        views.append(
            reader.step(
                node,
                (readings, positions),
                whole=whole,
                summed=summed,
                sort="sum" if summed else "local",
                number=None if is_one else number,
            )
        )
    reader.views[node] = views[0] if is_one else tuple(views)


def _together(reads: Sequence[tuple[Reading, int]], earlier: Sequence[Position]) -> Position:
    """Make the axes of one cut agree, and read those under other names that an earlier cut has."""
    used = {*factors(dim for position in earlier for dim in position)}
    for reading, axis in reads:
        if used & {*factors(reading.positions[axis])}:
            reading.rename(axis)
    first, at = reads[0]
    for reading, axis in reads[1:]:
        reading.agree(axis, first.positions[at])
    return first.positions[at]


def probed(node: Node) -> tuple[PartCut, ...]:
    """Return the cuts of a node that probing finds."""
    sources = tensors_of((node.args, node.kwargs))
    slots = {source: TensorPlace(number) for number, source in enumerate(sources)}
    arguments: Any = replaced((node.args, node.kwargs), slots)

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        keywords = {key: fill_slots(argument, tensors) for key, argument in arguments[1].items()}
        results = node.target(*(fill_slots(argument, tensors) for argument in arguments[0]), **keywords)
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    value = node.meta["val"]
    results = [value] if isinstance(value, torch.Tensor) else value
    return found_cuts(run, [source.meta["val"] for source in sources], results, tuple(_integers(arguments)))


def _integers(arguments: Any) -> Iterator[int]:
    if isinstance(arguments, int) and not isinstance(arguments, bool):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _integers(argument)
    elif isinstance(arguments, dict):
        for argument in arguments.values():
            yield from _integers(argument)
