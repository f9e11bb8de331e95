"""What a choice of layout costs where others measured: the planner's beside what anybody else would choose.

A group of measured rows is a question, for which each of its layouts was an answer. Who chooses sees what was run, and
nothing of what was measured. The regret is the time of the chosen layout over that of the fastest, less 1. Since the
fastest of noisy rows is partly luck, the regret against the second fastest is given as well, and is 0 for both of them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeAlias

from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.validate import LEAST_LAYOUTS, TimedRun, regret, spearman
from autoshard.errors import InputError, require
from autoshard.extensions import user_function
from autoshard.plan.plan import rounded

PLANNER = "autoshard"

Predictor: TypeAlias = Callable[[MeasuredRun], float]  # seconds of a step
# The place of the run that it would choose among those of a group, or the places of several that are equal to it.
Chooser: TypeAlias = Callable[[Sequence[MeasuredRun]], "int | Sequence[int]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a way to choose costs in the groups of a data set; ``spearman`` and ``mape`` are of who predicts seconds."""

    set: str
    who: str
    num_groups: int
    regret: float
    worst_regret: float
    worst_group: str
    regret_to_second: float
    spearman: float | None = None
    mape: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChoiceGroup:
    """The layouts of a group, each with the median of its measurements, and of the planner's predictions."""

    name: str
    runs: tuple[MeasuredRun, ...]
    work: tuple[float, ...]  # tokens of a step: groups are published in which the batch follows the layout
    measured: tuple[float, ...]  # seconds for each token
    predicted: tuple[float, ...]


def user_choosers(
    predictors: str | None, choosers: str | None
) -> tuple[Mapping[str, Predictor], Mapping[str, Chooser]]:
    """Return functions of users' files, which are named with commas between them."""

    def functions(option: str, names: str | None) -> Mapping[str, Any]:
        return {name: user_function(name, option) for name in (names or "").split(",") if name}

    return functions("--predictor", predictors), functions("--chooser", choosers)


def choices(
    rows: Sequence[TimedRun], predictors: Mapping[str, Predictor], choosers: Mapping[str, Chooser]
) -> tuple[Choices, ...]:
    """Return what each way to choose costs in every data set that has groups of enough layouts."""
    found: list[Choices] = []
    for name in dict.fromkeys(row.set for row in rows):
        questions = _questions([row for row in rows if row.set == name])
        if not questions:
            continue
        found.append(_predicted(name, PLANNER, questions, [one.predicted for one in questions]))
        for who, predict in predictors.items():
            seconds = [
                tuple(_seconds(who, predict, run) / work for run, work in zip(one.runs, one.work, strict=True))
                for one in questions
            ]
            found.append(_predicted(name, who, questions, seconds))
        for who, choose in choosers.items():
            costs = [_of_places(one.measured, _chosen(who, choose, one)) for one in questions]
            found.append(_summed(name, who, questions, costs))
    return tuple(found)


def _questions(rows: Sequence[TimedRun]) -> list[_ChoiceGroup]:
    groups: dict[str, dict[object, list[TimedRun]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.time.group][row.time.layout].append(row)
    return [
        _ChoiceGroup(
            name=group,
            runs=tuple(same[0].run for same in layouts.values()),
            work=tuple(same[0].time.work for same in layouts.values()),
            measured=tuple(median(row.time.measured / row.time.work for row in same) for same in layouts.values()),
            predicted=tuple(
                rounded(median(row.time.predicted / row.time.work for row in same)) for same in layouts.values()
            ),
        )
        for group, layouts in groups.items()
        if len(layouts) >= LEAST_LAYOUTS
    ]


def _predicted(name: str, who: str, questions: Sequence[_ChoiceGroup], seconds: Sequence[Sequence[float]]) -> Choices:
    """Choose what is predicted to be fastest."""
    pairs = list(zip(questions, seconds, strict=True))
    costs = [_of_predictions(one.measured, guesses) for one, guesses in pairs]
    ranks = [rank for one, guesses in pairs if (rank := spearman(guesses, one.measured)) is not None]
    errors = [
        abs(guess / time - 1) for one, guesses in pairs for guess, time in zip(guesses, one.measured, strict=True)
    ]
    return _summed(
        name, who, questions, costs, spearman=rounded(fmean(ranks)) if ranks else None, mape=rounded(fmean(errors))
    )


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
    name: str, who: str, questions: Sequence[_ChoiceGroup], costs: Sequence[tuple[float, float]], **more: Any
) -> Choices:
    worst, group = max((cost, one.name) for one, (cost, _) in zip(questions, costs, strict=True))
    return Choices(
        set=name, who=who, num_groups=len(questions), regret=rounded(fmean(cost for cost, _ in costs)),
        worst_regret=worst, worst_group=group, regret_to_second=rounded(fmean(cost for _, cost in costs)), **more,
    )  # fmt: skip


def _seconds(who: str, predict: Predictor, run: MeasuredRun) -> float:
    try:
        found = float(predict(run))
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
