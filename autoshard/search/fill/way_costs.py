"""What flows take at least on the ranks of a candidate, for every way in which these may compute layers again."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.stages import PASSES
from autoshard.schedule.counts import counts_of
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.fill.split_times import SplitTimes
from autoshard.search.fill.stage_options import WayRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowTimes:
    """How long flows are: [flow] without layers, and for each layer, [flow, kind, stage]."""

    runs: Floats  # the flows: how often they run each pass of each stage, and wait for sends
    fixed_s: Floats
    layer_s: Floats

    @classmethod
    def of(cls, times: SplitTimes, runs: Floats) -> "FlowTimes":
        """Measure flows."""
        passes = runs[:, :-1].reshape(len(runs), len(PASSES), -1)
        fixed_s = passes[:, :, 0] @ times.embed + passes[:, :, -1] @ times.head
        fixed_s = fixed_s + runs[:, -1] * times.sends.time_s + passes.sum(axis=2) @ times.started
        return cls(runs=runs, fixed_s=fixed_s, layer_s=np.einsum("kp,jps->jks", times.kinds_s, passes))

    def only(self, chosen: NDArray[np.bool_]) -> "FlowTimes":
        """Return some of the flows."""
        return FlowTimes(runs=self.runs[chosen], fixed_s=self.fixed_s[chosen], layer_s=self.layer_s[chosen])

    def mixed(self, shares: Floats) -> "FlowTimes":
        """Return a weighted average of them, as the only flow."""
        columns = (self.runs, self.fixed_s, self.layer_s)
        runs, fixed_s, layer_s = (np.tensordot(shares, column, axes=1)[None] for column in columns)
        return FlowTimes(runs=runs, fixed_s=fixed_s, layer_s=layer_s)

    def with_flow(self, more: "FlowTimes") -> "FlowTimes":
        """Return these flows and more of them."""
        names = ("runs", "fixed_s", "layer_s")
        return FlowTimes(**{name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in names})

    def lengths_s(self, layers: Floats) -> Floats:
        """Return the length of each flow for each split: [flow, split], given layers by split, kind and stage."""
        return self.fixed_s[:, None] + np.einsum("jks,lks->jl", self.layer_s, layers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WayCosts:
    """The ways of ranks that matter, and where their layers may lie."""

    rows: WayRows
    fits: NDArray[np.bool_]  # [way, rank]
    plain_kind: int
    stages: Ints  # [rank, chunk]

    @classmethod
    def of(cls, times: SplitTimes, below_s: float) -> "WayCosts":
        """Leave out numbers of layers that alone take as long as a limit."""
        least_s, schedule = float(times.kinds_s[-1].sum()), times.schedule
        most = min(below_s / (schedule.num_micro_batches * least_s), float(times.num_layers))
        used = times.rows.totals <= max(most, -(-times.num_layers // schedule.num_ranks))
        columns = (times.rows.totals, times.rows.kind, times.rows.again, times.rows.plain)
        totals, kind, again, plain = (column[used] for column in columns)
        return cls(
            rows=WayRows(totals=totals, kind=kind, again=again, plain=plain),
            fits=times.fits[:, used].T,
            plain_kind=times.plain_kind,
            stages=counts_of(schedule).stages,
        )

    @property
    def totals(self) -> Ints:
        """The numbers of layers that a rank may have."""
        return np.unique(self.rows.totals)

    @property
    def fits_by_total(self) -> NDArray[np.bool_]:
        """Say which numbers of layers fit in some way: [rank, total]."""
        return np.logical_or.reduceat(self.fits, self._starts, axis=0).T

    @property
    def _starts(self) -> Ints:
        return np.flatnonzero(np.diff(self.rows.totals, prepend=0))

    def costs_s(self, at_s: Floats) -> Floats:
        """Return the least length of a flow in each way: [..., way, rank], given [..., kind, rank, chunk].

        Layers lie where they add least, and one in every chunk.
        """
        rows, chunks = self.rows, self.stages.shape[1]
        every_s, least_s = at_s.sum(axis=-1), at_s.min(axis=-1)
        rest = rows.totals - rows.again - rows.plain
        cost = every_s[..., rows.kind, :] + (rows.again - chunks)[:, None] * least_s[..., rows.kind, :]
        cost = cost + rows.plain[:, None] * least_s[..., None, self.plain_kind, :]
        cost = cost + rest[:, None] * least_s[..., None, -1, :]
        return np.where(self.fits, cost, np.inf)

    def by_total_s(self, costs_s: Floats) -> Floats:
        """Return the least of all ways with so many layers: [..., rank, total]."""
        least: Floats = np.minimum.reduceat(costs_s, self._starts, axis=-2)
        return least.swapaxes(-1, -2)

    def layers(self, layer_s: Floats, totals: Ints, *, spread: bool = False) -> Floats:
        """Return how many layers of each kind every stage has where ranks answer a flow: [kind, stage].

        Given are the length of the flow by kind and stage, and the layers of each rank. They lie where they add least,
        or are spread evenly over the stages of the rank.
        """
        costs_s, rows, layers = self.costs_s(layer_s[:, self.stages]), self.rows, np.zeros(layer_s.shape)
        costs_s = np.where(rows.totals[:, None] == totals, costs_s, np.inf)
        for stages, way in zip(self.stages, costs_s.argmin(axis=0).tolist(), strict=True):
            kind, again, plain = int(rows.kind[way]), int(rows.again[way]), int(rows.plain[way])
            counts = (
                (kind, again - len(stages)),
                (self.plain_kind, plain),
                (-1, int(rows.totals[way]) - again - plain),
            )
            layers[kind, stages] += 1
            for row, count in counts:
                if spread:
                    layers[row, stages] += count / len(stages)
                else:
                    layers[row, stages[layer_s[row, stages].argmin()]] += count
        return layers


def cheapest_totals(own_s: Floats, num_layers: int, first: int) -> tuple[float, Ints]:
    """Return the least sum for all layers, and the layers of each rank: ``own_s`` is the cost by rank and total.

    Totals count up from the first.

    >>> cheapest_totals(np.array([[1.0, 2.0, 9.0], [1.0, 3.0, 5.0]]), 4, 1)
    (5.0, array([2, 2]))
    """
    num_ranks, count = own_s.shape
    rest = num_layers - num_ranks * first
    if not 0 <= rest <= num_ranks * (count - 1):
        return np.inf, first + np.zeros(num_ranks, dtype=np.int64)
    more: Ints = np.arange(rest + 1, dtype=np.int64)
    sums, choices = np.full(rest + count, np.inf), np.empty((num_ranks, rest + 1), dtype=np.int64)
    sums[count - 1] = 0.0  # of no rank yet: behind as many that are out of reach
    before: Ints = count - 1 + more[:, None] - np.arange(count, dtype=np.int64)
    for rank in range(num_ranks):
        costs_s = sums[before] + own_s[rank]
        choices[rank] = costs_s.argmin(axis=1)
        sums[count - 1 :] = costs_s[more, choices[rank]]
    least_s = float(sums[-1])
    extra: list[int] = []
    for rank_choices in reversed(choices):
        extra.append(int(rank_choices[rest - sum(extra)]))
    return least_s, first + np.array(extra[::-1], dtype=np.int64)
