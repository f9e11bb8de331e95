"""Which rank of a node stands at which position of the mesh."""

import functools
import re
from dataclasses import dataclass

from autoshard.errors import InputError, require

MAX_RANKS_PER_NODE = 4096  # keeps a mistyped placement from filling the memory
_RUN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A permutation of the ranks of one node, applied alike on every node, e.g. ``0-15/48-63/16-47``.

    Position ``i`` of the mesh inside a node is rank ``local_ranks[i]`` of that node. In text, ``a-b`` runs
    from a to b, up or down, ``a-b:s`` in steps of s, and ``/`` separates runs.

    >>> Placement.parse("0-4:2/1-5:2").local_ranks
    (0, 2, 4, 1, 3, 5)
    >>> str(Placement(local_ranks=(0, 1, 6, 7, 2, 3, 4, 5)))
    '0-1/6-7/2-5'
    """

    local_ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        size = len(self.local_ranks)
        require(
            (size > 0, "", "a placement needs at least one rank"),
            (size <= MAX_RANKS_PER_NODE, "", f"{size} ranks a node are more than {MAX_RANKS_PER_NODE}"),
            (
                sorted(self.local_ranks) == list(range(size)),
                "",
                f"not a permutation: the {size} ranks listed must be 0 to {size - 1}, each once",
            ),
        )

    @classmethod
    def linear(cls, ranks_per_node: int) -> "Placement":
        """Return the placement in which position and rank agree."""
        return cls(local_ranks=tuple(range(ranks_per_node)))

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Read the text form."""
        ranks: list[int] = []
        for run in text.split("/"):
            expanded = _expanded(run)
            if len(ranks) + len(expanded) > MAX_RANKS_PER_NODE:
                raise InputError.of("", f"a placement of more than {MAX_RANKS_PER_NODE} ranks a node")
            ranks.extend(expanded)
        return cls(local_ranks=tuple(ranks))

    def __str__(self) -> str:
        """Print the canonical text: the longest runs from left to right."""
        return _text(self.local_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRule:
    """A placement that a platform uses whenever the tensor-parallel axis has this size."""

    name: str
    tp: int
    placement: Placement
    source: str

    def __post_init__(self) -> None:
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (self.tp >= 1, "tp", f"must be at least 1, not {self.tp}"),
            (bool(self.source.strip()), "source", "must say where this placement comes from"),
        )


def _expanded(run: str) -> range:
    match = _RUN.fullmatch(run)
    if match is None:
        raise InputError.of("", f"{run!r} is not a run of ranks. Write 5, 0-15 or 0-24:8, and / between runs")
    first, last, step = (int(part) if part is not None else None for part in match.groups())
    assert first is not None
    if last is None:
        return range(first, first + 1)
    stride = 1 if step is None else step
    if stride == 0 or abs(last - first) % stride:
        raise InputError.of("", f"steps of {stride} from {first} never reach {last} in {run!r}")
    return range(first, last + 1, stride) if last >= first else range(first, last - 1, -stride)


@functools.lru_cache(maxsize=256)
def _text(ranks: tuple[int, ...]) -> str:
    runs, start = list[str](), 0
    while start < len(ranks):
        end = start
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        while step and end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end == start + 1 and abs(step) > 1:  # two ranks far apart are shorter as two runs
            end = start
        run = f"{ranks[start]}-{ranks[end]}" if end > start else str(ranks[start])
        runs.append(f"{run}:{abs(step)}" if end > start and abs(step) > 1 else run)
        start = end + 1
    return "/".join(runs)
