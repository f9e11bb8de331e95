"""Actions of pipeline ranks, and schedules as functions: the order in which each rank runs its actions.

A schedule is one entry of ``BUILDERS``, or a ``Builder`` in a file of the user's own. All else (what ranks hold, how
long they wait) is counted from its order. A position is a rank's place in the pipeline: the stage of its first chunk.
A chunk is one of the vp stages of a rank.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, product
from typing import Literal, cast, get_args

from autoshard.errors import InputError, in_range, require
from autoshard.extensions import EXTENSIONS

ActionKind = Literal["F", "B", "I", "W"]
Step = tuple[ActionKind, int, int]  # an action without its class: kind, stage (in an order: chunk), micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """``F`` forward, ``B`` whole backward, ``I`` and ``W`` its halves (input and weight gradients).

    >>> str(Action(kind="F", stage=3, micro_batch=0)), Action.parse("B3.0").stage
    ('F3.0', 3)
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        known = self.kind in ("F", "B", "I", "W")
        require((known, "kind", f"must be F, B, I or W, not {self.kind}"), *in_range(self, "stage", "micro_batch"))

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form, for example ``F3.0``: forward of stage 3, micro-batch 0."""
        match = re.fullmatch(r"([FBIW])([0-9]{1,9})\.([0-9]{1,9})", text)
        if match is None:
            raise InputError.of("", f"{text!r} is not an action. Write F<stage>.<micro-batch>, or B, I, W: F3.0")
        kind, stage, micro_batch = match.groups()
        return cls(kind=cast(ActionKind, kind), stage=int(stage), micro_batch=int(micro_batch))

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


ActionLists = tuple[tuple[Action, ...], ...]  # one list per pipeline rank, in the order of execution


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What an order depends on: pipeline ranks, chunks per rank, micro-batches."""

    num_ranks: int
    num_chunks: int
    num_micro_batches: int

    @property
    def num_units(self) -> int:
        """Forward actions of one rank: micro-batches times chunks."""
        return self.num_micro_batches * self.num_chunks


_TRIED = 8  # micro-batches: an order of two ranks repeats itself from there on
Order = Callable[[PipelineShape, int], list[Step]]  # (kind, chunk, micro-batch) of the rank at a position, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """A schedule: the order of each rank, and where its stages lie.

    After ``4 * num_ranks`` micro-batches an order must repeat itself, micro-batch by micro-batch or round by round.
    """

    order: Order
    num_chunks: int | None = 1  # per rank; None: any number
    in_rounds: bool = False  # chunks take turns in rounds of num_ranks micro-batches
    turns: bool = False  # odd chunks run from the last rank to the first
    meaning: str

    def __post_init__(self) -> None:
        """Refuse an order that leaves work out, or does some twice: tried on a small pipeline."""
        shape = PipelineShape(num_ranks=2, num_chunks=self.num_chunks or 1, num_micro_batches=_TRIED)
        for position in range(shape.num_ranks):
            faults = list(_work_faults(shape, Counter(self.order(shape, position))))
            more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
            where = f"rank {position} of {shape.num_ranks} with {_TRIED} micro-batches"
            require((not faults, "order", f"{where}: {''.join(faults[:1])}{more}"))

    @property
    def splits(self) -> bool:
        """Whether backwards are two actions, I and W."""
        smallest = PipelineShape(num_ranks=1, num_chunks=self.num_chunks or 1, num_micro_batches=1)
        return any(kind == "I" for kind, _, _ in self.order(smallest, 0))


def _work_faults(shape: PipelineShape, counts: Counter[Step]) -> Iterator[str]:
    """Yield what an order does not do exactly once for each chunk and micro-batch, or does besides."""
    for chunk, number in product(range(shape.num_chunks), range(shape.num_micro_batches)):
        unit = f"(chunk {chunk}, micro-batch {number})"
        forward, whole, *halves = (counts.pop((kind, chunk, number), 0) for kind in get_args(ActionKind))
        if forward != 1:
            yield f"{forward} forwards F of {unit}, not one"
        if (whole, *halves) not in ((1, 0, 0), (0, 1, 1)):
            yield f"the backward of {unit} must be one B, or one I and one W"
    yield from (f"{step} is no work of this pipeline" for step in counts)


def _alternating(warm_up: Callable[[PipelineShape, int], int], shape: PipelineShape, position: int) -> list[Step]:
    """After the warm-up, forwards and whole backwards alternate until the forwards run out."""
    forwards, backwards = _forwards_and_backwards(shape)
    before = max(0, min(warm_up(shape, position), shape.num_units))
    pairs = zip(forwards[before:], backwards, strict=False)
    return [*forwards[:before], *chain.from_iterable(pairs), *backwards[shape.num_units - before :]]


@lru_cache(maxsize=8)  # ranks differ only in where they begin
def _forwards_and_backwards(shape: PipelineShape) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return all forwards and all whole backwards; chunks take turns in rounds of ``num_ranks`` micro-batches."""
    forwards: list[Step] = []
    backwards: list[Step] = []
    for unit in range(shape.num_units):
        round_index, inside = divmod(unit, shape.num_ranks * shape.num_chunks)
        chunk, number = inside // shape.num_ranks, round_index * shape.num_ranks + inside % shape.num_ranks
        forwards.append(("F", chunk, number))
        backwards.append(("B", shape.num_chunks - 1 - chunk, number))
    return tuple(forwards), tuple(backwards)


def _warm_up_interleaved(shape: PipelineShape, position: int) -> int:
    # Exactly one round of micro-batches leaves nothing to alternate: NxD and Apex run all forwards first
    # (aws-neuron/neuronx-distributed src/neuronx_distributed/pipeline/scheduler.py, get_step_schedule).
    if shape.num_micro_batches == shape.num_ranks:
        return shape.num_units
    return (shape.num_ranks - position - 1) * 2 + (shape.num_chunks - 1) * shape.num_ranks


def _zb_h1(shape: PipelineShape, position: int) -> list[Step]:
    """Return 1F1B's order with every W put off by as many micro-batches as ranks stand before (ZB-H1).

    Then all ranks hold as many micro-batches as the first one does under 1F1B
    (Qi et al. 2023, arXiv:2401.10241, section 2.1).
    """
    count = shape.num_micro_batches
    warm_up = max(0, min(shape.num_ranks - position - 1, count))
    steps: list[Step] = [("F", 0, number) for number in range(warm_up)]
    for number in range(count):
        if warm_up + number < count:
            steps.append(("F", 0, warm_up + number))
        steps.append(("I", 0, number))
        if number >= position:
            steps.append(("W", 0, number - position))
    return steps + [("W", 0, number) for number in range(max(0, count - position), count)]


def _zb_v(shape: PipelineShape, position: int) -> list[Step]:
    """Return the order of ZB-V for the rank whose two chunks are the stages ``position`` and its mirror image.

    A micro-batch goes down the ranks through their first chunks and returns through their second ones, so that the rank
    that begins a forward also ends it, and every rank can hold the same (Qi et al. 2023, arXiv:2401.10241; why a V
    balances what ranks hold: Qi et al. 2024, arXiv:2405.15362). The order is that of PyTorch's ScheduleZBVZeroBubble.
    """
    count = max(shape.num_micro_batches, 2 * shape.num_ranks - 1)  # fewer do not fill the V: leave some out below
    steps: list[Step] = []
    passes_of_rank: list[tuple[ActionKind, int]] = [("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    done, (f0, i0, w0, f1, i1, w1) = dict.fromkeys(passes_of_rank, 0), passes_of_rank

    def run(passes: list[tuple[ActionKind, int]], times: int) -> None:
        """Append the next micro-batch of each of these passes in turn, so many times over."""
        for kind, chunk in passes * times:
            steps.append((kind, chunk, done[kind, chunk]))
            done[kind, chunk] += 1

    run([f0], 2 * (shape.num_ranks - position) - 1)
    run([f1, f0], position)
    run([f1, i1, w1], shape.num_ranks - position)
    ahead = done[f0] - done[f1]
    run([f0, i0, w0, f1, i1, w1], count - done[f0])
    run([i0, w0, f1, i1, w1], ahead)
    run([i0, i1], position)
    run([i0, w0], shape.num_ranks - position)
    run([w1], count - done[w1])
    run([w0], count - done[w0])
    return [step for step in steps if step[2] < shape.num_micro_batches]


BUILDERS: Mapping[str, Builder] = {
    "gpipe": Builder(
        order=partial(_alternating, lambda shape, position: shape.num_units),
        meaning="all forwards, then all backwards; every micro-batch is in flight",
    ),
    "1f1b": Builder(
        order=partial(_alternating, lambda shape, position: shape.num_ranks - position - 1),
        meaning="one forward, one backward; at most pp micro-batches in flight",
    ),
    "interleaved": Builder(
        order=partial(_alternating, _warm_up_interleaved),
        num_chunks=None,
        in_rounds=True,
        meaning="1f1b over vp chunks per rank; the bubble shrinks by vp, more is in flight",
    ),
    "zb_h1": Builder(
        order=_zb_h1,
        meaning="1f1b with split backwards; a third of its bubble, its peak in flight on all ranks",
    ),
    "zb_v": Builder(
        order=_zb_v,
        num_chunks=2,
        turns=True,
        meaning="split backwards, 2 chunks per rank in a V; a sixth of 1f1b's bubble, its peak on all ranks",
    ),
}


def builders() -> Mapping[str, Builder]:
    """Return all schedules by name, with those of files that ``--extend`` has loaded."""
    loaded = EXTENSIONS.of(Builder, BUILDERS)
    return {**BUILDERS, **loaded} if loaded else BUILDERS
