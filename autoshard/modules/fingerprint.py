"""A hash of a traced module: equal for equal programs, so that a saved sharding is used for its own module only."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

from autoshard.graph.block import Block
from autoshard.modules.blocks import TracedBlock
from autoshard.modules.local import NAMESPACE
from autoshard.modules.program import shown
from autoshard.modules.region import Region

_LOCAL = re.compile(rf"({NAMESPACE}\w*::\w+?)(?:_\d+)?\b")  # a function that is marked as local, and its number


def block_hash(traced: TracedBlock) -> str:
    """Return the hash of all operations, their tensors and the sizes of dims."""
    return hash_of(traced.block, traced.sizes)


def hash_of(block: Block, sizes: Mapping[str, int]) -> str:
    """Return the hash of a block's operations and their tensors, and of some sizes of dims."""
    return hashlib.sha256("\n".join(_without_registrations(_lines(block, sizes))).encode()).hexdigest()[:32]


def _lines(block: Block, sizes: Mapping[str, int]) -> Iterator[str]:
    yield str(sorted(sizes.items()))
    for tensor in block.tensors.values():
        yield f"{tensor} {tensor.dtype} {tensor.role}"
    for op in block.ops:
        yield f"{op.name}: {op.kind.label} {op.inputs} -> {op.outputs}"
        if isinstance(op.kind, Region):
            for local in op.kind.locals:
                call = f"{shown(local.function)} {shown(local.arguments)} {shown(local.keywords)}"
                yield f"  {call} {local.reads} {local.gives}"


def _without_registrations(lines: Iterable[str]) -> Iterator[str]:
    """Number marked functions of one name in the order of their calls: how often a file was run numbers them too."""
    called: dict[str, list[str]] = {}

    def numbered(match: re.Match[str]) -> str:
        names = called.setdefault(match[1], [])
        names += [] if match[0] in names else [match[0]]
        return f"{match[1]}_{place}" if (place := names.index(match[0])) else match[1]

    return (_LOCAL.sub(numbered, line) for line in lines)
