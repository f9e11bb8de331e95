"""Minimisation under a limit: a price per unit of weight gives a bound, Pareto labels close the gap.

With any price the cheapest sum of cost and priced weight, less the price of the limit, is no more than the cost of
anything that keeps to the limit. The best price comes from a walk along the lower hull of (weight, cost) points. The
same sums tell which values nothing better can have, and what is left is far smaller. There labels close the gap, in
rounds: by the better choices that one finds, fewer values are left for the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.blocks.factors import Factor
from autoshard.blocks.part import TOLERANCE, Part, Point

MOST_LABELS = 50_000  # measured: what they do not close of a layer of GPT-NeoX on 8x8x4 ranks, they leave in 5 s
_ROUNDS = (200, 5_000)  # labels of the first rounds, measured: their choices make the last one short


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedMinimum:
    """The cheapest choices found within a limit; no choice costs less than ``bound``.

    If nothing fits, these are the lightest choices and ``fits`` is false.
    """

    cost: float
    weight: float
    choices: Mapping[str, int]
    bound: float
    fits: bool = True

    @classmethod
    def of(cls, point: Point, *, bound: float, fits: bool = True) -> "LimitedMinimum":
        """Return choices as an answer; what misses the bound by rounding alone does not miss it."""
        bound = point.cost if bound >= point.worst and fits else bound
        return cls(cost=point.cost, weight=point.weight, choices=point.choices, bound=float(bound), fits=fits)

    @property
    def gap(self) -> float:
        """How much cheaper than what was found the optimum could be at most, as a share of what was found."""
        return 0.0 if self.cost <= self.bound * (1 + TOLERANCE) else 1 - self.bound / self.cost


def minimise_within(
    sizes: Mapping[str, int], factors: Sequence[Factor], limit: float, *, most_labels: int = MOST_LABELS
) -> LimitedMinimum:
    """Return the least cost whose weight is at most the limit; exact unless that needs more labels than allowed.

    >>> cost, weight = np.array([1.0, 2.0, 5.0]), np.array([9.0, 4.0, 3.0])
    >>> minimise_within({"a": 3}, [Factor(variables=("a",), table=cost, weight=weight)], 6.0)
    LimitedMinimum(cost=2.0, weight=4.0, choices={'a': 1}, bound=2.0, fits=True)
    """
    limit += TOLERANCE * abs(limit)  # what a sum was rounded by is no overrun
    part = Part.whole(sizes, factors)
    fastest = part.point(part.priced(0.0))
    if fastest.weight <= limit or not np.isfinite(fastest.cost):
        return LimitedMinimum.of(fastest, bound=fastest.cost)
    lightest = part.point(part.weighed())
    if lightest.weight > limit:
        return LimitedMinimum.of(lightest, bound=np.inf, fits=False)
    from autoshard.blocks.labels import Labels  # a search whose limit binds nothing starts sooner without these
    from autoshard.blocks.reduced import narrowed

    best, bound, price = _walk(part, limit, fastest, lightest)
    for most in (*(few for few in _ROUNDS if few < most_labels), most_labels):
        left = narrowed(part, limit, price, best.worst) if bound < best.worst else None
        if left is None:
            return LimitedMinimum.of(best, bound=best.cost)
        part = left
        best, found = Labels(part, limit, price).improved(best, most)
        bound = max(bound, found)
    return LimitedMinimum.of(best, bound=bound)


def _walk(part: Part, limit: float, heavy: Point, light: Point) -> tuple[Point, float, float]:
    """Walk to the hull's edge over the limit; return the cheapest point that fits, the bound and the price there."""
    best = light
    while True:
        price = (light.cost - heavy.cost) / (heavy.weight - light.weight)
        line = heavy.cost + price * heavy.weight
        point = part.point(part.priced(price))
        here = point.cost + price * point.weight
        if point.weight <= limit and point.cost < best.cost:
            best = point
        if here >= line - TOLERANCE * abs(line):
            return best, min(here, line) - price * limit, price
        if point.weight > limit:
            heavy = point
        else:
            light = point
