"""Zero-bubble orders: the backward pass in two halves, so that weight gradients (W) fill what would be waiting.

Only I of a stage lets the stage before go on; W can be done whenever its rank has nothing better to do.
"""

from collections.abc import Mapping

from autoshard.schedule.action import ActionKind
from autoshard.schedule.shape import Counts, PipelineShape, Step, most_held


def h1_order(shape: PipelineShape, position: int) -> list[Step]:
    """Give 1F1B's order with every W put off by as many micro-batches as ranks stand before (ZB-H1).

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


def h1_in_flight(shape: PipelineShape, position: int) -> int:
    """Count what the rank at ``position`` holds: the same on all ranks."""
    return min(shape.num_ranks, shape.num_micro_batches)


def h1_held(shape: PipelineShape, position: int) -> Counts | None:
    """Count what is whole and what waits for W, after an F and after an I of the steady state, if there is one.

    As many wait as ranks stand before; an I adds the one at work.
    """
    if shape.num_micro_batches < shape.num_ranks:
        return None
    whole = shape.num_ranks - position
    return (whole, position), (whole - 1, position + 1)


def h1_waiting(shape: PipelineShape) -> float | None:
    """Give the closed form of the bubble, in micro-batches; None where it does not hold.

    (pp - 1)(F + I - W) as long as W takes no longer than F and I; a third of F + I + W if all three take equal times
    (section 2 of the paper).
    """
    return (shape.num_ranks - 1) / 3 if shape.num_micro_batches >= shape.num_ranks else None


def v_order(shape: PipelineShape, position: int) -> list[Step]:
    """Give the order of ZB-V for the rank whose two chunks are the stages ``position`` and its mirror image.

    A micro-batch goes down the ranks through their first chunks and returns through their second ones, so that the rank
    that begins a forward also ends it, and every rank can hold the same (Qi et al. 2023, arXiv:2401.10241; why a V
    balances what ranks hold: Qi et al. 2024, arXiv:2405.15362). The order is that of PyTorch's ScheduleZBVZeroBubble.
    """
    count = max(shape.num_micro_batches, 2 * shape.num_ranks - 1)  # fewer do not fill the V: leave some out below
    walk = _Walk()
    walk.run(["F0"] * (2 * (shape.num_ranks - position) - 1))
    walk.run(["F1", "F0"] * position)
    walk.run(["F1", "I1", "W1"] * (shape.num_ranks - position))
    ahead = walk.done["F0"] - walk.done["F1"]
    walk.run(["F0", "I0", "W0", "F1", "I1", "W1"] * (count - walk.done["F0"]))
    walk.run(["I0", "W0", "F1", "I1", "W1"] * ahead)
    walk.run(["I0", "I1"] * position)
    walk.run(["I0", "W0"] * (shape.num_ranks - position))
    walk.run(["W1"] * (count - walk.done["W1"]) + ["W0"] * (count - walk.done["W0"]))
    return [step for step in walk.steps if step[2] < shape.num_micro_batches]


_PASSES: Mapping[str, tuple[ActionKind, int]] = {  # kind and chunk
    "F0": ("F", 0),
    "I0": ("I", 0),
    "W0": ("W", 0),
    "F1": ("F", 1),
    "I1": ("I", 1),
    "W1": ("W", 1),
}


class _Walk:
    """Steps so far; each pass of each chunk takes its micro-batches in order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.done = dict.fromkeys(_PASSES, 0)

    def run(self, passes: list[str]) -> None:
        """Append the next micro-batch of each pass named, in order."""
        for name in passes:
            self.steps.append((*_PASSES[name], self.done[name]))
            self.done[name] += 1


def v_in_flight(shape: PipelineShape, position: int) -> int:
    """Count the chunks that a rank holds: twice the ranks, so 1F1B's peak on every rank."""
    if shape.num_micro_batches >= 2 * shape.num_ranks:
        return 2 * shape.num_ranks
    return most_held(kind for kind, _, _ in v_order(shape, position))


def v_waiting(shape: PipelineShape) -> float | None:
    """Give the closed form of the bubble, in chunks; None where it does not hold.

    No rank waits between its first and its last pass if all passes take equal times. The first forward reaches the last
    rank after pp - 1 passes, and a step ends when the last rank does (the paper lets the optimizer start earlier).
    """
    return (shape.num_ranks - 1) / 3 if shape.num_micro_batches >= 2 * shape.num_ranks else None
