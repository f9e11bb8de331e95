"""Which collectives a rank begins, in order; and whether ranks that meet in them agree, before anything is sent.

Libraries match the collectives of a group by their order alone. Where two ranks differ, one library aborts, another one
waits for ever, and a third one adds up what does not belong together.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch.distributed as dist

from autoshard.errors import RunFailed

_TOGETHER, _MESSAGE = "together", "message"
_FEW = 8  # ranks that are all named

Meeting = tuple[str, tuple[int, ...]]  # _TOGETHER and the ranks, or the kind of a message, its sender and its receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunCollective:
    """A collective, or a message from one rank to another, as each of them begins it."""

    kind: str
    ranks: tuple[int, ...]
    form: str  # number format, and shape where it is the same on all ranks

    def __str__(self) -> str:
        return f"{self.kind} of {self.form} over ranks {_named(self.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a rank has begun, if it is kept."""

    is_kept: bool = False
    entries: list[BegunCollective] = field(default_factory=list[BegunCollective])

    def message(self, from_rank: int, to_rank: int, tag: int, dtype: object) -> None:
        """Note a message, whose tag is odd if it goes back; its two ends do so when they begin."""
        if self.is_kept:
            kind = f"{_MESSAGE} back" if tag % 2 else _MESSAGE
            form = f"{str(dtype).removeprefix('torch.')} with tag {tag}"
            self.entries.append(BegunCollective(kind=kind, ranks=(from_rank, to_rank), form=form))


def sequences(entries: Iterable[BegunCollective], *, ordered_messages: bool) -> Mapping[Meeting, Sequence[str]]:
    """Return, for each set of ranks that meet, the collectives that they begin together, in order.

    Ranks that meet in two groups begin the collectives of both in one order: otherwise each may wait in another
    group. Messages of a direction are a sequence of their own; their order counts on devices, which know no tags.
    """
    begun_together, sent = defaultdict[Meeting, list[str]](list), defaultdict[Meeting, list[str]](list)
    groups: dict[tuple[int, ...], frozenset[int]] = {}
    collectives: list[BegunCollective] = []
    for entry in entries:
        if entry.kind.startswith(_MESSAGE):
            sent[entry.kind, entry.ranks].append(str(entry))
        else:
            groups[entry.ranks] = frozenset(entry.ranks)
            collectives.append(entry)
    for ranks in _closed(groups.values()):
        inside = {members for members, group in groups.items() if ranks <= group}
        begun_together[_TOGETHER, tuple(sorted(ranks))] = [str(entry) for entry in collectives if entry.ranks in inside]
    return {**begun_together, **{key: lines if ordered_messages else sorted(lines) for key, lines in sent.items()}}


def _closed(groups: Iterable[frozenset[int]]) -> Sequence[frozenset[int]]:
    """Return the groups, and each set of two or more ranks that some of them have in common."""
    closed = dict.fromkeys(groups)
    while more := {left & right: None for left in closed for right in closed if len(left & right) > 1} - closed.keys():
        closed |= dict.fromkeys(sorted(more, key=sorted))
    return tuple(closed)


def refuse_other_order(entries: Sequence[BegunCollective], *, ordered_messages: bool) -> None:
    """Refuse to begin if ranks that meet would begin different collectives; every rank of the world calls this.

    All ranks raise the same: the first difference, with a rank on each side of it.
    """
    here = sequences(entries, ordered_messages=ordered_messages)
    digests = {meeting: hashlib.sha256("\n".join(lines).encode()).digest() for meeting, lines in here.items()}
    of_ranks: list[Mapping[Meeting, bytes]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, digests)
    differing = differing_meeting(of_ranks)
    if differing is not None:
        lines: list[Sequence[str]] = [()] * len(of_ranks)
        dist.all_gather_object(lines, here.get(differing[0], ()))
        raise RunFailed(difference(*differing, lines))


def differing_meeting(digests: Sequence[Mapping[Meeting, bytes]]) -> tuple[Meeting, int, int] | None:
    """Return the first meeting of which two ranks have different digests, and these ranks; None if there is none."""
    for meeting in sorted({meeting for of_rank in digests for meeting in of_rank}):
        first, *members = meeting[1]
        for member in members:
            if digests[first].get(meeting) != digests[member].get(meeting):
                return meeting, first, member
    return None


def difference(meeting: Meeting, one_rank: int, other_rank: int, lines: Sequence[Sequence[str]]) -> str:
    """Say at which position two ranks begin something else, and what each of them begins there."""
    pairs = enumerate(zip_longest(lines[one_rank], lines[other_rank], fillvalue="nothing more"), start=1)
    position, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    kind, ranks = meeting
    what = f"the collectives of ranks {_named(ranks)}" if kind == _TOGETHER else f"{kind}s from rank {ranks[0]}"
    return (
        f"ranks would begin different collectives, so no step is begun. Number {position} of {what}:\n"
        f"  rank {one_rank}: {here}\n"
        f"  rank {other_rank}: {there}\n"
        "All ranks need the same plan, version of autoshard and --extend files. If they have them, please report this"
    )


def _named(ranks: Sequence[int]) -> str:
    """Name ranks; of many the first and the last.

    >>> _named((0, 4)), _named(range(0, 64, 2))
    ('0, 4', '0, 2, ... 62 (32 ranks)')
    """
    if len(ranks) <= _FEW:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)} ranks)"
