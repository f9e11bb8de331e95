"""A pipeline schedule as data: a builder's name with its parameters, or the action lists themselves."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from autoshard.errors import nearest, require
from autoshard.schedule.action import Action, ActionLists
from autoshard.schedule.builders import BUILDERS, Builder
from autoshard.schedule.shape import Counts, PipelineShape, Step, most_held, most_held_by_chunk


def schedule_names() -> tuple[str, ...]:
    """Give the names after ``schedule=`` that can be used."""
    return tuple(BUILDERS)


def schedule_meaning(name: str) -> str:
    """Say in one line what a schedule does."""
    return BUILDERS[name].meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of work in the pipeline; explicit ``actions`` (one list per rank) replace the builder's.

    >>> schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2)
    >>> [" ".join(map(str, actions)) for actions in schedule.action_lists()]
    ['F0.0 F0.1 B0.0 B0.1', 'F1.0 B1.0 F1.1 B1.1']
    >>> schedule.in_flight(0), schedule.in_flight(1)
    (2, 1)
    """

    builder: str
    num_ranks: int  # pipeline ranks: pp
    num_chunks: int = 1  # stages per rank: vp
    num_micro_batches: int
    placement: tuple[tuple[int, int], ...] | None = None  # stage -> (rank, chunk); None: the builder's
    actions: ActionLists | None = None

    def __post_init__(self) -> None:
        """Refuse schedules that no builder can make."""
        require(
            (self.builder in BUILDERS, "builder", _unknown(self.builder)),
            (self.num_ranks >= 1, "num_ranks", f"must be at least 1, not {self.num_ranks}"),
            (self.num_chunks >= 1, "num_chunks", f"must be at least 1, not {self.num_chunks}"),
            (
                self.num_micro_batches >= 1,
                "num_micro_batches",
                f"must be at least 1, not {self.num_micro_batches}",
            ),
        )
        require(
            (self._chunks_fit(), "num_chunks", self._chunks_misfit()),
            (
                self._rounds_fit(),
                "num_micro_batches",
                f"{self.builder} needs a multiple of {self.num_ranks} ranks, not {self.num_micro_batches}",
            ),
            (
                self._placement_fits(),
                "placement",
                f"must name each (rank, chunk) of {self.num_ranks} ranks x {self.num_chunks} chunks once",
            ),
            (
                self.actions is None or len(self.actions) == self.num_ranks,
                "actions",
                f"must be {self.num_ranks} lists, one per pipeline rank",
            ),
        )

    def _chunks_fit(self) -> bool:
        return self.actions is not None or self._builder.num_chunks in (None, self.num_chunks)

    def _chunks_misfit(self) -> str:
        if self._builder.num_chunks == 1:
            return f"{self.builder} runs one stage per rank, not {self.num_chunks}. Use interleaved"
        return f"{self.builder} runs {self._builder.num_chunks} stages per rank, not {self.num_chunks}"

    def _rounds_fit(self) -> bool:
        in_rounds = self._builder.in_rounds and self.actions is None and self.num_chunks > 1
        return not in_rounds or self.num_micro_batches % self.num_ranks == 0

    def _placement_fits(self) -> bool:
        if self.placement is None:
            return True
        if len(self.placement) != self.num_stages:
            return False
        in_range = all(0 <= rank < self.num_ranks and 0 <= chunk < self.num_chunks for rank, chunk in self.placement)
        return in_range and len(set(self.placement)) == self.num_stages

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: ranks times chunks."""
        return self.num_ranks * self.num_chunks

    def place_of(self, stage: int) -> tuple[int, int]:
        """Give ``(rank, chunk)`` of a stage."""
        return self.placement[stage] if self.placement else self._builder.place_of(self.num_ranks, stage)

    def stages_of(self, rank: int) -> dict[int, int]:
        """Map each chunk of a rank to its stage."""
        if self.placement is None:
            return {chunk: self._builder.stage_of(self.num_ranks, rank, chunk) for chunk in range(self.num_chunks)}
        return {chunk: stage for stage, (owner, chunk) in enumerate(self.placement) if owner == rank}

    def sent_on(self) -> tuple[bool, ...]:
        """Say of each stage but the last whether what it makes goes to another rank."""
        ranks = [self.place_of(stage)[0] for stage in range(self.num_stages)]
        return tuple(rank != after for rank, after in pairwise(ranks))

    def num_sends(self) -> tuple[int, ...]:
        """Count the messages that each rank sends for one micro-batch, forward and back."""
        ranks = [self.place_of(stage)[0] for stage in range(self.num_stages)]
        counts = Counter(rank for pair in pairwise(ranks) if len(set(pair)) > 1 for rank in pair)
        return tuple(counts[rank] for rank in range(self.num_ranks))

    def steps(self) -> list[list[Step]]:
        """Give ``(kind, stage, micro-batch)`` of every action, per rank in order: the action lists in short."""
        return [self.steps_of(rank) for rank in range(self.num_ranks)]

    def steps_of(self, rank: int) -> list[Step]:
        """Give ``(kind, stage, micro-batch)`` of every action of one rank."""
        if self.actions is not None:
            return [(action.kind, action.stage, action.micro_batch) for action in self.actions[rank]]
        stages = self.stages_of(rank)
        order = self._builder.order(self._shape, stages[0])
        return [(kind, stages[chunk], micro_batch) for kind, chunk, micro_batch in order]

    def action_lists(self) -> ActionLists:
        """Give the actions of every pipeline rank, in order."""
        if self.actions is not None:
            return self.actions
        return tuple(
            tuple(Action(kind=kind, stage=stage, micro_batch=micro_batch) for kind, stage, micro_batch in own)
            for own in self.steps()
        )

    def in_order(self, order: Callable[[PipelineShape, int], list[Step]]) -> "Schedule":
        """Return the same pipeline run in an order of one's own, as action lists; ``verify_actions`` judges them.

        An order gives ``(kind, chunk, micro-batch)`` of the rank at a position, as those of the builders do.

        >>> def all_forwards_first(shape: PipelineShape, position: int) -> list[Step]:
        ...     return [(kind, 0, number) for kind in ("F", "B") for number in range(shape.num_micro_batches)]
        >>> schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=2).in_order(all_forwards_first)
        >>> " ".join(map(str, schedule.action_lists()[1]))
        'F1.0 F1.1 B1.0 B1.1'
        """
        lists: list[tuple[Action, ...]] = []
        for rank in range(self.num_ranks):
            stages = self.stages_of(rank)
            steps = order(self._shape, stages[0])
            lists.append(
                tuple(Action(kind=kind, stage=stages[chunk], micro_batch=number) for kind, chunk, number in steps)
            )
        return replace(self, actions=tuple(lists))

    def in_flight(self, rank: int) -> int:
        """Count the (chunk, micro-batch) pairs a rank holds activations of at most; a chunk is 1/vp of it."""
        if self.actions is not None:
            return most_held(action.kind for action in self.actions[rank])
        return self._builder.in_flight(self._shape, self.stages_of(rank)[0])

    def held(self, rank: int) -> Counts:
        """Count the micro-batches of each chunk that a rank holds at a time, at all times that no other exceeds.

        Where backwards are split, those that only wait for their W count apart, after the others.

        >>> Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=4).held(0)
        ((4, 1), (3, 2))
        >>> Schedule(builder="zb_h1", num_ranks=4, num_micro_batches=8).held(1)
        ((3, 1), (2, 2))
        """
        if self.num_chunks == 1 and not self.splits_backward:
            return ((self.in_flight(rank),),)
        known = self._builder.held(self._shape, self.stages_of(rank)[0]) if self.actions is None else None
        return known or _held(self, rank)

    @property
    def splits_backward(self) -> bool:
        """Whether input gradients and weight gradients are actions of their own."""
        if self.actions is None:
            return self._builder.splits
        return any(action.kind in "IW" for own in self.actions for action in own)

    def bubble_fraction(self) -> float:
        """Share of the step in which a rank waits, if stages are equal, F, I and W as well, and sending is free.

        >>> Schedule(builder="1f1b", num_ranks=4, num_micro_batches=12).bubble_fraction()
        0.2
        """
        waiting = self._builder.waiting(self._shape) if self.actions is None else None
        if waiting is None:
            return self._counted_bubble()
        return waiting / (self._shape.num_units + waiting)

    def _counted_bubble(self) -> float:
        from autoshard.schedule.timeline import unit_bubble  # only here: few schedules need numpy

        return unit_bubble(self.steps(), self._shape)

    @property
    def _builder(self) -> Builder:
        return BUILDERS[self.builder]

    @property
    def _shape(self) -> PipelineShape:
        return PipelineShape(
            num_ranks=self.num_ranks, num_chunks=self.num_chunks, num_micro_batches=self.num_micro_batches
        )


@cache
def _held(schedule: Schedule, rank: int) -> Counts:
    few = 4 * schedule.num_ranks  # more repeat what these do: warm-ups take less than two rounds
    if schedule.actions is None and schedule.num_micro_batches > few:
        return _held(replace(schedule, num_micro_batches=few), rank)
    chunks = {stage: chunk for chunk, stage in schedule.stages_of(rank).items()}
    steps = ((kind, chunks[stage]) for kind, stage, _ in schedule.steps_of(rank))
    return most_held_by_chunk(steps, schedule.num_chunks, splits=schedule.splits_backward)


def _unknown(builder: str) -> str:
    return f"{builder!r} is not a schedule. {nearest(builder, schedule_names())}"
