"""The options of the stages of candidates: layers and recompute, priced, and timed once they are chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.setting import PerCandidate
from autoshard.cost.stages import PASSES, BlockTotals, PipelineBlocks, StageOptions, StagePrices, price_stages
from autoshard.cost.step import least_seconds, step_seconds
from autoshard.plan.candidate import even_stages
from autoshard.plan.recompute import Recompute
from autoshard.schedule.counts import counts_of
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.waves import Floats, Ints

NEVER = 1e30  # seconds of what does not fit: unlike infinity, nothing times that is nothing
ALL_RANGES = ("1f1b", "gpipe")  # schedules whose longest paths are known: those of ``path_weights``
SURE = 1e-12  # of a bound that was computed in another order
_RELIEVED = ((0, 1), (1, 0), (1, 1), (0, 2), (1, 2))  # layers that the first and the last stage give away

_PARTS = frozenset({Recompute(), Recompute(kind="full")})  # of a stage may have these kinds, side by side
# In which kinds differ.
_DOMINATED = (*PASSES, "saved_bytes", "moment_bytes", "waiting_bytes", "placeholder_bytes", "host_bytes")

Split = tuple[int, ...]  # layers of every stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How far a search goes: the gap that it may leave, and how many splits of one candidate it may time."""

    gap: float = 5e-3
    most_splits: int = 5_000  # of a candidate, all of which are timed where a gap is left
    split_s: float = 2.0  # that splits may be looked for under schedules whose longest paths are not known
    tight_s: float = 0.7  # that bounds of solved points may be raised for, when all else is done
    wide_gap: float = 0.03  # beyond which they may be raised for so many seconds more
    wide_s: float = 2.0
    most_idle: float = 32  # groups of points that are solved without a better answer, where they cannot raise the bound
    exhaustive: bool = False  # no point is left out because of its bound
    at_once: bool = False  # a plain plan is made before all else, in case the search is stopped
    hunts: bool = False  # for changes of the best plans, also where no simple plan is asked for
    most_changes: int = 5_000  # of each of the best plans that a local search tries, and the seconds that it may take
    changes_s: float = 0.4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WayRows:
    """What the layers of a rank may compute again, a way in each row: so many layers, under one kind or nothing.

    The remaining layers take in each pass as little as under any kind. The number of kinds is their ``kind``.
    """

    totals: Ints  # layers of the rank, in order
    kind: Ints
    again: Ints  # layers of this kind: one or more in every chunk
    plain: Ints  # layers that keep all


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWays(PerCandidate):
    """The ways of ranks, and which of them fit in memory: none that fits is left out."""

    rows: WayRows
    fits: NDArray[np.bool_]  # [rank, way, candidate]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageChoices(PerCandidate):
    """The choices that the stages of candidates have."""

    kinds: tuple[Recompute, ...]  # as the rows of a layer's totals
    allowed: NDArray[np.bool_]  # [kind, candidate]: what Rules allow
    num_layers: int
    stages: Split | None  # pinned
    recompute: tuple[Recompute, ...] | None  # pinned, one entry for all stages or one for each
    partly: bool = True  # whether a stage may recompute some of its layers in full
    ways: RankWays | None = None  # of ranks, once they are known
    differ: bool = False  # whether there are several kinds of layers

    def listed_splits(self, schedule: Schedule) -> "tuple[Split, ...] | None":
        """Return the splits to choose from; None for all."""
        return listed_splits(schedule, self.num_layers, self.stages, self.differ)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageFilling(PerCandidate):
    """Layers and recompute of the stages of every candidate, with time and memory; infinite where nothing fits."""

    time_s: Floats
    bound: Floats  # of all fillings of the candidate, in seconds or bytes
    peak_bytes: Floats
    kind: Ints  # [stage, candidate]
    recomputed: Ints  # [stage, candidate]: layers of this kind
    plain: Ints

    @classmethod
    def nothing(cls, num_stages: int, bound: Floats) -> "StageFilling":
        """Return a filling that says: nothing fits, or nothing is better than the known filling."""
        kind, recomputed, plain = np.zeros((3, num_stages, len(bound)), dtype=np.int64)
        time_s, peak = np.full((2, len(bound)), np.inf)
        return cls(time_s=time_s, bound=bound, peak_bytes=peak, kind=kind, recomputed=recomputed, plain=plain)

    @classmethod
    def side_by_side(cls, parts: "Sequence[StageFilling]") -> "StageFilling":
        """Return the fillings of several candidates as one."""
        names = [column.name for column in fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names})

    def with_columns(self, numbers: Ints, columns: "StageFilling") -> "StageFilling":
        """Return these with some of their columns replaced."""
        replaced = replace(self, **{column.name: getattr(self, column.name).copy() for column in fields(self)})
        for column in fields(self):
            getattr(replaced, column.name)[..., numbers] = getattr(columns, column.name)
        return replaced

    def stages(self, candidate: int) -> Split:
        """Return the layers of every stage."""
        return tuple((self.recomputed[:, candidate] + self.plain[:, candidate]).tolist())

    def recompute(self, candidate: int, kinds: Sequence[Recompute]) -> tuple[Recompute, ...]:
        """Return the recompute of every stage."""
        columns = np.stack([self.kind, self.recomputed, self.plain])[..., candidate].T
        rows: list[list[int]] = columns.tolist()
        return tuple(
            Recompute(kind="full", num_layers=again) if again and plain else kinds[kind] if again else Recompute()
            for kind, again, plain in rows
        )


def not_dominated(
    layers: tuple[BlockTotals, ...], rows: Ints, allowed: NDArray[np.bool_], kinds: Sequence[Recompute]
) -> NDArray[np.bool_]:
    """Leave out kinds of recompute that take and keep no less than another kind that is allowed: [kind, candidate].

    The candidates are rows of the layers. Part of a stage's layers may recompute in full and the others nothing, so
    these two kinds always remain.
    """
    dominated: NDArray[np.bool_] = np.any(_betters(layers)[:, :, rows] & allowed, axis=1)
    dominated[[kind in _PARTS for kind in kinds]] = False
    return allowed & ~dominated


@lru_cache(maxsize=64)  # layers that are priced together are asked about for each variant and schedule
def _betters(layers: tuple[BlockTotals, ...]) -> NDArray[np.bool_]:
    """Say which other kinds of recompute are better than a kind, or equal and before it: [kind, other, candidate]."""
    columns = np.concatenate([[getattr(layer, name) for name in _DOMINATED] for layer in layers])
    no_worse = np.all(columns[:, None] <= columns[:, :, None], axis=0)
    first = np.tril(np.ones((columns.shape[1], columns.shape[1]), dtype=bool), -1)[..., None]  # among equals
    return no_worse & (first | ~no_worse.swapaxes(0, 1))


def listed_splits(
    schedule: Schedule, num_layers: int, pinned: Split | None, differ: bool
) -> "tuple[Split, ...] | None":
    """Return the splits to choose from, None for all: what is pinned, and what leaves no choice.

    If layers differ, near-even splits, but under schedules whose longest paths are known.
    """
    if pinned:
        return (pinned,)
    if schedule.num_stages in (1, num_layers):
        return ((num_layers // schedule.num_stages,) * schedule.num_stages,)
    is_bounded = not differ or schedule.builder in ALL_RANGES
    return None if is_bounded else near_even_splits(num_layers, schedule.num_stages)


def near_even_splits(num_layers: int, num_stages: int) -> tuple[Split, ...]:
    """List near-even splits: the even one, and those whose ends give layers to the stages between.

    >>> near_even_splits(8, 4)
    ((2, 2, 2, 2), (2, 3, 2, 1), (1, 3, 2, 2), (1, 3, 3, 1))
    """
    even = even_stages(num_layers, num_stages)
    splits = {even: None}
    for first, last in _RELIEVED if num_stages > 1 else ():
        ends = (even[0] - first, even[-1] - last)
        if num_stages == 2:  # each gets what the other gives
            ends = (ends[0] + last, ends[1] + first)
        if min(ends) >= 1:
            between = even_stages(num_layers - sum(ends), num_stages - 2) if num_stages > 2 else ()
            splits[ends[0], *between, ends[1]] = None
    return tuple(splits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkLayers:
    """The layers of the chunks of ranks, in several divisions: [rank, division, chunk]."""

    count: Ints
    first: Ints  # place of the first layer, or of any range of layers of the same kinds

    @classmethod
    def of_splits(cls, blocks: PipelineBlocks, splits: Sequence[Split] | Ints) -> "ChunkLayers":
        """Return those of some splits of all layers over the stages, each of which is a division."""
        layers, stages = np.array(splits), counts_of(blocks.schedule).stages
        first = blocks.order.alike(np.cumsum(layers, axis=1) - layers, layers)
        return cls(**{name: rows[:, stages].swapaxes(0, 1) for name, rows in (("count", layers), ("first", first))})

    @property
    def most(self) -> list[int]:
        """The most layers that any chunk has, by division."""
        most: list[int] = self.count.max(axis=(0, 2)).tolist()
        return most


def stage_options(
    schedule: Schedule, choices: StageChoices, layers: ChunkLayers
) -> tuple[StageOptions, Ints, NDArray[np.bool_]]:
    """Return every option of every rank, the division of each, and where it is allowed: [rank, option, candidate].

    The chunks of a rank recompute alike, unless that is pinned. Options stand in order of division.
    """
    kinds, plain_kind = choices.kinds, choices.kinds.index(Recompute())
    if choices.recompute is not None:
        entries = choices.recompute * (schedule.num_stages if len(choices.recompute) == 1 else 1)
        stages = counts_of(schedule).stages[:, None]
        kind = np.array([kinds.index(entry.kinds[0]) for entry in entries])[stages]
        least_layers = np.array([entry.num_layers or 0 for entry in entries], dtype=np.int64)[stages]
        recomputed: Ints = np.where(least_layers > 0, np.minimum(least_layers, layers.count), layers.count)
        divisions = np.arange(layers.count.shape[1], dtype=np.int64)
        allowed = np.all(layers.count >= least_layers, axis=2, keepdims=True) & np.all(choices.allowed, axis=0)
    else:
        full = Recompute(kind="full")
        partly_full = choices.partly and full in kinds  # some of a stage's layers in full, the others nothing
        full_kind, most = kinds.index(full) if partly_full else 0, layers.most
        rows: list[tuple[int, int, int]] = []  # kind, division, layers of a chunk that recompute at most
        used: list[int] = np.flatnonzero(choices.allowed.any(axis=1)).tolist() or [plain_kind]
        for number, num_layers in enumerate(most):
            rows += [(row_kind, number, num_layers) for row_kind in used]
            rows += [(full_kind, number, count) for count in range(1, num_layers if partly_full else 1)]
        rows_kind, divisions, again = np.array(rows).T
        recomputed = np.minimum(again[:, None], layers.count[:, divisions])
        some_plain = (again < np.array(most)[divisions])[:, None]
        allowed = (choices.allowed[rows_kind] & (~some_plain | choices.allowed[plain_kind]))[None]
        kind = rows_kind[None, :, None]
    options = StageOptions(
        kind=kind,
        recomputed=recomputed,
        plain=layers.count[:, divisions] - recomputed,
        plain_kind=plain_kind,
        first=layers.first[:, divisions],
    )
    return options, divisions, allowed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankOptions:
    """The options of every rank, and for each division of layers over its chunks the fastest that fits."""

    blocks: PipelineBlocks
    options: StageOptions
    prices: StagePrices
    divisions: Ints  # of each option, in order
    fits: NDArray[np.bool_]  # [rank, option, candidate]
    both_s: Floats  # [rank, option, candidate]: a micro-batch with its sends, if it fits
    best: Ints  # [rank, division, candidate]: the fastest option
    least_s: Floats  # [rank, division, candidate]: what that takes

    @classmethod
    def of(
        cls, blocks: PipelineBlocks, choices: StageChoices, layers: ChunkLayers, capacity: Floats | float
    ) -> "RankOptions":
        """Price all options for the layers of every chunk."""
        options, divisions, allowed = stage_options(blocks.schedule, choices, layers)
        prices = price_stages(blocks, options)
        host = blocks.question.cluster.rank_host_bytes
        fits = allowed & (prices.peak_bytes <= capacity) & (prices.host_bytes <= host)
        both_s = np.where(fits, prices.pass_s + blocks.hop_s[:, None], NEVER)
        best = _least_of_each(both_s, divisions)
        return cls(
            blocks=blocks,
            options=options,
            prices=prices,
            divisions=divisions,
            fits=fits,
            both_s=both_s,
            best=best,
            least_s=np.take_along_axis(both_s, best, axis=1),
        )

    def least_bytes(self) -> Floats:
        """Return the least bytes of a rank: [rank, division, candidate]."""
        held = np.where(self.fits, self.prices.peak_bytes, np.inf)
        return np.take_along_axis(held, _least_of_each(held, self.divisions), axis=1)

    def fastest(self, division: Ints, candidates: Ints) -> StageFilling:
        """Time the fastest options of one division per rank, [rank, column], of a candidate for each column.

        The bound is of any options that fit: these may trade one pass for another, and longer passes hide more of the
        messages of the update.
        """
        ranks = np.arange(self.blocks.schedule.num_ranks)[:, None]
        option = self.best[ranks, division, candidates]
        filling = self.timed(option, candidates)
        starts, least = _starts(self.divisions), dict[str, Floats]()
        for name in PASSES:
            fitting = np.where(self.fits[:, :, None], getattr(self.prices, name), NEVER)
            by_division = np.minimum.reduceat(fitting, starts, axis=1)
            least[name] = by_division[ranks, division, :, candidates].swapaxes(1, 2)
        prices = replace(self.prices.of_options(option, candidates), **least)
        longest = np.maximum.reduceat(np.where(self.fits, self.prices.pass_s, 0.0), starts, axis=1)
        busy_s = longest[ranks, division, candidates]
        return replace(filling, bound=least_seconds(self.blocks.only(candidates), prices, busy_s) * (1 - SURE))

    def timed(self, option: Ints, candidates: Ints) -> StageFilling:
        """Time one option per rank, [rank, column], of a candidate for each column."""
        return timed_options(self.blocks, self.options, self.prices, (option, candidates))


def timed_options(
    blocks: PipelineBlocks, options: StageOptions, prices: StagePrices, chosen: tuple[Ints, Ints]
) -> StageFilling:
    """Time priced options: ``chosen`` names one for each rank, [rank, column], and the candidate of each column."""
    (option, candidates), counts = chosen, counts_of(blocks.schedule)
    ranks = np.arange(blocks.schedule.num_ranks)[:, None]
    shape = (len(ranks), *options.recomputed.shape[1:])
    of_columns = prices.of_options(option, candidates)
    time_s = step_seconds(blocks.only(candidates), of_columns).total_s

    def by_stage(column: Ints) -> Ints:
        return np.broadcast_to(column, shape)[ranks, option][counts.ranks, :, counts.chunks]

    return StageFilling(
        time_s=time_s,
        bound=time_s,
        peak_bytes=of_columns.peak_bytes.max(axis=0),
        kind=by_stage(options.kind),
        recomputed=by_stage(options.recomputed),
        plain=by_stage(options.plain),
    )


def _least_of_each(cost: Floats, divisions: Ints) -> Ints:
    """Return the option of least cost of every division: [rank, division, candidate]."""
    starts = _starts(divisions).tolist()
    spans = zip(starts, [*starts[1:], len(divisions)], strict=True)
    return np.stack([low + cost[:, low:high].argmin(axis=1) for low, high in spans], axis=1)


def _starts(divisions: Ints) -> Ints:
    """Return where the options of each division begin."""
    return np.flatnonzero(np.diff(divisions, prepend=-1))
