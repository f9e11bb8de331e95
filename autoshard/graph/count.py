"""What a graph adds up to: FLOPs by pass, and the model FLOPs that utilisation is measured against."""

from collections.abc import Mapping

from autoshard.graph.block import Block, OpGraph
from autoshard.graph.kinds.attention import Attend, AttendGradient
from autoshard.graph.op import Op


def matrix_flops(block: Block, passes: str, sizes: Mapping[str, int]) -> int:
    """Return the matrix FLOPs of one run of a block's passes (``F``, ``IW``, ...), clones included."""
    ops = block.select("micro_batch", passes)
    return sum(op.kind.matrix_flops(block.call(op, sizes)) for op in ops)


def model_flops_per_token(graph: OpGraph, *, visible_only: bool = False) -> float:
    """Return the matrix FLOPs that one token of training needs, without recompute.

    ``visible_only`` counts only the (query, key) pairs that the mask lets through; published figures count
    all.
    """
    tokens = graph.sizes["batch"] * graph.sizes["seq"]
    total = 0.0
    for block in graph.blocks:
        for op in block.select("micro_batch"):
            if not op.again:
                share = visible_share(op, graph.sizes["seq"]) if visible_only else 1.0
                total += block.repeat * share * op.kind.matrix_flops(block.call(op, graph.sizes))
    return total / tokens


def visible_share(op: Op, seq_len: int) -> float:
    """Return which part of all (query, key) pairs an operation's mask lets through; 1 if it has none."""
    if isinstance(op.kind, Attend | AttendGradient):
        return Attend(window=op.kind.window).visible_pairs(seq_len) / seq_len**2
    return 1.0
