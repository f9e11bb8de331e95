"""Where a drawn step is cut: it shows how the pipeline fills, two periods and how it drains, and leaves out between."""

from dataclasses import dataclass

import numpy as np

from autoshard.cost.timeline import StepTimeline
from autoshard.schedule.waves import Floats

_PERIODS = 2  # that are drawn after the pipeline is full
_LEAST_PERIODS = 4  # that are left out: a cut that hides fewer saves little
_GAP = 0.05  # of what is drawn: the width of the cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What lies between two moments of a step, drawn as a gap of ``gap_s`` however long it is."""

    from_s: float
    until_s: float
    gap_s: float

    def drawn_s(self, end_s: float) -> float:
        """Return the length of the drawing of a step that ends at ``end_s``."""
        return end_s - (self.until_s - self.from_s) + self.gap_s

    def place(self, times_s: Floats) -> Floats:
        """Return where moments lie in the drawing.

        >>> Stretch(from_s=10.0, until_s=90.0, gap_s=2.0).place(np.array([5.0, 50.0, 95.0])).tolist()
        [5.0, 11.0, 17.0]
        """
        share = (times_s - self.from_s) / (self.until_s - self.from_s)
        return np.where(
            times_s <= self.from_s,
            times_s,
            self.from_s + np.where(share < 1, share * self.gap_s, times_s - self.until_s + self.gap_s),
        )

    def hides(self, starts_s: Floats, ends_s: Floats) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
        """Return which of the actions run wholly inside."""
        return (starts_s >= self.from_s) & (ends_s <= self.until_s)


def stretch_of(step: StepTimeline) -> Stretch | None:
    """Return the part of a step that repeats itself; None where a drawing of the whole step is as good."""
    backward = [[rank.kinds.find(kind) for kind in "BI" if kind in rank.kinds] for rank in step.ranks]
    if not all(backward):
        return None
    period_s = max((rank.busy_s + rank.sending_s) / (1 + int(rank.micro_batches.max())) for rank in step.ranks)
    filled_s = max(float(rank.start_s[min(first)]) for rank, first in zip(step.ranks, backward, strict=True))
    drains_s = min(float(rank.end_s[rank.kinds.rfind("F")]) for rank in step.ranks)
    from_s = filled_s + _PERIODS * period_s
    if drains_s - from_s < _LEAST_PERIODS * period_s:
        return None
    return Stretch(from_s=from_s, until_s=drains_s, gap_s=_GAP * (from_s + step.end_s - drains_s))
