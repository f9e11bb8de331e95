"""A pipeline schedule as data: a builder's name with its parameters, or the action lists themselves."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autoshard.errors import in_range, nearest, require
from autoshard.schedule.builders import Action, ActionLists, Order, PipelineShape, Step, builders
from autoshard.schedule.waves import KINDS, coded

MAX_STAGES = 65_536  # more than any model has layers; keeps a typing error in a plan from filling memory
MAX_MICRO_BATCHES = 2**31 - 1
Counts = tuple[tuple[int, ...], ...]  # of micro-batches by chunk, at several times


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of work in the pipeline; explicit ``actions`` (one list per rank) replace the builder's.

    >>> schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2)
    >>> [" ".join(map(str, actions)) for actions in schedule.action_lists()]
    ['F0.0 F0.1 B0.0 B0.1', 'F1.0 B1.0 F1.1 B1.1']
    """

    builder: str
    num_ranks: int  # pipeline ranks: pp
    num_chunks: int = 1  # stages per rank: vp
    num_micro_batches: int
    placement: tuple[tuple[int, int], ...] | None = None  # stage -> (rank, chunk); None: the builder's
    actions: ActionLists | None = None

    def __post_init__(self) -> None:
        unknown = f"{self.builder!r} is not a schedule. {nearest(self.builder, [*builders()])}"
        require(
            (self.builder in builders(), "builder", unknown),
            *in_range(self, "num_ranks", "num_chunks", low=1, high=MAX_STAGES),
            *in_range(self, "num_micro_batches", low=1, high=MAX_MICRO_BATCHES),
        )
        many = f"{self.num_stages} stages are more than {MAX_STAGES}"
        require((self.num_stages <= MAX_STAGES, "num_chunks", many))
        builder, built = builders()[self.builder], self.actions is None
        per_rank = "one stage" if builder.num_chunks == 1 else f"{builder.num_chunks} stages"
        advice = ". Use interleaved" if builder.num_chunks == 1 else ""
        wrong_chunks = f"{self.builder} runs {per_rank} per rank, not {self.num_chunks}{advice}"
        is_broken = builder.in_rounds and self.num_chunks > 1 and self.num_micro_batches % self.num_ranks
        rounds = f"{self.builder} needs a multiple of {self.num_ranks} ranks, not {self.num_micro_batches}"
        places = [(rank, chunk) for rank in range(self.num_ranks) for chunk in range(self.num_chunks)]
        is_placed = self.placement is None or sorted(self.placement) == places
        misplaced = f"must name each (rank, chunk) of {self.num_ranks} ranks x {self.num_chunks} chunks once"
        is_listed = self.actions is None or len(self.actions) == self.num_ranks
        require(
            (not built or builder.num_chunks in (None, self.num_chunks), "num_chunks", wrong_chunks),
            (not (built and is_broken), "num_micro_batches", rounds),
            (is_placed, "placement", misplaced),
            (is_listed, "actions", f"must be {self.num_ranks} lists, one per pipeline rank"),
        )

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: ranks times chunks."""
        return self.num_ranks * self.num_chunks

    @property
    def unit(self) -> int:
        """After how many micro-batches the order of the builder repeats itself."""
        return self.num_ranks if builders()[self.builder].in_rounds else 1

    @property
    def splits_backward(self) -> bool:
        """Whether input gradients and weight gradients are actions of their own."""
        if self.actions is None:
            return builders()[self.builder].splits
        return any(action.kind in "IW" for actions in self.actions for action in actions)

    def place_of(self, stage: int) -> tuple[int, int]:
        """Return ``(rank, chunk)`` of a stage."""
        if self.placement is not None:
            return self.placement[stage]
        chunk, rank = divmod(stage, self.num_ranks)
        return self._turned(rank, chunk), chunk

    def stages_of(self, rank: int) -> dict[int, int]:
        """Return the stage of each chunk of a rank."""
        if self.placement is None:
            return {chunk: chunk * self.num_ranks + self._turned(rank, chunk) for chunk in range(self.num_chunks)}
        return {chunk: stage for stage, (owner, chunk) in enumerate(self.placement) if owner == rank}

    def _turned(self, rank: int, chunk: int) -> int:
        return self.num_ranks - 1 - rank if builders()[self.builder].turns and chunk % 2 else rank

    def steps_of(self, rank: int) -> list[Step]:
        """Return ``(kind, stage, micro-batch)`` of every action of one rank: its list in short."""
        if self.actions is not None:
            return [(action.kind, action.stage, action.micro_batch) for action in self.actions[rank]]
        return self._ordered(builders()[self.builder].order, rank)

    def action_lists(self) -> ActionLists:
        """Return the actions of every pipeline rank, in order."""
        if self.actions is not None:
            return self.actions
        return self.in_order(builders()[self.builder].order).action_lists()

    def in_order(self, order: Order) -> "Schedule":
        """Return the same pipeline run in an order of one's own, as action lists; ``verify_actions`` checks them.

        An order returns ``(kind, chunk, micro-batch)`` of the rank at a position, as those of the builders do.

        >>> def all_forwards_first(shape: PipelineShape, position: int) -> list[Step]:
        ...     return [(kind, 0, number) for kind in ("F", "B") for number in range(shape.num_micro_batches)]
        >>> schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2).in_order(all_forwards_first)
        >>> " ".join(map(str, schedule.action_lists()[1]))
        'F1.0 F1.1 B1.0 B1.1'
        """
        steps_by_rank = [self._ordered(order, rank) for rank in range(self.num_ranks)]
        lists = [
            [Action(kind=kind, stage=stage, micro_batch=number) for kind, stage, number in steps]
            for steps in steps_by_rank
        ]
        return replace(self, actions=tuple(map(tuple, lists)))

    def _ordered(self, order: Order, rank: int) -> list[Step]:
        counts = {name: getattr(self, name) for name in ("num_ranks", "num_chunks", "num_micro_batches")}
        stages = self.stages_of(rank)
        return [(kind, stages[chunk], number) for kind, chunk, number in order(PipelineShape(**counts), stages[0])]

    def in_flight_by_chunk(self, rank: int) -> Counts:
        """Return of how many micro-batches a rank keeps activations, chunk by chunk, at each time of a local maximum.

        Where backwards are split, micro-batches that only wait for their W count separately, after the remaining ones.

        >>> Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=4).in_flight_by_chunk(0)
        ((4, 1), (3, 2))
        >>> Schedule(builder="zb_h1", num_ranks=4, num_micro_batches=8).in_flight_by_chunk(1)
        ((3, 1), (2, 2))
        """
        return _in_flight(self, rank)


@lru_cache(maxsize=4096)
def _in_flight(schedule: Schedule, rank: int) -> Counts:
    """Count; from four rounds on the order repeats itself, and what is in flight grows as it does from there on."""
    unit, total = schedule.unit, schedule.num_micro_batches
    few = 4 * schedule.num_ranks + total % unit
    if schedule.actions is not None or total <= few + unit:
        return _counted(schedule, rank)
    first, second = (_in_flight(replace(schedule, num_micro_batches=count), rank) for count in (few, few + unit))
    if len(first) != len(second):
        return _counted(schedule, rank)
    more = (total - few) // unit
    pairs = [zip(fewer, further, strict=True) for fewer, further in zip(first, second, strict=True)]
    return tuple(tuple(count + more * (later - count) for count, later in pair) for pair in pairs)


def _counted(schedule: Schedule, rank: int) -> Counts:
    """Count what is kept whenever something is about to be given back; leave out what another time exceeds."""
    kinds, of, _ = coded(schedule.steps_of(rank))
    chunks, splits = np.zeros(schedule.num_stages, dtype=np.int64), schedule.splits_backward
    for chunk, stage in schedule.stages_of(rank).items():
        chunks[stage] = chunk
    forward, weight, number = kinds == KINDS.index("F"), kinds == KINDS.index("W"), np.arange(len(kinds))
    change = np.zeros((len(kinds), 2, schedule.num_chunks), dtype=np.int64)
    change[number, 0, chunks[of]] = np.where(forward, 1, np.where(weight, 0, -1))
    change[number, 1, chunks[of]] = np.where(weight, -1, kinds == KINDS.index("I"))
    counts = np.cumsum(change, axis=0).reshape(len(kinds), -1)[:, : schedule.num_chunks * (1 + splits)]
    grows = forward | (kinds == KINDS.index("I"))
    rows: list[list[int]] = counts[:-1][grows[:-1] & ~forward[1:]].tolist()
    rows = rows or counts[-1:].tolist()  # lists without a backward, which verify_actions refuses, give nothing back
    table = np.array(sorted({tuple(row) for row in rows}, reverse=True))
    exceeded = (table[:, None] <= table).all(axis=2).sum(axis=1) > 1  # each is as many as itself
    return tuple(map(tuple, table[~exceeded].tolist()))
