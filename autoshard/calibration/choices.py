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
from autoshard.calibration.validate import LEAST_LAYOUTS, TimedRun, spearman
from autoshard.errors import InputError, require
from autoshard.extensions import user_function
from autoshard.plan.plan import rounded

PLANNER, LEFT_OUT = "autoshard", "autoshard, left out"
EVERY, BUT = "all", "all but "  # sets that sum up the other sets: each counts once
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
    """Return the users' functions of ``--predictor`` and ``--chooser``, by ``FILE.py:FUNCTION``, split at commas."""

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
    set_choices: list[Choices] = []
    for name in dict.fromkeys(row.set for row in rows):
        groups = _groups([row for row in rows if row.set == name], splits or {})
        for who, predicted in ({PLANNER: rows} | dict(more or {})).items():
            if set_rows := [row for row in predicted if row.set == name]:
                seconds = [group.predicted for group in _groups(set_rows, {})]
                set_choices.append(_predicted(name, who, groups, seconds, set_rows))
        for who, predict in predictors.items():
            seconds = [_guesses(who, predict, group) for group in groups]
            set_choices.append(_predicted(name, who, groups, seconds))
        questions = [group for group in groups if group.counts]
        for who, choose in choosers.items():
            costs = [_of_places(question.measured, _chosen(who, choose, question)) for question in questions]
            set_choices += [_summed(name, who, groups, costs)] if costs else []
    return (*set_choices, *_together(set_choices, Counter(row.set for row in rows)))


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
    """Return the seconds that a predictor gives for each layout of a group, for each token."""
    layouts = zip(group.runs, group.splits, group.work, strict=True)
    return tuple(_seconds(who, predict, run, split) / work for run, split, work in layouts)


def _predicted(
    name: str,
    who: str,
    groups: Sequence[_ChoiceGroup],
    seconds: Sequence[Sequence[float]],
    rows: Sequence[TimedRun] = (),
) -> Choices:
    """Choose the layouts with the smallest predictions; ``rows`` have stated intervals."""
    pairs = list(zip(groups, seconds, strict=True))
    costs = [_of_places(group.measured, _smallest(guesses)) for group, guesses in pairs if group.counts]
    ranks = [
        rank for group, guesses in pairs if group.counts and (rank := spearman(guesses, group.measured)) is not None
    ]
    errors = [
        abs(guess / time - 1) for group, guesses in pairs for guess, time in zip(guesses, group.measured, strict=True)
    ]
    stated = [(pair.low, pair.measured, pair.high) for row in rows if (pair := row.time).low and pair.high]
    return _summed(
        name, who, groups, costs,
        spearman=_mean(ranks),
        mape=_mean(errors),
        coverage=_mean(low <= measured <= high for low, measured, high in stated if low and high),
        width=_mean((high / low) ** 0.5 - 1 for low, _, high in stated if low and high),
    )  # fmt: skip


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None where there are none."""
    numbers = [value for value in values if value is not None]
    return rounded(fmean(numbers)) if numbers else None


def _smallest(guesses: Sequence[float]) -> list[int]:
    """Return the places of the smallest prediction."""
    least = min(guesses)
    return [place for place, guess in enumerate(guesses) if guess == least]


def _of_places(measured: Sequence[float], places: Sequence[int]) -> tuple[float, float]:
    """Return the mean regret of some layouts, against the fastest and against the second fastest."""
    fastest, second, *_ = sorted(measured)
    to_second = fmean(max(measured[place] / second - 1, 0.0) for place in places)
    return rounded(fmean(measured[place] for place in places) / fastest - 1), rounded(to_second)


def _summed(
    name: str, who: str, groups: Sequence[_ChoiceGroup], costs: Sequence[tuple[float, float]], **more: float | None
) -> Choices:
    """Sum up the costs of the groups that count."""
    names = [group.name for group in groups if group.counts]
    worst = max(zip((cost for cost, _ in costs), names, strict=True), default=(None, ""))
    return Choices(
        set=name, who=who, num_groups=len(names), most_layouts=max(len(group.runs) for group in groups),
        regret=_mean(cost for cost, _ in costs), worst_regret=worst[0], worst_group=worst[1],
        regret_to_second=_mean(cost for _, cost in costs), **more,
    )  # fmt: skip


def _together(set_choices: Sequence[Choices], sizes: Counter[str]) -> Iterator[Choices]:
    """Yield for each chooser the mean over all sets, and over all but that with most rows; the worst is a maximum."""
    (largest, _), *smaller_sets = sizes.most_common()
    for name, out in ((EVERY, ""), (BUT + largest, largest)) if smaller_sets else ():
        for who in dict.fromkeys(choice.who for choice in set_choices):
            averaged = [choice for choice in set_choices if choice.who == who and choice.set != out]
            worst_regrets = [
                (choice.worst_regret, choice.worst_group) for choice in averaged if choice.worst_regret is not None
            ]
            worst = max(worst_regrets, default=(None, ""))
            means = {key: _mean(getattr(choice, key) for choice in averaged) for key in _MEANS}
            if averaged:
                yield Choices(
                    set=name, who=who, num_groups=sum(choice.num_groups for choice in averaged),
                    most_layouts=max(choice.most_layouts for choice in averaged),
                    worst_regret=worst[0], worst_group=worst[1], **means,
                )  # fmt: skip


def _seconds(who: str, predict: Predictor, run: MeasuredRun, split: str) -> float:
    try:
        takes_split = "split" in inspect.signature(predict).parameters
        seconds = float(predict(run, split=split) if takes_split else predict(run))
    except Exception as error:  # of somebody's own code
        raise InputError.of(f"--predictor {who}", f"{type(error).__name__}: {error}") from error
    require((seconds > 0, f"--predictor {who}", f"must return seconds above 0, not {seconds}"))
    return seconds


def _chosen(who: str, choose: Chooser, question: _ChoiceGroup) -> tuple[int, ...]:
    try:
        answer = choose(question.runs)
        places = (answer,) if isinstance(answer, int) else tuple(map(int, answer))
    except Exception as error:  # of somebody's own code
        raise InputError.of(f"--chooser {who}", f"{type(error).__name__}: {error}") from error
    count = len(question.runs)
    fine = bool(places) and all(0 <= place < count for place in places)
    require((fine, f"--chooser {who}", f"must return places from 0 to {count - 1}, not {answer!r}"))
    return places
