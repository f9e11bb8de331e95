"""The predicted step, moment by moment: every action of every pipeline rank, what it sends, what its rank holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.schedule.waves import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What an action of one kind takes at one stage, and which other ranks it takes its input from and sends to."""

    parts: Mapping[str, float] = field(hash=False)  # seconds
    takes_from: int | None
    sends_to: int | None

    @property
    def time_s(self) -> float:
        """Seconds of all parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTrace:
    """One pipeline rank. The arrays have an entry for each of its actions, in order."""

    kinds: str  # letters: F, B, I, W
    stages: Ints
    micro_batches: Ints
    start_s: Floats
    end_s: Floats
    held_from_s: Floats  # when it changes what the rank holds
    held_bytes: Ints  # what the rank holds from then on
    idle_bytes: int  # what it holds while no micro-batch is in flight
    predicted_bytes: int  # its predicted peak
    busy_s: float  # in actions
    sending_s: float  # sending and receiving, while it computes nothing

    @property
    def most_bytes(self) -> int:
        """What it holds at most.

        That is the predicted peak, but where backwards are split: the prediction adds the most that is kept and the
        most that waits from I to W, which some schedules do not reach at the same time.
        """
        return int(self.held_bytes.max(initial=self.idle_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of the step after the pipeline; the next begins when the slowest rank has ended this one."""

    part: str  # of the prediction's seconds
    name: str
    start_s: float
    seconds: tuple[float, ...]  # by pipeline rank

    @property
    def end_s(self) -> float:
        """When its slowest rank ends."""
        return self.start_s + max(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """One step: the pipelined part, then the phases after it."""

    passes: Mapping[tuple[str, int], Pass]  # by kind and stage
    ranks: tuple[RankTrace, ...]
    phases: tuple[Phase, ...]
    send_s: float  # of each message between ranks
    receive_s: float  # for how long it then holds the receiver
    hides_sends: bool  # otherwise the sender does nothing else meanwhile

    @property
    def makespan_s(self) -> float:
        """When the last action of the pipeline ends."""
        return max(float(rank.end_s[-1]) for rank in self.ranks)

    @property
    def end_s(self) -> float:
        """When the step ends."""
        return self.phases[-1].end_s if self.phases else self.makespan_s
