"""Values as wide as the vocabulary, which losses compute from logits and which are never held whole.

Operations on them that treat each token by itself are collected in runs, which an engine executes for a few tokens at a
time. The results of such operations stay within their run: another run that reads one computes it again. So the only
values of this width that are written to memory are those that products make and read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from autoshard.graph.block import TOKENS, WIDE
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
from autoshard.run.placement import dims_of


def works_by_rows(entry: Instruction) -> bool:
    """Whether an instruction makes or reads a wide value, and treats each token by itself."""
    if not isinstance(entry, Compute | Sum) or (isinstance(entry, Compute) and not entry.op.kind.by_token):
        return False
    dims = {dims_of(value.layout) for value in (*values_read(entry), *values_written(entry))}
    return WIDE in dims and dims <= {WIDE, TOKENS}


def token_cuts(entry: Instruction) -> object:
    """Return how the tokens of an instruction that works by rows are cut: the same in a whole run. None for others."""
    if not works_by_rows(entry):
        return None
    return next(value.layout.dims[:2] for value in (*values_read(entry), *values_written(entry)) if is_wide(value))


def runs_of(entries: Iterable[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """Yield the runs, and every other instruction by itself."""
    for cuts, group in groupby(entries, token_cuts):
        run = tuple(group)
        yield from [run] if cuts else zip(run)


def read_whole(parts: Iterable[Sequence[Instruction]]) -> set[str]:
    """Return the names of the values that runs and single instructions read from outside."""
    return {value.name for part in parts for value in inputs_of(part)}


def in_runs(passes: Sequence[Sequence[Instruction]]) -> Iterator[tuple[Instruction, ...]]:
    """Collect the instructions of each pass that work by rows; a run computes the wide values of earlier runs again."""
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
    """Yield the instructions that need no run, the first run, those that need this run, and so on; else in order."""
    num_runs: dict[str, int] = {}  # that come before a value is there
    run_results: set[str] = set()
    parts: dict[int, tuple[list[Instruction], list[Instruction]]] = {}
    for entry in entries:
        by_rows = works_by_rows(entry)
        counts = (num_runs.get(name, 0) + (name in run_results and not by_rows) for name in read_by(entry))
        count = max(counts, default=0)
        num_runs |= dict.fromkeys(written_by(entry), count)
        run_results.update(written_by(entry) if by_rows else ())
        parts.setdefault(count, ([], []))[by_rows].append(entry)
    for count in sorted(parts):
        whole, run = parts[count]
        yield from whole
        for cuts in dict.fromkeys(map(token_cuts, run)):
            yield from _with_makers([entry for entry in run if token_cuts(entry) == cuts], makers).values()


def _with_makers(run: Sequence[Instruction], makers: Mapping[str, Instruction]) -> Mapping[str, Instruction]:
    """Return the instructions of a run by their first result, after the makers of the wide values that they read."""
    ordered: dict[str, Instruction] = {}
    for entry in run:
        before = _with_makers([makers[name] for name in read_by(entry) if name in makers], makers)
        ordered |= {name: maker for name, maker in before.items() if name not in ordered}
        ordered.setdefault(written_by(entry)[0], entry)
    return ordered


def is_wide(value: Value) -> bool:
    """Whether a value has a number for every token and every word."""
    return dims_of(value.layout) == WIDE
