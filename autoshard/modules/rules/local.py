"""The rule of functions that the user marks (`autoshard.local`): their text says what may be cut, and is checked."""

import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.errors import InputError
from autoshard.modules.dims import Position, factors, fresh, note
from autoshard.modules.local import OF_TORCH, LocalDims
from autoshard.modules.nodes import Node, line_of
from autoshard.modules.probing import LARGEST, PartCut, ProbeRun, random_like
from autoshard.modules.program import Reading, TensorPlace, View
from autoshard.modules.rules.reader import Reader

_LENGTHS = ((6, 2), (7, 3))  # in a probe: of the first dim that may be cut, and steps to the next ones
_SMALL = 16  # other dims are no longer, where a probe in their own lengths would be too large
_LINES = 30_000  # of Python, after which a function has no end on these numbers; derived: a tenth of a second
_ROUNDING = 1e-3  # of the largest number: a function may round to 16 bits inside


def local(reader: Reader, node: Node) -> None:
    """Cut the dims that the text names, and sum parts of a result that lacks them; keep the rest whole."""
    dims = LocalDims.of(node.args[1], line_of(node))
    if node.target.namespace != OF_TORCH:  # which do what is said of them
        _refuse_untrue(node, dims)
    if not dims.cut:
        reader.whole(node)
        return
    slots = tuple(TensorPlace(number) for number in range(len(dims.inputs)))
    views: list[View] = []
    for number, names in enumerate(dims.results):
        readings, positions = _read(reader, node, dims)
        result_positions = [positions[name] if name in positions else fresh(int(name)) for name in names]
        whole = [position for name, position in positions.items() if name not in dims.cut]
        whole += [position for name, position in zip(names, result_positions, strict=True) if name not in positions]
        summed = [positions[name] for name in dims.cut if name not in names]
        view = reader.step(
            node, (readings, result_positions), whole=whole, summed=summed, sort="sum" if summed else "local",
            function=functools.partial(_result, function=node.target, number=number), number=number,
            arguments=(slots, node.args[1]),
        )  # fmt: skip
        views.append(view)
    reader.views[node] = tuple(views)


def _read(reader: Reader, node: Node, dims: LocalDims) -> tuple[list[Reading], Mapping[str, Position]]:
    """Return the readings of the tensors, and each name's position; a name that may be cut shares no dim."""
    readings = [Reading(view, list(view.positions)) for view in map(reader.view_of, node.args[0])]
    positions: dict[str, Position] = {}
    for reading, names in zip(readings, dims.inputs, strict=True):
        for axis, name in enumerate(names):
            if name in positions:
                reading.agree(axis, positions[name])
                continue
            axis_leaves = {*factors(reading.positions[axis])}
            other_positions = [
                position for other_name, position in positions.items() if name in dims.cut or other_name in dims.cut
            ]
            if axis_leaves & {*factors(dim for position in other_positions for dim in position)}:
                reading.rename(axis)
            positions[name] = reading.positions[axis]
    note(next(reader.numbers), [positions[name] for name in dims.cut])  # so that they never become one
    return readings, positions


def _result(tensors: Sequence[torch.Tensor], text: str, *, function: Callable[..., Any], number: int) -> torch.Tensor:
    return function(tensors, text)[number]


def _run(node: Node, tensors: Sequence[torch.Tensor], *, refuses: bool) -> tuple[torch.Tensor, ...]:
    """Run the user's function on probe tensors; raise RuntimeError where it fails, or takes too many lines of Python.

    Its InputErrors pass where ``refuses``.
    """
    count, before = itertools.count(), sys.gettrace()

    def counted(*_: Any) -> Any:
        if next(count) > _LINES:
            raise TimeoutError("runs too long")
        return counted

    try:
        sys.settrace(counted)
        return tuple(node.target([*tensors], node.args[1]))
    except Exception as error:
        if refuses and isinstance(error, InputError):
            raise
        raise RuntimeError(str(error)) from error
    finally:
        sys.settrace(before)


def _cut(dims: LocalDims, name: str) -> PartCut:
    """Return the axes that a name stands for."""
    inputs, results = (
        tuple(names.index(name) if name in names else None for names in side) for side in (dims.inputs, dims.results)
    )
    return PartCut(inputs, results)


def _refuse_untrue(node: Node, dims: LocalDims) -> None:
    """Refuse random numbers, and dims that the text names although they cannot be cut.

    What cannot be run on small random inputs on a CPU is believed.
    """
    tensors = [source.meta["val"] for source in node.args[0]]
    lengths, random, title = dims.lengths(tensors), torch.Generator().manual_seed(0), node.target._opname
    for first, step in _LENGTHS:
        small = {name: first + step * place for place, name in enumerate(dims.cut)}
        tried = {**lengths, **small}
        is_too_large = sum(torch.Size(tried[name] for name in names).numel() for names in dims.inputs) > LARGEST
        if is_too_large:
            tried = {name: min(size, _SMALL) for name, size in lengths.items()} | small
        function = functools.partial(_run, node, refuses=not is_too_large)
        for kind in ("normal", "ties"):
            shapes = [[tried[name] for name in names] for names in dims.inputs]
            inputs = [random_like(tensor, shape, kind, random) for tensor, shape in zip(tensors, shapes, strict=True)]
            run = ProbeRun.of(function, inputs, random)
            if run is None or not run.is_finite():
                continue
            pairs = zip(run.results, function(inputs), strict=True)
            if not all(torch.allclose(result, repeat, rtol=_ROUNDING, atol=_ROUNDING) for result, repeat in pairs):
                raise InputError.of(
                    dims.where, f"{title} gives other numbers when it runs again; random ones are refused"
                )
            for name in dims.cut:
                if not replace(run, rounding=_ROUNDING).agrees(_cut(dims, name)):
                    message = (
                        f"{title} promises that parts along {name} give parts of its results and gradients, or of sums"
                    )
                    raise InputError.of(dims.where, f"{message}, and they do not; write _ where it needs {name} whole")
