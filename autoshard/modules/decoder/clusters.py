"""The pieces of a segment beside its products, norms and attention: sums, gates, functions of one tensor."""

from collections.abc import Iterator, Sequence

from autoshard.errors import require
from autoshard.modules.decoder.functions import as_norm, known_function
from autoshard.modules.decoder.pieces import Piece, SegmentFlow, WeightPart, is_same, parameters_of, shape, whole_in
from autoshard.modules.program import Traced, TracedStep, name_of

_BY_NUMBER = ("aligned_product", "grouped_mm_fallback")  # products of rows with the matrices of their groups


class Clusters:
    """Finds the pieces that a value is made of, from what is recognised already."""

    def __init__(self, flow: SegmentFlow, recognised: tuple[Piece, ...]) -> None:
        self.flow = flow
        self.by_value = {piece.makes: piece for piece in recognised}
        self.claimed = {step for piece in recognised for step in piece.steps}
        self.sources: dict[Traced, frozenset[Traced]] = {}
        for step in flow.segment.steps:
            if step not in self.claimed and not is_same(step):
                self._join(step)

    def pieces(self) -> tuple[Piece, ...]:
        """Return all pieces that the segment's result is made of, in the order of their last steps."""
        pieces: dict[Piece, None] = {}
        waiting = [self.flow.root(self.flow.segment.gives)]
        while waiting:
            piece = self._piece(waiting.pop())
            if piece and piece not in pieces:
                pieces[piece] = None
                waiting += piece.reads
        places = {step: place for place, step in enumerate(self.flow.segment.steps)}
        return tuple(sorted(pieces, key=lambda piece: (places[piece.steps[-1]], piece.kind == "shift")))

    def _from(self, value: Traced) -> frozenset[Traced]:
        """Return the results of pieces, and the segment's input, that a value is a function of."""
        root = self.flow.root(value)
        if root in self.by_value or root is self.flow.segment.takes:
            return frozenset({root})
        return self.sources.get(root, frozenset())

    def _join(self, step: TracedStep) -> None:
        """Let a step be a piece of its own where it brings several tensors together."""
        operands = self.flow.operands(step)
        sources = frozenset[Traced]().union(*(self._from(operand) for operand in operands))
        kind = {"add": "add", "mul": "multiply"}.get(name_of(step))
        several = len(operands) == 2 and all(self._from(operand) for operand in operands)
        dims = [{*operand.dims} for operand in operands]
        like = several and {*step.makes.dims} in dims and (dims[0] == dims[1] or kind == "add")
        plain = not step.keywords and len(step.reads) == 2
        if len(sources) > 1 and kind and like and plain and self._from(operands[0]) != self._from(operands[1]):
            self.by_value[step.makes] = Piece(
                kind="add" if kind == "add" else "multiply", steps=(step,), reads=operands, makes=step.makes,
                dims=step.makes.dims,
            )  # fmt: skip
        elif len(sources) > 1:
            self.by_value[step.makes] = self._opaque((*self._constants(operands), step), step.makes)
        else:
            self.sources[step.makes] = sources

    def _constants(self, operands: Sequence[Traced]) -> Iterator[TracedStep]:
        """Yield the steps that make operands out of nothing, as zeros that rows are added to: a line has operands."""
        for operand in operands:
            steps = self.flow.closure(operand, ())
            yield from () if self.flow.entries(steps) else steps

    def _piece(self, value: Traced) -> Piece | None:
        """Return the piece that makes a value; None for the segment's input."""
        if value is self.flow.segment.takes:
            return None
        if value not in self.by_value:
            hidden = self.flow.segment.takes
            steps = self.flow.closure(value, [*self.by_value, *([hidden] if hidden else [])])
            self.by_value[value] = self._opaque(steps, value)
        return self.by_value[value]

    def _opaque(self, steps: tuple[TracedStep, ...], makes: Traced) -> Piece:
        """Join steps into one piece: unary if each output number depends on one input number, else opaque."""
        entries = self.flow.entries(steps)
        for step in steps:
            _require_known(step)
        operands = tuple(entry for entry in entries if entry.origin == "made")
        inputs = tuple(entry for entry in entries if entry.origin == "input")
        weights = tuple(WeightPart(value=read.value, dims=shape(read.positions)) for read in parameters_of(steps))
        whole = whole_in(steps)
        alone = len(operands) == 1 and not inputs and not weights and {*operands[0].dims} == {*makes.dims} and not whole
        function = known_function(steps, operands[0], self.flow) if alone else None
        piece = Piece(
            kind="unary" if function else "opaque", steps=steps, reads=operands, makes=makes, inputs=inputs,
            weights=weights, dims=makes.dims, function=function, whole=whole,
        )  # fmt: skip
        return as_norm(piece, self.flow) if len(operands) == 1 and weights and not inputs else piece


def _require_known(step: TracedStep) -> None:
    """Refuse matrices of weights in a function of which nothing is known: its work could be anything.

    So it is for experts whose router is not known: their matrices are read by number.
    """
    dims = {*step.makes.dims, *(dim for read in step.reads for dim in shape(read.positions))}
    matrices = [read.value.name for read in parameters_of([step]) if len(read.value.positions) > 1]
    message = f"computes {name_of(step)} of {', '.join(matrices)}, of which nothing is known; write it as products"
    by_number = name_of(step) in _BY_NUMBER
    known = not matrices or not (by_number or dims <= step.whole_leaves())
    require((known, step.path or "module", message))
