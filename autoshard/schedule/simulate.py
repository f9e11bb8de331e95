"""Simulate a step's pipeline: how long it takes, who waits, and what each rank keeps when."""

from dataclasses import dataclass

import numpy as np

from autoshard.errors import InputError, require
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.timeline import KINDS, Delays, Floats, Lane, makespan_s, timeline
from autoshard.schedule.verify import verify_actions


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that a stage spends on one micro-batch, by pass."""

    forward_s: float
    input_s: float
    weight_s: float
    backward_s: float | None = None  # whole; None: its two halves one after the other

    def __post_init__(self) -> None:
        """Refuse negative times."""
        require(*(_not_below_zero(name, getattr(self, name) or 0.0) for name in self.__slots__))

    @property
    def whole_backward_s(self) -> float:
        """Seconds of a backward pass that is not split."""
        return self.input_s + self.weight_s if self.backward_s is None else self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Seconds that a message between two neighbouring stages takes, either way, if they lie on different ranks."""

    send_s: float = 0.0
    receive_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative times."""
        require(_not_below_zero("send_s", self.send_s), _not_below_zero("receive_s", self.receive_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What everything takes: each stage, each hop from a stage to the next, and whether ranks compute meanwhile."""

    stages: tuple[StageTimes, ...]
    hops: tuple[Hop, ...] = ()  # none: sending is free
    overlap: bool = True  # False: a rank that sends or receives does nothing else

    def __post_init__(self) -> None:
        """Refuse hops that do not lie between the stages."""
        between = len(self.stages) - 1
        message = f"must be one for each of {between} neighbours, or none, not {len(self.hops)}"
        require((len(self.hops) in (0, between), "hops", message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What each stage keeps of a micro-batch from the start of its F to the end of its B, or of its W."""

    stages: tuple[float, ...]  # in any unit: bytes, layers, 1 for each
    freed_by_input: float = 0.0  # the share that I frees already, where the backward is split

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        share = self.freed_by_input
        require((0.0 <= share <= 1.0, "freed_by_input", f"must be a share from 0 to 1, not {share}"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRun:
    """The step of one pipeline rank."""

    start_s: Floats  # of its actions, in the order of its list
    end_s: Floats
    busy_s: float
    exposed_s: float  # sending and receiving, while it computes nothing
    idle_s: float
    kept_from_s: Floats  # when what it keeps changes
    kept: Floats  # how much it keeps from then on

    @property
    def peak(self) -> float:
        """What the rank keeps at most, in the unit of ``Kept``."""
        return float(self.kept.max(initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """The pipelined part of a step, from the first action to the end of the last."""

    makespan_s: float
    ranks: tuple[RankRun, ...]

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which ranks wait, over all of them."""
        waited = sum(run.idle_s for run in self.ranks)
        return waited / (self.makespan_s * len(self.ranks)) if self.makespan_s else 0.0


def simulate(schedule: Schedule, times: PipelineTimes, kept: Kept | None = None) -> Simulation:
    """Run a schedule; ``kept`` is 1 per stage and micro-batch if nobody says otherwise.

    >>> unit = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0)
    >>> for name in ("1f1b", "zb_h1"):
    ...     schedule = Schedule(builder=name, num_ranks=4, num_micro_batches=8)
    ...     run = simulate(schedule, PipelineTimes(stages=(unit,) * 4))
    ...     print(name, run.makespan_s, [rank.idle_s for rank in run.ranks], [rank.peak for rank in run.ranks])
    1f1b 33.0 [9.0, 9.0, 9.0, 9.0] [4.0, 3.0, 2.0, 1.0]
    zb_h1 27.0 [3.0, 3.0, 3.0, 3.0] [4.0, 4.0, 4.0, 4.0]
    """
    _check_sizes(schedule, times, kept)
    faults = verify_actions(schedule) if schedule.actions is not None else ()  # what is built is proved by tests
    if faults:
        raise InputError(faults)
    lanes = timeline(schedule.steps(), schedule.num_micro_batches, _delays(schedule, times))
    total = makespan_s(lanes)
    amounts = kept or Kept(stages=(1.0,) * schedule.num_stages)
    return Simulation(makespan_s=total, ranks=tuple(_rank_run(lane, total, amounts) for lane in lanes))


def _not_below_zero(name: str, value: float) -> tuple[bool, str, str]:
    return 0.0 <= value < float("inf"), name, f"must be seconds of at least 0, not {value}"


def _check_sizes(schedule: Schedule, times: PipelineTimes, kept: Kept | None) -> None:
    have = {"times.stages": len(times.stages), "kept.stages": len(kept.stages) if kept else schedule.num_stages}
    wanted = schedule.num_stages
    require(*((size == wanted, where, f"must be {wanted}, one per stage, not {size}") for where, size in have.items()))


def delays_of(schedule: Schedule, work_s: Floats, send_s: Floats, receive_s: Floats, *, overlap: bool) -> Delays:
    """Lay the seconds of passes (by kind and stage) and of hops along the way of a micro-batch.

    A last axis may hold many candidates'.
    """
    send, receive = _on_the_way(schedule, send_s), _on_the_way(schedule, receive_s)
    nothing = np.zeros_like(send)
    return Delays(
        work_s=work_s,
        # what a place receives was sent by the place before it
        before_s=nothing if overlap else np.roll(receive, 1, axis=0),
        after_s=nothing if overlap else send,
        travel_s=send + receive if overlap else send,
    )


def _delays(schedule: Schedule, times: PipelineTimes) -> Delays:
    by_kind = {
        "F": [stage.forward_s for stage in times.stages],
        "I": [stage.input_s for stage in times.stages],
        "W": [stage.weight_s for stage in times.stages],
        "B": [stage.whole_backward_s for stage in times.stages],
    }
    hops = times.hops or (Hop(),) * (len(times.stages) - 1)
    return delays_of(
        schedule,
        np.array([by_kind[kind] for kind in KINDS], dtype=np.float64),
        np.array([hop.send_s for hop in hops], dtype=np.float64),
        np.array([hop.receive_s for hop in hops], dtype=np.float64),
        overlap=times.overlap,
    )


def _on_the_way(schedule: Schedule, hops: Floats) -> Floats:
    """Return what the message of each of the 2 S places (and of W, which sends none) takes."""
    sent = np.array(schedule.sent_on(), dtype=bool)
    down = np.where(sent.reshape(-1, *[1] * (hops.ndim - 1)), hops, 0.0)
    none = np.zeros((1, *hops.shape[1:]))
    return np.concatenate([down, none, down[::-1], none, none])


def _rank_run(lane: Lane, total_s: float, kept: Kept) -> RankRun:
    busy = float((lane.end_s - lane.start_s).sum())
    is_forward = lane.kinds == KINDS.index("F")
    # by KINDS: B gives all back, F takes, I and W share what is given back
    change = np.array([-1.0, 1.0, -kept.freed_by_input, kept.freed_by_input - 1.0])[lane.kinds]
    return RankRun(
        start_s=lane.start_s,
        end_s=lane.end_s,
        busy_s=busy,
        exposed_s=lane.exposed_s,
        idle_s=total_s - busy - lane.exposed_s,
        kept_from_s=np.where(is_forward, lane.start_s, lane.end_s),
        kept=np.cumsum(change * np.array(kept.stages)[lane.stages]),
    )
