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
from autoshard.modules.dims import Collision, Position, factors, unify
from autoshard.modules.program import TracedStep, shown
from autoshard.modules.region import Region

_FEWEST = 6  # operations of a submodule that is decided with its equals
_NUMBERED = re.compile(r"(.*?)\.?\b(\d+)(?:\.|$)")


def merge_dims(groups: Sequence[Sequence[TracedStep]]) -> None:
    """Make the dims of equal submodules one, as far as no operation would have a dim twice."""
    for steps in groups:
        mark, positions = object(), [position for step in steps for position in _positions(step)]
        for dim in factors(dim for position in positions for dim in position):
            dim.tensors.add(mark)
    steps = [step for group in groups for step in group]
    for first, *repeats in _equal({step.name: step.path for step in steps}, {step.name: _sort(step) for step in steps}):
        named = {step.name: step for step in steps}
        for first_step, equal_step in (
            (named[a], named[b]) for names in repeats for a, b in zip(first, names, strict=True)
        ):
            for first_position, second_position in zip(_positions(first_step), _positions(equal_step), strict=True):
                if [dim.size for dim in factors(first_position)] == [dim.size for dim in factors(second_position)]:
                    try:
                        unify(first_position, second_position)
                    except Collision:
                        continue


def tied_operations(block: Block, paths: Mapping[str, str]) -> Mapping[str, str]:
    """Map each operation of equal submodules to that of the first submodule, like which it is cut."""
    ops = {op.name: op for op in cut_operations(block)}

    def signature(name: str) -> object:
        op = ops[name]
        tensors = [block.tensors[tensor] for tensor in (*op.inputs, *op.outputs)]
        kind: Any = op.kind
        if isinstance(kind, Region):
            does = [
                (
                    shown(local.function),
                    shown(local.arguments),
                    shown(local.keywords),
                    local.reads,
                    local.gives,
                    local.products,
                )
                for local in kind.locals
            ]
            kind = str((does, kind.whole))
        return kind, tuple((tensor.dims, tensor.dtype, tensor.role) for tensor in tensors)

    op_paths = {name: paths[name] for name in ops if name in paths}
    tied: dict[str, str] = {}
    for first, *repeats in _equal(op_paths, {name: signature(name) for name in op_paths}):
        tied |= {repeat: name for names in repeats for name, repeat in zip(first, names, strict=True)}
    return tied


def layer_of(path: str) -> str:
    """Return the submodule of a list in which a path lies; nothing where it lies in none."""
    match = _NUMBERED.match(path)
    return f"{match[1]}.{match[2]}" if match else ""


def _equal(paths: Mapping[str, str], sorts: Mapping[str, object]) -> Iterator[Sequence[Sequence[str]]]:
    """Yield groups of equal submodules of one list: by submodule the names of its steps or operations, in order."""
    lists: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, path in paths.items():
        match = _NUMBERED.match(path)
        if match:
            lists[match[1]][match[2]].append(name)
    for members in lists.values():
        by_sorts: dict[tuple[object, ...], list[list[str]]] = defaultdict(list)
        for names in members.values():
            if len(names) >= _FEWEST:
                by_sorts[tuple(sorts[name] for name in names)].append(names)
        yield from (equals for equals in by_sorts.values() if len(equals) > 1)


def _sort(step: TracedStep) -> object:
    sizes = tuple(tuple(dim.size for dim in factors(position)) for position in _positions(step))
    return step.sort, shown(step.function), shown(step.arguments), shown(step.keywords), sizes


def _positions(step: TracedStep) -> Sequence[Position]:
    return [*(position for read in step.reads for position in read.positions), *step.makes.positions]
