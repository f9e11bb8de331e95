"""Pipeline schedules as functions: in which order each pipeline rank runs its actions.

A position is a rank's place in the pipeline: the stage of its first chunk. A chunk is one of its vp stages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoshard.schedule.action import Action, ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What a builder needs to know: pipeline ranks, chunks per rank, micro-batches."""

    num_ranks: int
    num_chunks: int
    num_micro_batches: int

    @property
    def num_units(self) -> int:
        """Forward actions of one rank: micro-batches times chunks."""
        return self.num_micro_batches * self.num_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """A schedule's order, and its closed form of how many forwards come before the first backward."""

    warm_up: Callable[[PipelineShape, int], int]
    needs_chunks: bool
    meaning: str


def order(builder: Builder, shape: PipelineShape, position: int) -> list[tuple[ActionKind, int, int]]:
    """Give ``(kind, chunk, micro-batch)`` of every action of the rank at ``position``, in order.

    After the warm-up, forwards and backwards take turns until the forwards run out.
    """
    warm_up = builder.warm_up(shape, position)
    actions: list[tuple[ActionKind, int, int]] = [("F", *_unit(shape, step)) for step in range(warm_up)]
    for step in range(shape.num_units):
        if warm_up + step < shape.num_units:
            actions.append(("F", *_unit(shape, warm_up + step)))
        actions.append(("B", *_mirrored(shape, step)))
    return actions


def actions_of(builder: Builder, shape: PipelineShape, position: int, stages: Mapping[int, int]) -> tuple[Action, ...]:
    """Give the action list of the rank at ``position`` whose chunks are the stages given."""
    return tuple(
        Action(kind=kind, stage=stages[chunk], micro_batch=micro_batch)
        for kind, chunk, micro_batch in order(builder, shape, position)
    )


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
        warm_up=_warm_up_gpipe,
        needs_chunks=False,
        meaning="all forwards, then all backwards; every micro-batch is in flight",
    ),
    "1f1b": Builder(
        warm_up=_warm_up_1f1b,
        needs_chunks=False,
        meaning="one forward, one backward; at most pp micro-batches in flight",
    ),
    "interleaved": Builder(
        warm_up=_warm_up_interleaved,
        needs_chunks=True,
        meaning="1f1b over vp chunks per rank; the bubble shrinks by vp, more is in flight",
    ),
}
