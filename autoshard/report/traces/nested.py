"""What lies inside a pass of a trace: its blocks, and in each what is computed again, kernels and Collectives."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from autoshard.blocks.inside import BlockPieces, PassContents, PassPiece
from autoshard.plan.plan import rounded
from autoshard.report.traces.ticks import ticks

NESTED = {  # categories of slices that lie inside others
    "block": "a layer, the embedding or the head",
    "recompute": "what a block computes again before its backward",
    "gradients": "the gradients of a block's inputs, or of its weights",
    "kernel": "one run of a kernel, named after its operations",
    "collective": "what a rank sends to the others of its group",
    "start": "waiting for hosts to start kernels",
}
_KINDS = {"kernel": "kernel", "collective": "collective", "waiting": "start"}
_GRADIENTS = {"I": "input gradients", "W": "weight gradients"}
_WITHIN = 3  # ticks from the end of a slice to that of the last in it: Perfetto rounds both to nanoseconds


class NestedSlice(NamedTuple):
    """A slice inside a pass."""

    begin: int  # in ticks
    end: int
    category: str
    name: str
    args: Mapping[str, Any]


def nested_slices(contents: PassContents, kind: str, stage: int, begin: int, end: int) -> list[NestedSlice]:
    """Return the slices inside a pass that runs from ``begin`` to ``end``."""
    slices, start_s = list[NestedSlice](), 0.0
    last = end - _WITHIN

    def span(from_s: float, until_s: float, within: int) -> tuple[int, int]:
        return begin + ticks(from_s), min(within, begin + ticks(until_s))

    for block in contents.of(kind, stage):
        until_s = start_s + _seconds(block.pieces)
        block_begin, block_end = span(start_s, until_s, last)
        if block.table:
            args = {"table": block.table, "time_s": rounded(until_s - start_s)}
            slices.append(NestedSlice(block_begin, block_end, "block", block.name, args))
        for section, pieces in _sections(block):
            section_s, within = _seconds(pieces), block_end - _WITHIN
            if section:
                category = "recompute" if section == "recompute" else "gradients"
                from_, to = span(start_s, start_s + section_s, within)
                slices.append(NestedSlice(from_, to, category, section, {"time_s": rounded(section_s)}))
                within = to - _WITHIN
            for piece in pieces:
                from_, to = span(start_s, start_s + piece.time_s, within)
                slices.append(NestedSlice(from_, to, _KINDS[piece.kind], piece.name, _args(piece)))
                start_s += piece.time_s
        start_s = until_s
    return [piece for piece in slices if piece.end > piece.begin]


def _seconds(pieces: tuple[PassPiece, ...]) -> float:
    return sum(piece.time_s for piece in pieces)


def _sections(block: BlockPieces) -> Iterator[tuple[str, tuple[PassPiece, ...]]]:
    """Yield pieces of a block with the name of what they belong to; "" in a forward pass, which has one part."""

    def section(piece: PassPiece) -> str:
        return "recompute" if piece.again else _GRADIENTS.get(piece.pass_, "") if block.table else ""

    for name, pieces in groupby(block.pieces, section):
        yield name, tuple(pieces)


def _args(piece: PassPiece) -> dict[str, Any]:
    hidden = {"hidden_s": rounded(piece.hidden_s)} if piece.hidden_s else {}
    return {"part": piece.part, "time_s": rounded(piece.time_s), **hidden}
