"""What a choice costs, by hand: the planner's, and those of other people's cost models and rules of thumb."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.calibration.choices import BUT, EVERY, PLANNER, Choices, choices
from autoshard.calibration.validate import Compared, TimedRun, validated
from autoshard.cli import main
from autoshard.errors import InputError
from benchmarks.baselines.rules import at_random
from tests.calibration.measured_cases import SMALL, written

SECONDS = (12.0, 10.0, 30.0, 11.0)  # of layouts that a user could choose from
GUESSES = (1.0, 2.0, 3.0, 4.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What was run in some row."""
    path = written(tmp_path_factory.mktemp("rows"), SMALL)
    return validated(path).times[0].run


def timed(run: Any, seconds: tuple[float, ...], guesses: tuple[float, ...], group: str = "g") -> list[TimedRun]:
    """Rows of a group."""
    times = (
        Compared(id=f"{group}{place}", group=group, layout=place, predicted=guess, measured=one, work=10.0)
        for place, (one, guess) in enumerate(zip(seconds, guesses, strict=True))
    )
    return [TimedRun(set="s", run=run, time=one) for one in times]


def of(found: tuple[Choices, ...], who: str) -> Choices:
    return next(one for one in found if one.who == who)


def test_the_regret_is_that_of_the_smallest_prediction_against_the_fastest_and_the_second(run: Any):
    rows = timed(run, SECONDS, GUESSES) + timed(run, (1.0, 2.0, 4.0), (5.0, 9.0, 9.0), "h")
    (found,) = choices(rows, {}, {})
    assert (found.who, found.num_groups) == (PLANNER, 2)
    assert (found.regret, found.worst_regret, found.worst_group) == (pytest.approx(0.1), pytest.approx(0.2), "g")
    assert found.regret_to_second == pytest.approx((12 / 11 - 1) / 2), "the fastest costs nothing against the second"
    assert found.mape == pytest.approx(((11 / 12 + 0.8 + 0.9 + 7 / 11) / 4 * 4 + (4 + 3.5 + 1.25)) / 7)


def test_groups_of_two_layouts_say_nothing_and_a_layout_measured_twice_counts_once(run: Any):
    (few,) = choices(timed(run, (1.0, 2.0), (2.0, 1.0)), {}, {"first": lambda _: 0})
    assert (few.who, few.num_groups, few.most_layouts) == (PLANNER, 0, 2)
    assert (few.regret, few.worst_regret, few.spearman) == (None, None, None)
    assert few.mape == pytest.approx(0.75), "errors need no group"
    again = timed(run, (1.0, 2.0, 4.0), (3.0, 2.0, 5.0))
    again.append(
        TimedRun(set="s", run=run, time=Compared(id="x", group="g", layout=1, predicted=2.0, measured=8.0, work=10.0))
    )
    assert choices(again, {}, {})[0].regret == pytest.approx(4.0), "the median of 2 and 8 is 5"


def test_others_choose_by_seconds_or_by_places_and_equal_places_count_by_their_mean(run: Any):
    rows, guesses = timed(run, SECONDS, GUESSES), iter((9.0, 9.0, 9.0, 1.0))
    found = choices(
        rows, {"mine": lambda _: next(guesses)}, {"first": lambda _: 0, "all": at_random, "two": lambda _: (1, 3)}
    )
    assert of(found, "mine").regret == pytest.approx(0.1)
    assert of(found, "first").regret == pytest.approx(0.2) and of(found, "first").mape is None
    assert of(found, "all").regret == pytest.approx(63 / 4 / 10 - 1)
    assert of(found, "two").regret == pytest.approx(0.05)
    assert of(found, "two").regret_to_second == 0


@pytest.mark.parametrize(
    ("kind", "answer", "says"),
    [
        ("predictors", lambda _: 1 / 0, "--predictor mine: ZeroDivisionError: division by zero"),
        ("predictors", lambda _: -1.0, "--predictor mine: must return seconds above 0, not -1.0"),
        ("choosers", lambda _: 4, "--chooser mine: must return places from 0 to 3, not 4"),
        ("choosers", lambda _: (), "--chooser mine: must return places from 0 to 3, not ()"),
        ("choosers", lambda _: "x", "--chooser mine: ValueError"),
    ],
)
def test_what_another_cannot_answer_is_told_in_one_sentence(run: Any, kind: str, answer: Any, says: str):
    with pytest.raises(InputError) as caught:
        choices(timed(run, SECONDS, GUESSES), **{"predictors": {}, "choosers": {}, kind: {"mine": answer}})
    assert str(caught.value).startswith(says)


def test_the_command_scores_files_of_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine = tmp_path / "mine.py"
    mine.write_text("def seconds(run): return float(run.candidate.tp)\ndef last(runs): return len(runs) - 1\n", "utf-8")
    layouts = [(1, 4, 100.0), (2, 2, 30.0), (4, 1, 50.0)]  # tp, dp, seconds
    rows = [{**SMALL, "id": str(tp), "tp": tp, "dp": dp, "step_time_s": time_s} for tp, dp, time_s in layouts]
    path = written(tmp_path, *rows)
    asked = ["validate", str(path), "--predictor", f"{mine}:seconds", "--chooser", f"{mine}:last", "--json"]
    assert main(asked) == 0
    found = {one["who"]: one for one in json.loads(capsys.readouterr().out)["choices"]}
    assert list(found) == [PLANNER, f"{mine}:seconds", f"{mine}:last"]
    assert found[f"{mine}:last"]["regret"] == pytest.approx(50 / 30 - 1)
    assert found[f"{mine}:seconds"]["regret"] == pytest.approx(100 / 30 - 1)
    assert main(["validate", str(path), "--chooser", f"{mine}:nothing"]) == 2
    assert "has no function nothing" in capsys.readouterr().err


def test_intervals_are_counted_by_their_share_and_by_their_mean_factor(run: Any):
    rows = timed(run, (10.0, 20.0, 30.0), (10.0, 10.0, 30.0))
    bounds = [(8.0, 12.5), (8.0, 12.5), (None, None)]
    rows = [
        replace(row, time=replace(row.time, low=low, high=high)) for row, (low, high) in zip(rows, bounds, strict=True)
    ]
    (found,) = choices(rows, {}, {})
    assert (found.coverage, found.width) == (0.5, pytest.approx(0.25))
    assert of(choices(rows, {"mine": lambda _: 1.0}, {}), "mine").width is None


def test_sets_are_summed_up_each_once_and_again_without_the_largest(run: Any):
    rows = timed(run, SECONDS, GUESSES)
    rows += [replace(row, set="t") for row in timed(run, (1.0, 2.0, 4.0), (9.0, 5.0, 9.0))]
    rows += [replace(row, set="u") for row in timed(run, (1.0, 2.0), (5.0, 9.0))]
    found = {one.set: one for one in choices(rows, {}, {"first": lambda _: 0}) if one.who == PLANNER}
    assert list(found) == ["s", "t", "u", EVERY, f"{BUT}s"]
    assert found[EVERY].regret == pytest.approx((0.2 + 1.0) / 2), "the third has no group that counts"
    assert found[EVERY].worst_regret == pytest.approx(1.0) and found[EVERY].num_groups == 2
    assert found[f"{BUT}s"].regret == pytest.approx(1.0)
    errors = [found[name].mape or 0.0 for name in "stu"]
    assert found[EVERY].mape == pytest.approx(sum(errors) / 3)


def test_a_predictor_that_asks_for_it_gets_the_split_of_each_row(run: Any):
    rows, asked = timed(run, (1.0, 2.0, 4.0), GUESSES[:3]), list[str]()

    def fitted(_: Any, split: str) -> float:
        asked.append(split)
        return 1.0

    splits = {("s", "g0"): "one model", ("s", "g2"): "another", ("other", "g1"): "no row of this set"}
    choices(rows, {"mine": fitted}, {}, None, splits)
    assert asked == ["one model", "", "another"]
