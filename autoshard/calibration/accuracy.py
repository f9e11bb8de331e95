"""How good predictions are: errors against what was measured, and whether the order of choices is right."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import StatisticsError, correlation, fmean, median

import numpy as np

from autoshard.plan.plan import rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A prediction beside its measurement.

    Rows of one ``group`` are choices for the same question, each a ``layout``; ``work`` is what makes their values
    comparable (tokens of a step, because groups are published in which the batch follows the layout; 1 for memory).
    """

    id: str
    group: str
    layout: Hashable
    predicted: float
    measured: float
    low: float | None = None
    high: float | None = None
    work: float = 1.0

    @property
    def error(self) -> float:
        """Relative error: positive where too much was predicted."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """Whether the predictions order the layouts of one group as the measurements do, and what a wrong choice costs."""

    group: str
    num_layouts: int
    spearman: float | None  # None where all predictions, or all measurements, are equal
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Relative errors of one quantity over a data set; all but ``bias`` and ``worst`` without their sign."""

    count: int
    num_layouts: int  # distinct ones: rows of one group and layout measured the same thing again
    noise_floor: float | None  # what no prediction from layouts explains; None where none was measured twice
    mape: float
    median: float
    p90: float
    worst: float
    worst_id: str
    bias: float
    coverage: float | None  # share of measurements inside the stated interval; None where none is stated
    spearman: float | None  # mean over the groups that have one
    regret: float | None  # mean over groups of two or more layouts
    worst_regret: float | None
    groups: tuple[GroupOrder, ...] = field(repr=False)


def accuracy(rows: Sequence[Compared]) -> Accuracy | None:
    """Sum up predictions and measurements; None where nothing was measured.

    >>> one = Compared(id="a", group="g", layout="tp=1", predicted=1.5, measured=1.0, low=0.5, high=2.0)
    >>> two = Compared(id="b", group="g", layout="tp=2", predicted=1.0, measured=2.0, low=0.5, high=1.5)
    >>> found = accuracy([one, two])
    >>> found.mape, found.bias, found.coverage, found.worst_id, found.spearman, found.regret
    (0.5, 0.0, 0.5, 'a', -1.0, 1.0)
    """
    if not rows:
        return None
    sizes = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    measured: dict[Hashable, list[float]] = defaultdict(list)
    for row in rows:
        measured[row.group, row.layout].append(row.measured)
    groups = group_orders(rows)
    ranks = [group.spearman for group in groups if group.spearman is not None]
    regrets = [group.regret for group in groups]
    inside = [row.low <= row.measured <= row.high for row in rows if row.low is not None and row.high is not None]
    return Accuracy(
        count=len(rows),
        num_layouts=len(measured),
        noise_floor=noise_floor(measured.values()),
        mape=rounded(fmean(sizes)),
        median=rounded(median(sizes)),
        p90=rounded(float(np.percentile(sizes, 90))),
        worst=rounded(worst.error),
        worst_id=worst.id,
        bias=rounded(fmean(row.error for row in rows)),
        coverage=rounded(fmean(inside)) if inside else None,
        spearman=rounded(fmean(ranks)) if ranks else None,
        regret=rounded(fmean(regrets)) if regrets else None,
        worst_regret=max(regrets, default=None),
        groups=groups,
    )


def group_orders(rows: Sequence[Compared]) -> tuple[GroupOrder, ...]:
    """Compare the layouts of every group of two or more; one measured several times counts once, at its median."""
    members: dict[str, dict[Hashable, list[Compared]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        members[row.group][row.layout].append(row)
    orders: list[GroupOrder] = []
    for group, layouts in members.items():
        predicted = [rounded(median(row.predicted / row.work for row in same)) for same in layouts.values()]
        measured = [median(row.measured / row.work for row in same) for same in layouts.values()]
        if len(layouts) > 1:
            rank, cost = spearman(predicted, measured), regret(predicted, measured)
            orders.append(GroupOrder(group=group, num_layouts=len(layouts), spearman=rank, regret=cost))
    return tuple(orders)


def noise_floor(measured: Iterable[Sequence[float]]) -> float | None:
    """Return the mean error that the median of each layout has as its prediction, over layouts measured again.

    Predictions from layouts alone say the same of all measurements of one layout, so hardly any has a smaller error
    on these; None where no layout was measured twice.

    >>> noise_floor([[8.0, 10.0, 12.5], [7.0]])
    0.15
    """
    sizes = [abs(median(same) / value - 1) for same in measured if len(same) > 1 for value in same]
    return rounded(fmean(sizes)) if sizes else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the correlation of ranks, equal values sharing the mean of theirs; None where one side is all equal.

    >>> spearman([1.0, 2.0, 3.0, 4.0], [10.0, 30.0, 20.0, 40.0])
    0.8
    >>> spearman([1.0, 1.0], [1.0, 2.0]) is None
    True
    """
    try:
        return rounded(correlation(_ranks(first), _ranks(second)))
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    """Number the values from 1, the smallest first.

    >>> _ranks([5.0, 7.0, 5.0])
    [1.5, 3.0, 1.5]
    """
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return how much more the choice with the smallest prediction measured than the best; equal ones by their mean.

    >>> regret([1.0, 2.0, 3.0], [12.0, 10.0, 20.0])
    0.2
    >>> regret([1.0, 1.0, 3.0], [12.0, 10.0, 20.0])
    0.1
    """
    least = min(predicted)
    picked = [value for guess, value in zip(predicted, measured, strict=True) if guess == least]
    return rounded(fmean(picked) / min(measured) - 1)
