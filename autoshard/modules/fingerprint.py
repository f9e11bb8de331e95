"""A hash of a traced module: equal for equal programs, so that a saved sharding is used for its own module only."""

import hashlib
from collections.abc import Iterator

from autoshard.modules.blocks import TracedBlock
from autoshard.modules.program import shown
from autoshard.modules.region import Region


def block_hash(traced: TracedBlock) -> str:
    """Return the hash of all operations, their tensors and the sizes of dims."""
    return hashlib.sha256("\n".join(_lines(traced)).encode()).hexdigest()[:32]


def _lines(traced: TracedBlock) -> Iterator[str]:
    yield str(sorted(traced.sizes.items()))
    for tensor in traced.block.tensors.values():
        yield f"{tensor} {tensor.dtype} {tensor.role}"
    for op in traced.block.ops:
        yield f"{op.name}: {op.kind.label} {op.inputs} -> {op.outputs}"
        if isinstance(op.kind, Region):
            for local in op.kind.locals:
                call = f"{shown(local.function)} {shown(local.arguments)} {shown(local.keywords)}"
                yield f"  {call} {local.reads} {local.gives}"
