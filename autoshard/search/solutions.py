"""What was found for an outer point, and where it stands among others."""

from dataclasses import dataclass, replace

from autoshard.blocks.cutting import Terms
from autoshard.plan.candidate import Candidate, even_stages
from autoshard.search.chosen import Chosen
from autoshard.search.families import Asked
from autoshard.search.points import Group
from autoshard.search.space import SIZES

TIE_DIGITS = 9  # times that agree in so many digits count as equal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """An outer point with the best filling of its stages, and what that takes."""

    layout: int
    group: Group  # of this point alone
    chosen: Chosen
    value: float  # of what is minimised

    @property
    def order(self) -> tuple[float, ...]:
        """Where it stands: by time, then by memory, then by its sizes and choices."""
        space, row = self.group.legal.variant.space, int(self.group.places[0])
        sizes = [float(space.rows[key][row]) for key in (*SIZES, "vp")]
        base = space.base
        choices = [
            float(space.sp is False),
            float(base.zero != 1),
            float(base.zero),
            float(base.cp_order != "contiguous"),
            float(base.cp_kind != "ring"),
        ]
        numbers = (self.value, float(self.chosen.time_s[0]))
        times = [float(f"{number:.{TIE_DIGITS}g}") for number in numbers]
        return (*times, float(self.chosen.peak_bytes[0]), *sizes, *choices)

    @property
    def candidate(self) -> Candidate:
        """The point with its stages, in text."""
        candidate = self.group.legal.variant.space.at(int(self.group.places[0]), 0)
        stages, kinds = self.chosen.stages(0), self.group.family.kinds
        uneven = stages != even_stages(sum(stages), len(stages))
        recompute = self.chosen.recompute(0, kinds)
        return replace(candidate, stages=stages if uneven else None, recompute=recompute)

    @property
    def told(self) -> tuple[Terms, Asked]:
        """What the solver was asked for it, and its answer."""
        return self.group.legal.terms, self.group.family.asked
