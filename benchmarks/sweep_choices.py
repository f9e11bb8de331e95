"""What the planner's choice costs on sweeps that others ran, beside rules of thumb and a roofline.

The planner's predictions of a row are those of the fit that left out its group, or its model.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from autoshard.calibration.choices import PLANNER, Choices, choices
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.calibration.validate import TimedRun, validated
from benchmarks.choosers import at_random, most_data_parallelism, node_wide, roofline
from benchmarks.pages import ROOT, head, line, with_table
from benchmarks.result import Extra, Result

SWEEPS = Path(__file__).parent / "data" / "sweeps"
PAGE = ROOT / "docs" / "accuracy.md"
BAR = 0.10  # mean regret over the sweeps
_WORDS = {
    "node_wide": "tensor parallel = a node, then the fewest stages",
    "most_data_parallelism": "most data parallelism that ran",
    "at_random": "any layout that ran",
    "roofline": "roofline: half of the peak, tp exposed, the bubble",
}


def run(write: bool = False) -> Result:
    """Choose in each group of the sweeps; write the table of the page if asked to."""
    rules = {one.__name__: one for one in (node_wide, most_data_parallelism, at_random)}
    start_s = time.process_time()
    times = left_out(validated(SWEEPS).times)
    found = choices(times, {roofline.__name__: roofline}, rules)
    cpu_s = time.process_time() - start_s
    if write:
        PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    return judge(found, cpu_s)


def left_out(rows: Sequence[TimedRun]) -> list[TimedRun]:
    """Return rows with what was predicted of them when their group, or their model, was left out of the fit."""
    known: dict[tuple[str, MeasuredRun], float] = {}  # rows of one layout have one prediction
    found: list[TimedRun] = []
    for row in rows:
        rests_on = row.run.constants.fit
        assert rests_on and row.time.id in rests_on.rows, "every row of a sweep is in a fit"
        seconds = rests_on.rows[row.time.id] * row.time.measured
        predicted = known.setdefault((row.time.group, row.run), seconds)
        found.append(replace(row, time=replace(row.time, predicted=predicted)))
    return found


def judge(found: Sequence[Choices], cpu_s: float) -> Result:
    """Hold the planner's mean regret against the bar, and against whoever else chooses best."""
    regrets = {who: fmean(one.regret for one in found if one.who == who) for who in dict.fromkeys(o.who for o in found)}
    least = min(regret for who, regret in regrets.items() if who != PLANNER)
    extras: dict[str, Extra] = {f"{who}_regret": round(regret, 4) for who, regret in regrets.items()}
    extras |= {f"{one.set}.{one.who}": round(one.regret, 4) for one in found}
    value = regrets[PLANNER]
    return Result(
        name="sweep_choices", value=round(value, 4), unit="mean regret on sweeps of others", bar=BAR,
        holds=value <= min(BAR, least), extras={**extras, "cpu_s": round(cpu_s, 1)},
    )  # fmt: skip


def page_text(text: str, found: Sequence[Choices]) -> str:
    """Return the page with its table written anew."""
    names = ("sweep", "who chooses", "groups", "mean regret", "worst", "to the second", "Spearman", "error")
    lines = [
        line([
            one.set, _WORDS.get(one.who, one.who), str(one.num_groups), f"{one.regret:.1%}", f"{one.worst_regret:.1%}",
            f"{one.regret_to_second:.1%}", "-" if one.spearman is None else f"{one.spearman:.2f}",
            "-" if one.mape is None else f"{one.mape:.0%}",
        ])
        for one in found
    ]  # fmt: skip
    table = "\n".join([*head(names, ("sweep", "who chooses")), *lines])
    return with_table(text, "choices", table, "sweep_choices")
