"""Rows that look as if something is wrong with them: units, batches that count twice, outliers beside their neighbours.

A row is judged by how long it took beside its prediction, and this ratio by the ratios of its neighbours: rows of the
same model, program, chips and length whose layout, number of nodes or batch differs in one key. So a bias that a whole
program has names nobody. The farthest row is named first, and is no neighbour of others from then on.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.rows import MeasuredRow
from autoshard.calibration.validate import PredictedRow, TimedRun, Validated
from autoshard.spec.cluster import LOCAL
from autoshard.units import GIB

Kind = Literal["unit of time", "unit of memory", "batch", "outlier"]
_TIMES = {1000: "milliseconds and seconds", 60: "minutes and seconds", 3600: "hours and seconds"}
_SIZES = {1024: "MiB and GiB", 1024**3: "bytes and GiB"}
_NEAR, _NEAR_SIZE = math.log(1.35), math.log(3)  # of a factor between units of time, of memory: far from any other
_TWICE = math.log(1.15)  # of a factor of 2
_LEAST_NEIGHBOURS = 2
# A row is an outlier beyond six deviations of its family, with Gaussian errors none in 500 million, and beyond a factor
# that predictions are seldom off by. By a factor of 2 it is named where nothing else is off by as much.
_LEAST_FACTOR, _DEVIATIONS, _SCALE = math.log(2.5), 6.0, 1.4826
_LEAST_ALONE = math.log(5)  # enough in any family, and without neighbours: a new program may be off by factors
_MOST_MFU = 0.8  # products alone reach at most 0.75 of an A100's peak, 0.49 of a B200's: MooreThreads/SimuMax
_RATES = ("mfu_percent", "tflops_per_chip", "tokens_per_s")  # in ``published``
_DISAGREE = math.log(1.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A row that is named, with the reason, and by what factor it is off."""

    set: str
    id: str
    group: str
    kind: Kind
    factor: float
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedRow:
    """A row as it is judged: the logarithm of measured over predicted, its family, and the keys of its layout."""

    timed: TimedRun
    row: MeasuredRow
    predicted: PredictedRow
    error: float
    family: Hashable
    keys: Mapping[str, Hashable]


def suspects(validated: Validated) -> tuple[Suspect, ...]:
    """Return the rows of a validation that are named, in their order."""
    judged = _judged(validated)
    named = {**_impossible(judged), **_outliers(judged), **_disagreeing(judged), **_memories(judged)}
    return tuple(named[place] for place in sorted(named))


def _judged(validated: Validated) -> list[_JudgedRow]:
    predicted = dict(zip(validated.rows.rows, validated.validation.rows, strict=True))
    rows = [(row, predicted[where]) for where, row in validated.rows.rows.items() if row.step_time_s]
    return [
        _JudgedRow(
            timed=timed,
            row=row,
            predicted=prediction,
            error=math.log(timed.time.measured / timed.time.predicted),
            family=(timed.run.model, timed.run.cluster.chip.name, timed.run.framework, timed.run.workload.seq_len),
            keys=_keys(timed.run),
        )
        for timed, (row, prediction) in zip(validated.times, rows, strict=True)
    ]


def _keys(run: MeasuredRun) -> Mapping[str, Hashable]:
    """Return the keys in which neighbours may differ; data parallelism follows from the other keys."""
    at = run.candidate
    names = ("tp", "pp", "vp", "cp", "ep", "mbs", "zero", "sequence_parallel", "recompute", "schedule", "kernels")
    keys: dict[str, Hashable] = {name: getattr(at, name) for name in names}
    return keys | {"nodes": run.cluster.num_nodes, "batch": run.workload.global_batch}


Named = dict[int, Suspect]


def _suspect(row: _JudgedRow, kind: Kind, distance: float, says: str) -> Suspect:
    time, factor = row.timed.time, float(f"{math.exp(distance):.3g}")
    return Suspect(set=row.timed.set, id=time.id, group=time.group, kind=kind, factor=factor, says=says)


def _outliers(judged: Sequence[_JudgedRow]) -> Named:
    """Name the farthest row of each family from its neighbours, again and again, until none is far."""
    named: Named = {}
    families: dict[Hashable, list[int]] = defaultdict(list)
    for place, row in enumerate(judged):
        families[row.family].append(place)
    for members in families.values():
        neighbours = _neighbours(judged, members)
        while far := {
            place: _distance(judged, place, [near for near in neighbours[place] if near not in named])
            for place in members
            if place not in named
        }:
            sizes = [abs(distance) for distance, count in far.values() if count]
            limit = min(_LEAST_ALONE, _DEVIATIONS * _SCALE * median(sizes or [0.0]))
            lonely = sum(size > math.log(2) - _TWICE for size in sizes) == 1
            farther = [place for place, gap in far.items() if abs(gap[0]) > limit and _is_far(*gap, lonely=lonely)]
            if not farther:
                break
            place = max(farther, key=lambda index: abs(far[index][0]))
            distance, count = far[place]
            named[place] = _suspect(judged[place], _kind(distance), distance, _words(distance, count))
    return named


def _is_far(distance: float, count: int, *, lonely: bool) -> bool:
    """Say whether a row is far enough from its neighbours, or from its prediction where it has none."""
    if not count:
        return abs(distance) > _LEAST_ALONE
    return lonely if _kind(distance) == "batch" else abs(distance) > _LEAST_FACTOR


def _neighbours(judged: Sequence[_JudgedRow], members: Sequence[int]) -> Mapping[int, list[int]]:
    """Return for each row the rows that differ from it in one key at most."""
    neighbours: dict[int, dict[int, None]] = {place: {} for place in members}
    for key in judged[members[0]].keys:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for place in members:
            keys = judged[place].keys
            groups[tuple(value for name, value in keys.items() if name != key)].append(place)
        for places in groups.values():
            for place in places:
                neighbours[place] |= dict.fromkeys(neighbour for neighbour in places if neighbour != place)
    return {place: list(near) for place, near in neighbours.items()}


def _distance(judged: Sequence[_JudgedRow], place: int, neighbours: Sequence[int]) -> tuple[float, int]:
    """Return how far the error of a row is from those of its neighbours, and how many these are; few say nothing."""
    if len(neighbours) < _LEAST_NEIGHBOURS:
        return judged[place].error, 0
    return judged[place].error - median(judged[near].error for near in neighbours), len(neighbours)


def _kind(distance: float) -> Kind:
    if any(abs(abs(distance) - math.log(factor)) < _NEAR for factor in _TIMES):
        return "unit of time"
    return "batch" if abs(abs(distance) - math.log(2)) < _TWICE else "outlier"


def _words(distance: float, count: int) -> str:
    """Say how far a row is from its neighbours, or from its prediction where it has none.

    >>> _words(math.log(61), 4)
    'took 61 times what 4 neighbours say: 60 lies between minutes and seconds'
    >>> _words(math.log(0.5), 4)
    'took 0.5 times what 4 neighbours say, as a row would whose batch is stated twice as large as it was'
    """
    theirs = "1 neighbour says" if count == 1 else f"{count} neighbours say" if count else "is predicted"
    text = f"took {math.exp(distance):.2g} times what {theirs}"
    between = [f": {factor} lies between {units}" for factor, units in _TIMES.items()
               if abs(abs(distance) - math.log(factor)) < _NEAR]  # fmt: skip
    if between:
        return text + between[0]
    if _kind(distance) == "batch":
        size = "twice" if distance < 0 else "half"
        return f"{text}, as a row would whose batch is stated {size} as large as it was"
    return text


def _impossible(judged: Sequence[_JudgedRow]) -> Named:
    """Name rows with more FLOPs per second than any program reaches."""
    named: Named = {}
    for place, row in enumerate(judged):
        mfu = least_mfu(row.timed.run, row.timed.time.measured)
        if mfu > _MOST_MFU:
            named[place] = _suspect(row, "batch", math.log(mfu), too_fast(row.timed.run, row.timed.time.measured))
    return named


def too_fast(run: MeasuredRun, time_s: float) -> str:
    """Say that a step would take more FLOPs per second than any program reaches; "" where it would not."""
    mfu = least_mfu(run, time_s)
    return f"would use {mfu:.0%} of the chips' peak, which nobody reaches" if mfu > _MOST_MFU else ""


def least_mfu(run: MeasuredRun, time_s: float) -> float:
    """Return which share of its chips' peak a step of such a time uses; 0 on this machine, which has no data sheet."""
    precision, cluster, model = run.workload.precision, run.cluster, run.model
    if cluster.name == LOCAL:
        return 0.0
    peak = cluster.rank_matrix_flops_per_s(precision.products or precision.activations) * cluster.num_ranks
    looked_up = 0 if model.tied_embeddings else model.vocab * model.hidden  # which no product reads
    flops = _flops_per_token(run, pairs=0.5) - 6 * looked_up
    return flops * run.workload.seq_len * run.workload.global_batch / (time_s * peak)


def _flops_per_token(run: MeasuredRun, pairs: float = 1.0) -> float:
    """Return the FLOPs of a token in training, of attention with a share of all pairs (PaLM, arXiv 2204.02311, B)."""
    model = run.model
    scores = 6 * model.num_layers * model.num_heads * (model.head_dim + model.value_dim) * run.workload.seq_len
    return 6 * model.active_parameters + pairs * scores


def _disagreeing(judged: Sequence[_JudgedRow]) -> Named:
    """Name rows whose published rate and step time disagree, beside their usual ratio in the set."""
    named: Named = {}
    for key in _RATES:
        ratios = {place: ratio for place, row in enumerate(judged) if (ratio := _rate_ratio(row, key)) is not None}
        by_set: dict[str, list[float]] = defaultdict(list)
        for place, (ratio, _) in ratios.items():
            by_set[judged[place].timed.set].append(ratio)
        usual = {
            name: median(set_ratios) if len(set_ratios) > _LEAST_NEIGHBOURS else 0.0
            for name, set_ratios in by_set.items()
        }
        for place, (ratio, rounding) in ratios.items():
            distance = ratio - usual[judged[place].timed.set]
            if abs(distance) > _DISAGREE + rounding:
                says = f"published {key} is {math.exp(distance):.2g} times what its step time and batch say"
                named[place] = _suspect(judged[place], _kind(distance), distance, says)
    return named


def _rate_ratio(row: _JudgedRow, key: str) -> tuple[float, float] | None:
    """Return the logarithm of a published rate over that of the row's step time, and how far rounding may move it."""
    stated = (row.row.published or {}).get(key)
    if not isinstance(stated, int | float) or stated <= 0:
        return None
    time, cluster = row.timed.time, row.timed.run.cluster
    tokens_per_s = time.work / time.measured
    flops_per_s = tokens_per_s * _flops_per_token(row.timed.run) / cluster.num_ranks
    activations = row.timed.run.workload.precision.activations
    peak = cluster.rank_matrix_flops_per_s(activations)
    rates = {"mfu_percent": 100 * flops_per_s / peak, "tflops_per_chip": flops_per_s / 1e12}
    decimals = len(str(stated).partition(".")[2])
    return math.log(stated / rates.get(key, tokens_per_s)), math.log1p(0.5 * 10**-decimals / stated)


def _memories(judged: Sequence[_JudgedRow]) -> Named:
    """Name rows whose memory is in another unit, or more than a chip has."""
    named: Named = {}
    for place, row in enumerate(judged):
        stated, has = row.row.peak_memory_gib, row.timed.run.cluster.chip.memory_bytes / GIB
        if stated:
            ratio = math.log(stated / row.predicted.predicted_peak_memory_gib)
            says = _memory_words(stated, ratio, has)
            named |= {place: _suspect(row, "unit of memory", ratio, says)} if says else {}
    return named


def _memory_words(stated: float, ratio: float, has: float) -> str:
    """Say what is wrong with a stated memory, by the logarithm of its ratio to the prediction; "" if nothing is.

    >>> _memory_words(51_200.0, math.log(1000.0), 79.2)
    'holds 1e+03 times what is predicted: 1024 lies between MiB and GiB'
    >>> _memory_words(83.0, 0.1, 79.2)
    'holds 83.0 GiB where a chip has 79.2, as GB would that are named GiB'
    """
    for factor, units in _SIZES.items():
        if abs(abs(ratio) - math.log(factor)) < _NEAR_SIZE:
            return f"holds {math.exp(ratio):.2g} times what is predicted: {factor} lies between {units}"
    if stated <= has:
        return ""
    more = ", as GB would that are named GiB" if stated * 1e9 / GIB <= has else ""
    return f"holds {stated:.1f} GiB where a chip has {has:.1f}{more}"
