"""A pipeline schedule as data: a builder's name with its parameters, or the action lists themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import nearest, require
from autoshard.schedule.action import ActionKind, ActionLists
from autoshard.schedule.builders import BUILDERS, Builder, PipelineShape, actions_of
from autoshard.schedule.play import play

# A backward does the work of two forwards; the counted bubble of hand-written lists uses these.
UNIT_TIMES: Mapping[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


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
    placement: tuple[tuple[int, int], ...] | None = None  # stage -> (rank, chunk); None: s % pp, s // pp
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
            (
                self._chunks_fit(),
                "num_chunks",
                f"{self.builder} runs one stage per rank, not {self.num_chunks}. Use interleaved",
            ),
            (
                self._rounds_fit(),
                "num_micro_batches",
                f"interleaved needs a multiple of {self.num_ranks} ranks, not {self.num_micro_batches}",
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
        return self.actions is not None or BUILDERS[self.builder].needs_chunks or self.num_chunks == 1

    def _rounds_fit(self) -> bool:
        in_rounds = BUILDERS[self.builder].needs_chunks and self.actions is None and self.num_chunks > 1
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
        return self.placement[stage] if self.placement else (stage % self.num_ranks, stage // self.num_ranks)

    def stages_of(self, rank: int) -> dict[int, int]:
        """Map each chunk of a rank to its stage."""
        if self.placement is None:
            return {chunk: chunk * self.num_ranks + rank for chunk in range(self.num_chunks)}
        return {chunk: stage for stage, (owner, chunk) in enumerate(self.placement) if owner == rank}

    def action_lists(self) -> ActionLists:
        """Give the actions of every pipeline rank, in order."""
        if self.actions is not None:
            return self.actions
        lists = ((stages[0], stages) for stages in map(self.stages_of, range(self.num_ranks)))
        return tuple(actions_of(self._builder, self._shape, position, stages) for position, stages in lists)

    def in_flight(self, rank: int) -> int:
        """Count the (chunk, micro-batch) pairs a rank holds activations of at most; a chunk is 1/vp of it."""
        if self.actions is not None:
            return _count_in_flight([action.kind for action in self.actions[rank]])
        warm_up = self._builder.warm_up(self._shape, self.stages_of(rank)[0])
        return min(warm_up + 1, self._shape.num_units)

    def bubble_fraction(self) -> float:
        """Share of the step in which a rank waits, if all stages are equal and sending is free.

        >>> Schedule(builder="1f1b", num_ranks=4, num_micro_batches=12).bubble_fraction()
        0.2
        """
        if self.actions is not None:
            return self._counted_bubble(self.actions)
        # Closed form: a rank works num_units units and waits for num_ranks - 1 of them at its two ends
        # (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
        waiting = self.num_ranks - 1
        return waiting / (self._shape.num_units + waiting)

    def _counted_bubble(self, lists: ActionLists) -> float:
        played = play(lists, UNIT_TIMES)
        busy = sum(UNIT_TIMES[action.kind] for actions in lists for action in actions) / self.num_ranks
        return 1 - busy / played.makespan if played.makespan else 0.0

    @property
    def _builder(self) -> Builder:
        return BUILDERS[self.builder]

    @property
    def _shape(self) -> PipelineShape:
        return PipelineShape(
            num_ranks=self.num_ranks, num_chunks=self.num_chunks, num_micro_batches=self.num_micro_batches
        )


def _unknown(builder: str) -> str:
    return f"{builder!r} is not a schedule. {nearest(builder, schedule_names())}"


def _count_in_flight(kinds: Sequence[str]) -> int:
    held = peak = 0
    for kind in kinds:
        held += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
        peak = max(peak, held)
    return peak
