"""Pareto labels: partial choices that may still become the best within a limit, variable by variable.

The variables come in an order in which an elimination knows exactly what each adds to the least total. Labels that
cannot lead to anything better are dropped, and those that others dominate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.blocks.factors import Step, Table
from autoshard.blocks.part import Part, Point

_CELLS = 1 << 18  # of a table of bounds that is looked at in one go


@dataclass(frozen=True, slots=True, kw_only=True)
class _Front:
    """Labels, an entry for each in every array.

    A row of bounds for each measure is the least that can still come of a label: cost with weight priced, less the
    price of the limit; cost alone; weight.
    """

    bounds: Table
    parents: Table  # the labels of the variable before that these came from
    values: Table
    held: Mapping[str, Table]  # values of the variables on which later sums depend

    def at(self, places: Table) -> "_Front":
        """Return the labels at these places."""
        held = {name: column[places] for name, column in self.held.items()}
        return _Front(
            bounds=self.bounds[:, places], parents=self.parents[places], values=self.values[places], held=held
        )

    def with_others(self, other: "_Front") -> "_Front":
        """Return these labels, then others of the same variable."""
        return _Front(
            bounds=np.concatenate([self.bounds, other.bounds], axis=1),
            parents=np.concatenate([self.parents, other.parents]),
            values=np.concatenate([self.values, other.values]),
            held={name: np.concatenate([column, other.held[name]]) for name, column in self.held.items()},
        )


class Labels:
    """The search of a part by labels, with bounds at one price of weight."""

    def __init__(self, part: Part, limit: float, price: float) -> None:
        self._part, self._limit, self._price, self._sizes = part, limit, price, part.sizes
        found = (part.priced(price), part.priced(0.0), part.weighed())
        order = _depth_first(found[0].steps)
        self._steps = [[one.steps[place] for one in found] for place in order]
        self._variables = [steps[0].variables for steps in self._steps]
        self._least = np.array([[found[0].cost - price * limit], [found[1].cost], [found[2].cost]])

    def improved(self, best: Point, most: int) -> tuple[Point, float]:
        """Return the best choices, at least as good as those given, and a bound below the cost of all."""
        none = np.zeros(1, int)
        front = _Front(bounds=self._least, parents=none, values=none, held={})
        history: list[_Front] = []
        dropped = np.inf
        for depth in range(len(self._steps)):
            grown: _Front | None = None
            for more in self._grown(depth, front, best.worst):
                grown, least = self._cut(grown.with_others(more) if grown else more, most)
                dropped = min(dropped, least)
            if grown is None:
                return best, min(best.cost, dropped)
            front = grown
            history.append(front)
        found = self._part.at(self._traced(history, int(np.argmin(self._spent(front)))))
        best = found if found.weight <= self._limit and found.cost < best.cost else best
        return best, min(best.cost, dropped)

    def _grown(self, depth: int, front: _Front, worst: float) -> Iterator[_Front]:
        """Yield all labels with one more variable that may still be best, not too many in one go."""
        own, *others = self._variables[depth]
        size = max(1, _CELLS // self._sizes[own])
        needed = self._needed(depth)
        for start in range(0, front.bounds.shape[1], size):
            part = front.at(np.arange(start, min(start + size, front.bounds.shape[1])))
            place = {name: part.held[name] for name in others}
            bounds = [
                bound + step.columns(place) - step.least[tuple(place.values())]
                for bound, step in zip(part.bounds, self._steps[depth], strict=True)
            ]
            priced, cost, weight = bounds
            values, parents = np.nonzero((priced < worst) & (cost < worst) & (weight <= self._limit))
            held = {name: values if name == own else part.held[name][parents] for name in needed}
            found = np.stack([bound[values, parents] for bound in bounds])
            if len(values):
                yield _Front(bounds=found, parents=parents + start, values=values, held=held)

    def _cut(self, front: _Front, most: int) -> tuple[_Front, float]:
        """Return the labels that no others dominate, the most promising of them, and the bound of what that drops."""
        front = front.at(_undominated(tuple(front.held.values()), self._spent(front), front.bounds[-1]))
        if len(front.values) <= most:
            return front, np.inf
        hopes = front.bounds[:-1].max(axis=0)
        order = np.argsort(hopes, kind="stable")
        return front.at(order[:most]), float(hopes[order[most]])

    def _spent(self, front: _Front) -> Table:
        """Return what, among labels that hold the same, is ordered as the cost so far is."""
        return front.bounds[0] - self._price * front.bounds[-1]

    def _needed(self, depth: int) -> list[str]:
        """Return the chosen variables on which later sums depend."""
        chosen = [variables[0] for variables in self._variables[: depth + 1]]
        later = {name for variables in self._variables[depth + 1 :] for name in variables[1:]}
        return [name for name in chosen if name in later]

    def _traced(self, history: Sequence[_Front], label: int) -> dict[str, int]:
        """Return the values that led to a label."""
        values: dict[str, int] = {}
        for (variable, *_), front in zip(reversed(self._variables), reversed(history), strict=True):
            values[variable] = int(front.values[label])
            label = int(front.parents[label])
        return values


def _depth_first(steps: Sequence[Step]) -> list[int]:
    """Return the steps' places so that a variable follows its neighbours, and what hangs on one neighbour at once.

    Labels hold the values of all branches that are begun and not done. One branch at a time, the shortest first, they
    hold the fewest.
    """
    place = {step.variables[0]: number for number, step in enumerate(steps)}
    below: list[list[int]] = [[] for _ in (*steps, None)]  # the last is above all
    counts = [1] * len(steps)
    for number, step in enumerate(steps):
        above = min((place[name] for name in step.variables[1:]), default=len(steps))
        below[above].append(number)
        if above < len(steps):
            counts[above] += counts[number]
    order: list[int] = []
    stack = [len(steps)]
    while stack:
        number = stack.pop()
        order.append(number)
        stack += sorted(below[number], key=lambda one: (-counts[one], -one))
    return order[1:]


def _undominated(held: Sequence[Table], costs: Table, weights: Table) -> Table:
    """Return the labels for which no other that holds the same is at least as cheap and as light, in their order."""
    order = np.lexsort((costs, weights, *held))
    starts = np.zeros(len(order), bool)
    for column in held:
        starts[1:] |= column[order[1:]] != column[order[:-1]]
    _, ranks = np.unique(costs[order], return_inverse=True)
    lowered = ranks - np.cumsum(starts) * (len(order) + 1)  # so that each group starts below all before it
    least = np.minimum.accumulate(lowered)
    first = np.concatenate([[True], lowered[1:] < least[:-1]])
    return np.sort(order[first])
