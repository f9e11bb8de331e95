"""What is known of the space of one engine after a search: its points, its best solutions, and their plans."""

from dataclasses import dataclass

from autoshard.plan.explanation import Certificate
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Engine
from autoshard.search.ask.choice.evenness import EXACT, evened
from autoshard.search.bound.points import Solution
from autoshard.search.bound.pool import Pool
from autoshard.search.bound.request import Request
from autoshard.search.fill.stage_filling import Goal

# Times of splits that differ by less than so much of the gap that a search may leave count as equal. The usual gap is
# 0.5 %, and this is 0.01 %, which no output shows.
_OF_GAP = 0.02


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineResult:
    """The result of one engine on one cluster: the searched points; if nothing fits, the solution of least memory."""

    request: Request
    engine: Engine
    legal: Certificate
    pool: Pool | None  # None where nothing is legal
    nearest_miss: Solution | None

    @property
    def solutions(self) -> list[Solution]:
        """The best solution of every layout, best first."""
        return self.pool.solutions if self.pool else []

    @property
    def certificate(self) -> Certificate:
        """What was searched and proven."""
        return self.pool.certificate(self.legal) if self.pool else self.legal

    def evened(self, solution: Solution) -> Solution:
        """Return a solution with the most even of splits whose times differ by less than a search can tell."""
        return evened(solution, self._goal, max(EXACT, _OF_GAP * self.request.effort.gap))

    def exactly_evened(self, solution: Solution) -> Solution:
        """Return a solution with the most even of splits that take as long, to the last digits."""
        return evened(solution, self._goal)

    @property
    def _goal(self) -> Goal:
        assert self.pool, "a solution is of a pool"
        return self.pool.goal

    def plan(self, solution: Solution) -> Plan:
        """Return the plan of a solution."""
        return self.request.plan(solution.candidate, self.engine, solution.cutting)


def order_of(pair: tuple[EngineResult, Solution]) -> tuple[float, ...]:
    """Return the place of a solution among those of all engines."""
    return pair[1].order[:3]
