"""Equal submodules of a list, as the layers of a model: the dims of all get the same names, and the same layouts.

A search then decides once for all of them. That is a restriction: two equal layers could be cut in two ways. Small
submodules keep choices of their own, because the products of a plain chain are best cut in turns.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.graph.block import Block
from autoshard.layout.legal import cut_operations
from autoshard.modules.dims import Collision, Position, leaves, unify
from autoshard.modules.program import TracedStep, shown
from autoshard.modules.region import Region

_FEWEST = 6  # operations of a submodule that is decided with its equals
_NUMBERED = re.compile(r"(.*?)\.?\b(\d+)(?:\.|$)")


def merge_dims(groups: Sequence[Sequence[TracedStep]]) -> None:
    """Make the dims of equal submodules one, as far as no operation would have a dim twice."""
    for steps in groups:
        mark, positions = object(), [one for step in steps for one in _positions(step)]
        for dim in leaves(dim for position in positions for dim in position):
            dim.tensors.add(mark)
    steps = [step for own in groups for step in own]
    for first, *others in _equal({step.name: step.path for step in steps}, {step.name: _sort(step) for step in steps}):
        named = {step.name: step for step in steps}
        for one, other in ((named[a], named[b]) for names in others for a, b in zip(first, names, strict=True)):
            for left, right in zip(_positions(one), _positions(other), strict=True):
                if [dim.size for dim in leaves(left)] == [dim.size for dim in leaves(right)]:
                    try:
                        unify(left, right)
                    except Collision:
                        continue


def tied_operations(block: Block, paths: Mapping[str, str]) -> Mapping[str, str]:
    """Return which operation is cut like which other: those of equal submodules like those of the first of them."""
    ops = {op.name: op for op in cut_operations(block)}

    def signature(name: str) -> object:
        op = ops[name]
        tensors = [block.tensors[one] for one in (*op.inputs, *op.outputs)]
        kind: Any = op.kind
        if isinstance(kind, Region):
            does = [
                (shown(one.function), shown(one.arguments), shown(one.keywords), one.reads, one.gives, one.products)
                for one in kind.locals
            ]
            kind = str((does, kind.whole))
        return kind, tuple((one.dims, one.dtype, one.role) for one in tensors)

    own = {name: paths[name] for name in ops if name in paths}
    found: dict[str, str] = {}
    for first, *others in _equal(own, {name: signature(name) for name in own}):
        found |= {other: one for names in others for one, other in zip(first, names, strict=True)}
    return found


def layer_of(path: str) -> str:
    """Return the submodule of a list in which a path lies; nothing where it lies in none."""
    match = _NUMBERED.match(path)
    return f"{match[1]}.{match[2]}" if match else ""


def _equal(paths: Mapping[str, str], sorts: Mapping[str, object]) -> Iterator[Sequence[Sequence[str]]]:
    """Yield the names of what stands in equal submodules of one list, in order, by submodule."""
    lists: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, path in paths.items():
        match = _NUMBERED.match(path)
        if match:
            lists[match[1]][match[2]].append(name)
    for members in lists.values():
        alike: dict[tuple[object, ...], list[list[str]]] = defaultdict(list)
        for names in members.values():
            if len(names) >= _FEWEST:
                alike[tuple(sorts[name] for name in names)].append(names)
        yield from (own for own in alike.values() if len(own) > 1)


def _sort(step: TracedStep) -> object:
    sizes = tuple(tuple(dim.size for dim in leaves(position)) for position in _positions(step))
    return step.sort, shown(step.function), shown(step.arguments), shown(step.keywords), sizes


def _positions(step: TracedStep) -> Sequence[Position]:
    return [*(one for read in step.reads for one in read.positions), *step.makes.positions]
