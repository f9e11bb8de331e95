"""Simulate a step's pipeline: how long it takes, who waits, and what each rank keeps when."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autoshard.errors import InputError, require
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.verify import verify_actions
from autoshard.schedule.waves import KINDS, ROUNDING, Delays, Floats, Waves, coded

_FIRST_TRY = 3  # micro-batches per rank: enough for nearly all to settle; the others are run for twice as many
_MOST_NUMBERS = 2**23  # times that are held at once: 64 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Seconds of a micro-batch in each stage, by pass, and of its message to the next stage, which may be free.

    A whole backward takes as long as its halves. Messages between neighbouring stages on one rank take nothing.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    send_s: tuple[float, ...] = ()  # one for each stage but the last, either way; empty: nothing
    receive_s: tuple[float, ...] = ()
    overlap: bool = True  # False: a rank that sends or receives does nothing else

    def __post_init__(self) -> None:
        count = len(self.forward_s)
        sizes = {"forward_s": (count,), "input_s": (count,), "weight_s": (count,)}
        sizes |= dict.fromkeys(("send_s", "receive_s"), (0, count - 1))
        for name, allowed in sizes.items():
            times: tuple[float, ...] = getattr(self, name)
            wrong = next((time_s for time_s in times if not 0.0 <= time_s < float("inf")), None)
            require(
                (len(times) in allowed, name, f"must be {allowed[-1]} for {count} stages, not {len(times)}"),
                (wrong is None, name, f"must be seconds of at least 0, not {wrong}"),
            )


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
        """What the rank keeps at most, in the unit of what is kept."""
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


def simulate(schedule: Schedule, times: PipelineTimes, kept: Sequence[float] = ()) -> Simulation:
    """Run a schedule; ``kept`` is what a stage keeps of a micro-batch until the end of its B or W (1 if not given).

    >>> times = PipelineTimes(forward_s=(1.0,) * 4, input_s=(1.0,) * 4, weight_s=(1.0,) * 4)
    >>> for name in ("1f1b", "zb_h1"):
    ...     run = simulate(Schedule(builder=name, num_ranks=4, num_micro_batches=8), times)
    ...     print(name, run.makespan_s, [rank.idle_s for rank in run.ranks], [rank.peak for rank in run.ranks])
    1f1b 33.0 [9.0, 9.0, 9.0, 9.0] [4.0, 3.0, 2.0, 1.0]
    zb_h1 27.0 [3.0, 3.0, 3.0, 3.0] [4.0, 4.0, 4.0, 4.0]
    """
    stages = schedule.num_stages
    require(
        (len(times.forward_s) == stages, "times", f"are those of {len(times.forward_s)} stages, not of {stages}"),
        (len(kept) in (0, stages), "kept", f"must be {stages}, one per stage, not {len(kept)}"),
    )
    forward, inputs, weight = (np.array(column)[:, None] for column in (times.forward_s, times.input_s, times.weight_s))
    work_s = {"F": forward, "I": inputs, "W": weight, "B": inputs + weight}
    hops = (np.array(column or (0.0,) * (stages - 1))[:, None] for column in (times.send_s, times.receive_s))
    waves = _waves_of(schedule)
    delays = delays_of(schedule, np.array([work_s[kind] for kind in KINDS]), *hops, overlap=times.overlap)
    finished = waves.run(delays)
    total = float(waves.ends_s(finished, delays)[0])
    ready = np.maximum(finished[0, waves.before], finished[1, waves.sender])
    starts: Floats = (ready + delays.before_s[waves.places])[:, 0]
    amounts: Floats = np.array(kept or (1.0,) * stages, dtype=np.float64)
    ranks: list[RankRun] = []
    for actions in waves.numbers:
        kinds, of, at = waves.kinds[actions], waves.stages[actions], waves.places[actions]
        change: Floats = np.array([-1.0, 1.0, 0.0, -1.0])[kinds] * amounts[of]  # by KINDS
        spent_s: Floats = delays.work_s[kinds, of, 0]
        start_s, end_s = starts[actions], starts[actions] + spent_s
        busy, exposed = float(spent_s.sum()), float((delays.before_s[at] + delays.after_s[at]).sum())
        ranks.append(
            RankRun(
                start_s=start_s,
                end_s=end_s,
                busy_s=busy,
                exposed_s=exposed,
                idle_s=total - busy - exposed,
                kept_from_s=np.where(kinds == KINDS.index("F"), start_s, end_s),
                kept=np.cumsum(change),
            )
        )
    return Simulation(makespan_s=total, ranks=tuple(ranks))


def makespan_s(schedule: Schedule, delays: Delays) -> Floats:
    """Return how long the micro-batches of each candidate take, from the first action to the end of the last.

    A builder's order is run until a steady unit repeats itself; the other units each take as long as that one.
    """
    total = schedule.num_micro_batches
    short = _reduced(schedule, _FIRST_TRY * schedule.num_ranks)
    spans_s = np.empty(delays.work_s.shape[2])
    rows = np.arange(len(spans_s))
    while len(rows):
        waves = _waves_of(replace(schedule, num_micro_batches=short))
        size = max(1, _MOST_NUMBERS // waves.bounds[-1])
        for batch in np.split(rows, range(size, len(rows), size)):
            batch_delays = Delays(**{name: getattr(delays, name)[..., batch] for name in Delays.__slots__})
            times = waves.run(batch_delays)
            ends = waves.ends_s(times, batch_delays)
            if short < total:  # NaN where no unit repeats the one before yet
                steps = times[0, waves.window] - times[0, waves.window_before]
                steady = len(steps) and np.ptp(steps, axis=0) <= ROUNDING * ends
                more = (total - short) // schedule.unit
                ends += more * np.where(steady, steps.mean(axis=0) if len(steps) else 0.0, np.nan)
            spans_s[batch] = ends
        rows = rows[np.isnan(spans_s[rows])]
        short = _reduced(schedule, 2 * short)
    return spans_s


def _reduced(schedule: Schedule, least: int) -> int:
    """Return a number of micro-batches, ``least`` or a few more, if whole units are left out."""
    total = schedule.num_micro_batches
    return total if schedule.actions is not None or least >= total else least + (total - least) % schedule.unit


def long_paths(schedule: Schedule, delays: Delays, sent: Delays, softness_s: float) -> tuple[Floats, Floats]:
    """Return a weighted average of paths for each candidate, which takes nearly as long as the makespan: a flow.

    It is how often the flow runs F, I and W of every stage, [flow, pass, stage], and how many sends it waits for,
    counted in ``sent``: the delays of a candidate whose passes take nothing. Whatever passes and sends take, a step
    takes no less than any flow; a whole backward is both its halves. Paths that are shorter than others by
    ``softness_s`` have a smaller part, and the softer, the less that of a stage depends on small changes.
    """
    total, short = schedule.num_micro_batches, _reduced(schedule, _FIRST_TRY * schedule.num_ranks)
    waves = _waves_of(replace(schedule, num_micro_batches=short))
    while short < total and not len(waves.window):
        short = _reduced(schedule, 2 * short)
        waves = _waves_of(replace(schedule, num_micro_batches=short))
    more = (total - short) // schedule.unit
    flow, handed, passing = waves.flow(delays, more, softness_s)
    before_s, after_s, travel_s = (column[waves.places, 0] for column in (sent.before_s, sent.after_s, sent.travel_s))
    waits = (before_s[:, None] * flow).sum(axis=0)
    for parts, previous, sent_s in zip(handed, (waves.before, waves.sender), (after_s, travel_s), strict=True):
        waits += (np.append(sent_s, 0.0)[previous, None] * parts).sum(axis=0)
    if more:
        flow = flow.copy()
        np.add.at(flow, waves.units, more * passing[:, None])
        waits += more * (before_s + after_s)[waves.units].sum(axis=1) @ passing
    counts = np.zeros((len(waits), 3, schedule.num_stages))
    for number, names in enumerate(("F", "IB", "WB")):
        runs = np.flatnonzero(np.isin(waves.kinds, [KINDS.index(name) for name in names]))
        for column, weights in enumerate(flow[runs].T):
            counts[column, number] = np.bincount(waves.stages[runs], weights=weights, minlength=schedule.num_stages)
    return counts, waits


@lru_cache(maxsize=256)
def _waves_of(schedule: Schedule) -> Waves:
    faults = verify_actions(schedule) if schedule.actions is not None else ()  # what is built is proved by tests
    if faults:
        raise InputError(faults)
    orders = [coded(schedule.steps_of(rank)) for rank in range(schedule.num_ranks)]
    return Waves.of(orders, schedule.num_stages, schedule.num_micro_batches, schedule.unit)


def delays_of(schedule: Schedule, work_s: Floats, send_s: Floats, receive_s: Floats, *, overlap: bool) -> Delays:
    """Return the seconds along the way of a micro-batch, given those of passes and hops.

    Passes are given by kind, stage and candidate; each hop between two stages of different ranks takes ``send_s`` and
    ``receive_s``, by hop and candidate.
    """
    ranks = np.array([schedule.place_of(stage)[0] for stage in range(schedule.num_stages)])
    sent = (ranks[1:] != ranks[:-1])[:, None]
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
