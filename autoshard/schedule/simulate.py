"""Simulate a step's pipeline: how long it takes, who waits, and what each rank keeps when."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autoshard.errors import InputError, require
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.verify import verify_actions
from autoshard.schedule.waves import KINDS, Delays, Floats, Ints, Waves, coded

_FIRST_TRY = 3  # micro-batches per rank: enough for nearly all to settle; the others are run for twice as many
_MOST_NUMBERS = 2**23  # times that are held at once: 64 MiB


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
    waves, delays = _waves_of(schedule), _delays(schedule, times)
    finished = waves.run(delays)
    total = float(waves.ends_s(finished, delays)[0])
    starts = waves.starts(finished, delays)[:, 0]
    amounts = kept or Kept(stages=(1.0,) * schedule.num_stages)
    return Simulation(
        makespan_s=total,
        ranks=tuple(_rank_run(waves, own, starts[own], delays, total, amounts) for own in waves.numbers),
    )


def makespan_s(schedule: Schedule, delays: Delays) -> Floats:
    """Return how long the micro-batches of each candidate take, from the first action to the end of the last.

    A builder's order is run until a steady unit repeats itself; the other units each take as long as that one.
    """
    total, unit = schedule.num_micro_batches, _unit(schedule)
    short = total if schedule.actions is not None else _reduced(total, unit, _FIRST_TRY * schedule.num_ranks)
    found = np.empty(delays.work_s.shape[2])
    rows = np.arange(len(found))
    while len(rows):
        waves = _waves_of(replace(schedule, num_micro_batches=short))
        size = max(1, _MOST_NUMBERS // waves.bounds[-1])
        for some in np.split(rows, range(size, len(rows), size)):
            own = delays.only(some)
            times = waves.run(own)
            ends = waves.ends_s(times, own)
            more = (total - short) // unit
            found[some] = ends + more * waves.period_s(times, ends) if more else ends
        rows = rows[np.isnan(found[rows])]
        short = _reduced(total, unit, 2 * short)
    return found


def _unit(schedule: Schedule) -> int:
    """Return after how many micro-batches the order of a builder repeats itself."""
    return schedule.num_ranks if schedule.builder == "interleaved" and schedule.num_chunks > 1 else 1


def _reduced(total: int, unit: int, wanted: int) -> int:
    """Return as many micro-batches as wanted or a few more, if whole units are left out."""
    return total if wanted >= total else wanted + (total - wanted) % unit


@lru_cache(maxsize=256)
def _waves_of(schedule: Schedule) -> Waves:
    faults = verify_actions(schedule) if schedule.actions is not None else ()  # what is built is proved by tests
    if faults:
        raise InputError(faults)
    orders = [coded(own) for own in schedule.steps()]
    return Waves.of(orders, schedule.num_stages, schedule.num_micro_batches, _unit(schedule))


def _not_below_zero(name: str, value: float) -> tuple[bool, str, str]:
    return 0.0 <= value < float("inf"), name, f"must be seconds of at least 0, not {value}"


def _check_sizes(schedule: Schedule, times: PipelineTimes, kept: Kept | None) -> None:
    have = {"times.stages": len(times.stages), "kept.stages": len(kept.stages) if kept else schedule.num_stages}
    wanted = schedule.num_stages
    require(*((size == wanted, where, f"must be {wanted}, one per stage, not {size}") for where, size in have.items()))


def delays_of(schedule: Schedule, work_s: Floats, send_s: Floats, receive_s: Floats, *, overlap: bool) -> Delays:
    """Return the seconds along the way of a micro-batch, given those of passes and hops.

    Passes are given by kind, stage and candidate; each hop between two stages of different ranks takes ``send_s`` and
    ``receive_s``, by hop and candidate.
    """
    sent = np.array(schedule.sent_on(), dtype=bool)[:, None]
    none = np.zeros((1, work_s.shape[2]))

    def on_the_way(hops: Floats) -> Floats:
        """Return what the message of each of the 2 S places (and of W, which sends none) takes."""
        down = np.where(sent, hops, 0.0)
        return np.concatenate([down, none, down[::-1], none, none])

    send, receive = on_the_way(send_s), on_the_way(receive_s)
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
        np.array([by_kind[kind] for kind in KINDS], dtype=np.float64)[..., None],
        np.array([[hop.send_s] for hop in hops], dtype=np.float64).reshape(-1, 1),
        np.array([[hop.receive_s] for hop in hops], dtype=np.float64).reshape(-1, 1),
        overlap=times.overlap,
    )


def _rank_run(waves: Waves, own: Ints, start_s: Floats, delays: Delays, total_s: float, kept: Kept) -> RankRun:
    kinds, stages, at = waves.kinds[own], waves.stages[own], waves.places[own]
    work_s = delays.work_s[kinds, stages, 0]
    busy, exposed = float(work_s.sum()), float((delays.before_s[at] + delays.after_s[at]).sum())
    is_forward = kinds == KINDS.index("F")
    # by KINDS: B gives all back, F takes, I and W share what is given back
    change = np.array([-1.0, 1.0, -kept.freed_by_input, kept.freed_by_input - 1.0])[kinds]
    return RankRun(
        start_s=start_s,
        end_s=start_s + work_s,
        busy_s=busy,
        exposed_s=exposed,
        idle_s=total_s - busy - exposed,
        kept_from_s=np.where(is_forward, start_s, start_s + work_s),
        kept=np.cumsum(change * np.array(kept.stages)[stages]),
    )
