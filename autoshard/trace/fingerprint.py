"""A hash of a traced module: equal for equal programs, so that a saved sharding is used for its own module only."""

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

from autoshard.trace.blocks import TracedBlock
from autoshard.trace.program import TensorPlace
from autoshard.trace.region import Region


def fingerprint(traced: TracedBlock) -> str:
    """Return the hash of all operations, their tensors and the sizes of dims."""
    return hashlib.sha256("\n".join(_lines(traced)).encode()).hexdigest()[:32]


def _lines(traced: TracedBlock) -> Iterator[str]:
    yield str(sorted(traced.sizes.items()))
    for tensor in traced.block.tensors.values():
        yield f"{tensor} {tensor.dtype} {tensor.role}"
    for op in traced.block.ops:
        yield f"{op.name}: {op.kind.label} {op.inputs} -> {op.outputs}"
        if isinstance(op.kind, Region):
            for one in op.kind.locals:
                yield f"  {_shown(one.function)} {_shown(one.arguments)} {_shown(one.keywords)} {one.reads} {one.gives}"


def _shown(value: Any) -> str:
    """Write an argument or a function down, without the place in memory that Python prints."""
    if isinstance(value, TensorPlace):
        return f"#{value.number}"
    if isinstance(value, functools.partial):
        return f"{_shown(value.func)}({_shown(value.args)}, {_shown(value.keywords)})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(value[key])}' for key in sorted(value))}}}"
    return str(getattr(value, "__qualname__", value))
