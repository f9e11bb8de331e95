"""Tensors with a number for every token and every word, which are never held whole: what losses make of logits.

Operations on them that treat each token by itself are brought together in runs, which an engine executes for a few
tokens at a time. What such an operation makes stays within its run: another run that reads it makes it again, so that
of all that is as wide as the vocabulary only what products make and read is written down.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from autoshard.engine.placement import dims_of
from autoshard.graph.kinds.indexing import Pick, Place
from autoshard.graph.kinds.pointwise import Add, Cast, Multiply, Reduce, Repeat, Unary, UnaryGradient
from autoshard.layout.program import (
    Compute,
    Instruction,
    Sum,
    Value,
    inputs_of,
    read_by,
    values_read,
    values_written,
    written_by,
)

_TOKENS = ("batch", "seq")
_WIDE = (*_TOKENS, "vocab")
_KINDS = (Add, Cast, Multiply, Pick, Place, Reduce, Repeat, Unary, UnaryGradient)


def works_by_rows(entry: Instruction) -> bool:
    """Whether an instruction makes or reads something wide, and of each token only its own numbers."""
    if not isinstance(entry, Compute | Sum) or (isinstance(entry, Compute) and not isinstance(entry.op.kind, _KINDS)):
        return False
    dims = {dims_of(value.layout) for value in (*values_read(entry), *values_written(entry))}
    return _WIDE in dims and dims <= {_WIDE, _TOKENS}


def token_cuts(entry: Instruction) -> object:
    """Return how the tokens are cut of what works by rows; those of one run are cut alike."""
    if not works_by_rows(entry):
        return None
    return next(value.layout.dims[:2] for value in (*values_read(entry), *values_written(entry)) if is_wide(value))


def parted(entries: Iterable[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """Yield runs, and what is in none alone."""
    for cuts, found in groupby(entries, token_cuts):
        run = tuple(found)
        yield from [run] if cuts else zip(run)


def read_whole(parts: Iterable[Sequence[Instruction]]) -> set[str]:
    """Return the names of the values that runs, and what is in none, take from others."""
    return {value.name for part in parts for value in inputs_of(part)}


def in_runs(passes: Sequence[Sequence[Instruction]]) -> Iterator[tuple[Instruction, ...]]:
    """Bring together, pass by pass, what works by rows; each run makes again what is wide and was made before it."""
    makers: dict[str, Instruction] = {}
    for entries in passes:
        makers |= {
            value.name: entry
            for entry in entries
            if works_by_rows(entry)
            for value in values_written(entry)
            if is_wide(value)
        }
        yield tuple(_sorted(entries, makers))


def _sorted(entries: Sequence[Instruction], makers: Mapping[str, Instruction]) -> Iterator[Instruction]:
    """Yield what waits for no run, the first run, what waits for that, and so on; otherwise in order."""
    waits: dict[str, int] = {}  # for how many runs a value waits
    made: set[str] = set()  # by runs
    parts: dict[int, tuple[list[Instruction], list[Instruction]]] = {}
    for entry in entries:
        by_rows = works_by_rows(entry)
        count = max((waits.get(name, 0) + (name in made and not by_rows) for name in read_by(entry)), default=0)
        waits |= dict.fromkeys(written_by(entry), count)
        made.update(written_by(entry) if by_rows else ())
        parts.setdefault(count, ([], []))[by_rows].append(entry)
    for count in sorted(parts):
        others, run = parts[count]
        yield from others
        for cuts in dict.fromkeys(map(token_cuts, run)):
            yield from _with_makers([one for one in run if token_cuts(one) == cuts], makers).values()


def _with_makers(run: Sequence[Instruction], makers: Mapping[str, Instruction]) -> Mapping[str, Instruction]:
    """Return a run by what each of its instructions makes first, and before it what makes the wide values it reads."""
    found: dict[str, Instruction] = {}
    for entry in run:
        before = [makers[name] for name in read_by(entry) if name in makers]
        found |= {name: one for name, one in _with_makers(before, makers).items() if name not in found}
        found.setdefault(written_by(entry)[0], entry)
    return found


def is_wide(value: Value) -> bool:
    """Whether it has a number for every token and every word."""
    return dims_of(value.layout) == _WIDE
