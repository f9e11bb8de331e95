"""What a choice of layout costs where others measured: the planner's beside what anybody else would choose.

A group of measured rows is a question, for which each of its layouts was an answer. Who chooses sees what was run, and
nothing of what was measured. The regret is the time of the chosen layout over that of the fastest, less 1. Since the
fastest of noisy rows is partly luck, the regret against the second fastest is given as well, and is 0 for both of them.
Groups of two layouts say little about a choice: only their errors and intervals count.
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeAlias

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.validate import LEAST_LAYOUTS, TimedRun, regret, spearman
from autoshard.errors import InputError, require
from autoshard.extensions import user_function
from autoshard.plan.plan import rounded

PLANNER, LEFT_OUT = "autoshard", "autoshard, left out"
EVERY, BUT = "all", "all but "  # sets that sum up the others: each counts once
_MEANS = ("regret", "regret_to_second", "spearman", "mape", "coverage", "width")

# Seconds of a step. With a parameter ``split``, it gets the name of what a fit must have left out for this run.
Predictor: TypeAlias = Callable[..., float]
# The place of the run that it would choose among those of a group, or the places of several that are equal to it.
Chooser: TypeAlias = Callable[[Sequence[MeasuredRun]], "int | Sequence[int]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a way to choose costs in the groups of a data set, and how good the seconds are that it predicts, if any.

    Regrets and ``spearman`` are of groups of enough layouts, and None where there is none: ``most_layouts`` is how many
    the largest has. ``mape`` is over all layouts. ``coverage`` is the share of runs inside a stated interval, and
    ``width`` the mean factor of it either way, less 1.
    """

    set: str
    who: str
    num_groups: int  # of enough layouts
    most_layouts: int
    regret: float | None = None
    worst_regret: float | None = None
    worst_group: str = ""
    regret_to_second: float | None = None
    spearman: float | None = None
    mape: float | None = None
    coverage: float | None = None
    width: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoiceGroup:
    """The layouts of a group, each with the median of its measurements, and of the planner's predictions."""

    name: str
    runs: tuple[MeasuredRun, ...]
    splits: tuple[str, ...]  # what a fit must leave out for each
    work: tuple[float, ...]  # tokens of a step: groups are published in which the batch follows the layout
    measured: tuple[float, ...]  # seconds for each token
    predicted: tuple[float, ...]

    @property
    def counts(self) -> bool:
        """Whether it has enough layouts to say something about a choice."""
        return len(self.runs) >= LEAST_LAYOUTS


def user_choosers(
    predictors: str | None, choosers: str | None
) -> tuple[Mapping[str, Predictor], Mapping[str, Chooser]]:
    """Return functions of users' files, which are named with commas between them."""

    def functions(option: str, names: str | None) -> Mapping[str, Any]:
        return {name: user_function(name, option) for name in (names or "").split(",") if name}

    return functions("--predictor", predictors), functions("--chooser", choosers)


def choices(
    rows: Sequence[TimedRun],
    predictors: Mapping[str, Predictor],
    choosers: Mapping[str, Chooser],
    more: Mapping[str, Sequence[TimedRun]] | None = None,
    splits: Mapping[tuple[str, str], str] | None = None,
) -> tuple[Choices, ...]:
    """Return what each way to choose costs in every data set, in all together, and without the largest of them.

    ``more`` are other predictions of the planner for the same rows, by name. ``splits`` says what a fit must leave out
    for a row, by its data set and id.
    """
    found: list[Choices] = []
    for name in dict.fromkeys(row.set for row in rows):
        groups = _groups([row for row in rows if row.set == name], splits or {})
        for who, predicted in ({PLANNER: rows} | dict(more or {})).items():
            if some := [row for row in predicted if row.set == name]:
                seconds = [one.predicted for one in _groups(some, {})]
                found.append(_predicted(name, who, groups, seconds, some))
        for who, predict in predictors.items():
            seconds = [_guesses(who, predict, one) for one in groups]
            found.append(_predicted(name, who, groups, seconds))
        questions = [one for one in groups if one.counts]
        for who, choose in choosers.items():
            costs = [_of_places(one.measured, _chosen(who, choose, one)) for one in questions]
            found += [_summed(name, who, groups, costs)] if costs else []
    return (*found, *_together(found, Counter(row.set for row in rows)))


def _groups(rows: Sequence[TimedRun], splits: Mapping[tuple[str, str], str]) -> list[_ChoiceGroup]:
    groups: dict[str, dict[object, list[TimedRun]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.time.group][row.time.layout].append(row)
    return [
        _ChoiceGroup(
            name=group,
            runs=tuple(same[0].run for same in layouts.values()),
            splits=tuple(splits.get((same[0].set, same[0].time.id), "") for same in layouts.values()),
            work=tuple(same[0].time.work for same in layouts.values()),
            measured=tuple(median(row.time.measured / row.time.work for row in same) for same in layouts.values()),
            predicted=tuple(
                rounded(median(row.time.predicted / row.time.work for row in same)) for same in layouts.values()
            ),
        )
        for group, layouts in groups.items()
    ]


def _guesses(who: str, predict: Predictor, group: _ChoiceGroup) -> tuple[float, ...]:
    """Return what somebody predicts for each layout of a group, for each token."""
    asked = zip(group.runs, group.splits, group.work, strict=True)
    return tuple(_seconds(who, predict, run, split) / work for run, split, work in asked)


def _predicted(
    name: str,
    who: str,
    groups: Sequence[_ChoiceGroup],
    seconds: Sequence[Sequence[float]],
    rows: Sequence[TimedRun] = (),
) -> Choices:
    """Choose what is predicted to be fastest; ``rows`` have stated intervals."""
    pairs = list(zip(groups, seconds, strict=True))
    costs = [_of_predictions(one.measured, guesses) for one, guesses in pairs if one.counts]
    ranks = [rank for one, guesses in pairs if one.counts and (rank := spearman(guesses, one.measured)) is not None]
    errors = [
        abs(guess / time - 1) for one, guesses in pairs for guess, time in zip(guesses, one.measured, strict=True)
    ]
    stated = [(one.low, one.measured, one.high) for row in rows if (one := row.time).low and one.high]
    return _summed(
        name, who, groups, costs,
        spearman=_mean(ranks),
        mape=_mean(errors),
        coverage=_mean(low <= measured <= high for low, measured, high in stated if low and high),
        width=_mean((high / low) ** 0.5 - 1 for low, _, high in stated if low and high),
    )  # fmt: skip


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known, or None where nothing is."""
    known = [value for value in values if value is not None]
    return rounded(fmean(known)) if known else None


def _of_predictions(measured: Sequence[float], guesses: Sequence[float]) -> tuple[float, float]:
    """Return the regret of the smallest prediction, against the fastest and against the second fastest."""
    least = min(guesses)
    return regret(guesses, measured), _to_second(measured, [place for place, one in enumerate(guesses) if one == least])


def _of_places(measured: Sequence[float], places: Sequence[int]) -> tuple[float, float]:
    mean = fmean(measured[place] for place in places)
    return rounded(mean / min(measured) - 1), _to_second(measured, places)


def _to_second(measured: Sequence[float], places: Sequence[int]) -> float:
    second = sorted(measured)[1]
    return rounded(fmean(max(measured[place] / second - 1, 0.0) for place in places))


def _summed(
    name: str, who: str, groups: Sequence[_ChoiceGroup], costs: Sequence[tuple[float, float]], **more: float | None
) -> Choices:
    """Sum up the costs of the groups that count."""
    names = [one.name for one in groups if one.counts]
    worst = max(zip((cost for cost, _ in costs), names, strict=True), default=(None, ""))
    return Choices(
        set=name, who=who, num_groups=len(names), most_layouts=max(len(one.runs) for one in groups),
        regret=_mean(cost for cost, _ in costs), worst_regret=worst[0], worst_group=worst[1],
        regret_to_second=_mean(cost for _, cost in costs), **more,
    )  # fmt: skip


def _together(found: Sequence[Choices], sizes: Counter[str]) -> Iterator[Choices]:
    """Yield the means over all sets, each of which counts once, and over all but the largest."""
    (largest, _), *others = sizes.most_common()
    for name, out in ((EVERY, ""), (BUT + largest, largest)) if others else ():
        for who in dict.fromkeys(one.who for one in found):
            some = [one for one in found if one.who == who and one.set != out]
            known = [(one.worst_regret, one.worst_group) for one in some if one.worst_regret is not None]
            worst = max(known, default=(None, ""))
            means = {key: _mean(getattr(one, key) for one in some) for key in _MEANS}
            if some:
                yield Choices(
                    set=name, who=who, num_groups=sum(one.num_groups for one in some),
                    most_layouts=max(one.most_layouts for one in some), worst_regret=worst[0], worst_group=worst[1],
                    **means,
                )  # fmt: skip


def _seconds(who: str, predict: Predictor, run: MeasuredRun, split: str) -> float:
    try:
        takes_split = "split" in inspect.signature(predict).parameters
        found = float(predict(run, split=split) if takes_split else predict(run))
    except Exception as error:  # of somebody's own code
        raise InputError.of(f"--predictor {who}", f"{type(error).__name__}: {error}") from error
    require((found > 0, f"--predictor {who}", f"must return seconds above 0, not {found}"))
    return found


def _chosen(who: str, choose: Chooser, question: _ChoiceGroup) -> tuple[int, ...]:
    try:
        found = choose(question.runs)
        places = (found,) if isinstance(found, int) else tuple(map(int, found))
    except Exception as error:  # of somebody's own code
        raise InputError.of(f"--chooser {who}", f"{type(error).__name__}: {error}") from error
    count = len(question.runs)
    fine = bool(places) and all(0 <= place < count for place in places)
    require((fine, f"--chooser {who}", f"must return places from 0 to {count - 1}, not {found!r}"))
    return places
