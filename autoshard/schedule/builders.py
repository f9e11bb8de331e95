"""Pipeline schedules as functions: in which order each pipeline rank runs its actions.

A position is a rank's place in the pipeline: the stage of its first chunk. A chunk is one of its vp stages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain

from autoshard.schedule.shape import Counts, PipelineShape, Step, unexceeded
from autoshard.schedule.zero_bubble import (
    h1_held,
    h1_in_flight,
    h1_order,
    h1_waiting,
    v_in_flight,
    v_order,
    v_waiting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """A schedule's order, and the closed forms of what it keeps and how long it waits."""

    order: Callable[[PipelineShape, int], list[Step]]  # (kind, chunk, micro-batch) of the rank at a position
    in_flight: Callable[[PipelineShape, int], int]  # (chunk, micro-batch) pairs that the rank at a position holds
    waiting: Callable[[PipelineShape], float | None]  # units of F, I and W that a rank waits; None: no closed form
    held: Callable[[PipelineShape, int], Counts | None] = lambda shape, position: None  # whole, and between I and W
    num_chunks: int | None = 1  # per rank; None: any number
    in_rounds: bool = False  # chunks take turns in rounds of num_ranks micro-batches
    splits: bool = False  # backward into I and W
    turns: bool = False  # odd chunks run from the last rank to the first
    meaning: str

    def stage_of(self, num_ranks: int, rank: int, chunk: int) -> int:
        """Give the stage that a chunk of a rank is, if nobody places it elsewhere."""
        back = self.turns and chunk % 2
        return chunk * num_ranks + (num_ranks - 1 - rank if back else rank)

    def place_of(self, num_ranks: int, stage: int) -> tuple[int, int]:
        """Give the rank and chunk of a stage: the inverse of ``stage_of``."""
        chunk, rank = divmod(stage, num_ranks)
        return (num_ranks - 1 - rank if self.turns and chunk % 2 else rank), chunk


def _one_forward_one_backward(
    warm_up: Callable[[PipelineShape, int], int], shape: PipelineShape, position: int
) -> list[Step]:
    """After the warm-up, forwards and whole backwards take turns until the forwards run out."""
    forwards, backwards = _walks(shape)
    before = warm_up(shape, position)
    pairs = zip(forwards[before:], backwards, strict=False)
    return [*forwards[:before], *chain.from_iterable(pairs), *backwards[shape.num_units - before :]]


def _held_in_flight(warm_up: Callable[[PipelineShape, int], int], shape: PipelineShape, position: int) -> int:
    return min(warm_up(shape, position) + 1, shape.num_units)


def _held_interleaved(shape: PipelineShape, position: int) -> Counts:
    """Count by chunk what is held before each backward of the first round: later ones repeat that."""
    before, turn = _warm_up_interleaved(shape, position), shape.num_ranks * shape.num_chunks
    held = [0] * shape.num_chunks
    for step in range(before):
        held[_unit(shape, step)[0]] += 1
    found = {tuple(held)} if before == shape.num_units else set[tuple[int, ...]]()
    for step in range(min(turn, shape.num_units - before)):
        held[_unit(shape, before + step)[0]] += 1
        found.add(tuple(held))
        held[_mirrored(shape, step)[0]] -= 1
    return unexceeded(found)


def _ends(shape: PipelineShape) -> float:
    # One unit of each other rank, at the two ends (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    return shape.num_ranks - 1


@lru_cache(maxsize=8)  # ranks differ only in where they begin
def _walks(shape: PipelineShape) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Give all forwards and all whole backwards, each in their order."""
    units = range(shape.num_units)
    forwards: list[Step] = [("F", *_unit(shape, step)) for step in units]
    backwards: list[Step] = [("B", *_mirrored(shape, step)) for step in units]
    return tuple(forwards), tuple(backwards)


def _unit(shape: PipelineShape, step: int) -> tuple[int, int]:
    """Walk the chunks in rounds of ``num_ranks`` micro-batches each; with one chunk count micro-batches."""
    if shape.num_chunks == 1:
        return 0, step
    round_index, inside = divmod(step, shape.num_ranks * shape.num_chunks)
    return inside // shape.num_ranks, round_index * shape.num_ranks + inside % shape.num_ranks


def _mirrored(shape: PipelineShape, step: int) -> tuple[int, int]:
    chunk, micro_batch = _unit(shape, step)
    return shape.num_chunks - 1 - chunk, micro_batch


def _warm_up_gpipe(shape: PipelineShape, position: int) -> int:
    return shape.num_units


def _warm_up_1f1b(shape: PipelineShape, position: int) -> int:
    return max(0, min(shape.num_ranks - position - 1, shape.num_units))


def _warm_up_interleaved(shape: PipelineShape, position: int) -> int:
    # Exactly one round of micro-batches leaves nothing to alternate: NxD and Apex run all forwards first
    # (aws-neuron/neuronx-distributed src/neuronx_distributed/pipeline/scheduler.py, get_step_schedule).
    if shape.num_micro_batches == shape.num_ranks:
        return shape.num_units
    before_first_backward = (shape.num_ranks - position - 1) * 2 + (shape.num_chunks - 1) * shape.num_ranks
    return max(0, min(before_first_backward, shape.num_units))


BUILDERS: Mapping[str, Builder] = {
    "gpipe": Builder(
        order=partial(_one_forward_one_backward, _warm_up_gpipe),
        in_flight=partial(_held_in_flight, _warm_up_gpipe),
        waiting=_ends,
        meaning="all forwards, then all backwards; every micro-batch is in flight",
    ),
    "1f1b": Builder(
        order=partial(_one_forward_one_backward, _warm_up_1f1b),
        in_flight=partial(_held_in_flight, _warm_up_1f1b),
        waiting=_ends,
        meaning="one forward, one backward; at most pp micro-batches in flight",
    ),
    "interleaved": Builder(
        order=partial(_one_forward_one_backward, _warm_up_interleaved),
        in_flight=partial(_held_in_flight, _warm_up_interleaved),
        held=_held_interleaved,
        waiting=_ends,
        num_chunks=None,
        in_rounds=True,
        meaning="1f1b over vp chunks per rank; the bubble shrinks by vp, more is in flight",
    ),
    "zb_h1": Builder(
        order=h1_order,
        in_flight=h1_in_flight,
        held=h1_held,
        waiting=h1_waiting,
        splits=True,
        meaning="1f1b with split backwards; a third of its bubble, its peak in flight on all ranks",
    ),
    "zb_v": Builder(
        order=v_order,
        in_flight=v_in_flight,
        waiting=v_waiting,
        num_chunks=2,
        splits=True,
        turns=True,
        meaning="split backwards, 2 chunks per rank in a V; a sixth of 1f1b's bubble, its peak on all ranks",
    ),
}
