"""A graph as readable text, one line per operation."""

from collections.abc import Iterator

from autoshard.graph.block import Block, OpGraph, distinct_bytes
from autoshard.graph.op import Op
from autoshard.units import format_bytes, format_count


def graph_text(graph: OpGraph) -> str:
    """Print sizes of the dims, then every block with its operations."""
    sizes = ", ".join(f"{dim} {size}" for dim, size in graph.sizes.items())
    lines = [f"sizes: {sizes}", f"parameters: {format_count(graph.num_parameters())}"]
    for block in (*graph.blocks, graph.update):
        lines += ["", *_block_lines(block, graph)]
    return "\n".join(lines) + "\n"


def _block_lines(block: Block, graph: OpGraph) -> Iterator[str]:
    times = f" x {block.repeat}" if block.repeat > 1 else ""
    kept = format_bytes(distinct_bytes(block.saved, graph.sizes))
    yield f"block {block.kind}{times}: keeps {kept} for backward, recompute {block.recompute}"
    if block.saved:
        yield f"  kept: {', '.join(f'{entry.storage} {entry.tensor.dtype}' for entry in block.saved)}"
    for op in block.ops:
        place = op.pass_ if op.phase == "micro_batch" else "step"
        yield f"  {place:<4} {_op_line(block, op)}"


def _op_line(block: Block, op: Op) -> str:
    outputs = ", ".join(str(block.tensors[name]) for name in op.outputs)
    inputs = ", ".join(str(block.tensors[name]) for name in op.inputs)
    return f"{outputs} = {op.kind.label}({inputs})"
