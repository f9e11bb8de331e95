"""What the planner's choice costs on sweeps that others ran, beside other cost models and rules of thumb.

The planner's predictions of a row are those of the fit that left out its split (``benchmarks/data/splits.json``).
"""

import time
from collections.abc import Sequence
from pathlib import Path

from autoshard.calibration.choices import BUT, EVERY, PLANNER, Choices, choices
from autoshard.calibration.frozen import FrozenRows, left_out, splits_beside
from autoshard.calibration.validate import validated
from autoshard.report.validation import choices_cells
from benchmarks.baselines import calculon, llm_analysis
from benchmarks.baselines.rules import at_random, most_data_parallelism, node_wide
from benchmarks.pages import ROOT, head, line, with_table
from benchmarks.regret_chart import CHART, chart
from benchmarks.result import Extra, Result

SWEEPS = Path(__file__).parent / "data" / "sweeps"
PAGE = ROOT / "docs" / "developers" / "accuracy.md"
BAR = 0.10  # mean regret over the sweeps
WORDS = {
    PLANNER: PLANNER,
    "calculon": "Calculon's formulas",
    "llm_analysis": "llm-analysis' formulas",
    "node_wide": "tensor parallel = a node, then the fewest stages",
    "most_data_parallelism": "most data parallelism that ran",
    "at_random": "any layout that ran",
}


def run(write: bool = False) -> Result:
    """Choose in each group of the sweeps; write the table and the chart of the page if asked to."""
    start_s = time.process_time()
    found = sweep_choices()
    cpu_s = time.process_time() - start_s
    if write:
        PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
        CHART.write_text(chart(found, WORDS), encoding="utf-8")
    return judge(found, cpu_s)


def sweep_choices() -> tuple[Choices, ...]:
    """Return what each way to choose costs in each sweep."""
    known, splits = validated(SWEEPS), splits_beside(SWEEPS)
    assert splits, "the splits of this repository are in it"
    frozen = FrozenRows.of(splits, known.rows)
    rows = left_out(known.times, frozen.same)
    assert len(rows) == len(known.times), "every row of a sweep is in a fit, and as it was frozen"
    predictors = {"calculon": calculon.seconds, "llm_analysis": llm_analysis.seconds}
    rules = {one.__name__: one for one in (node_wide, most_data_parallelism, at_random)}
    return choices(rows, predictors, rules)


def judge(found: Sequence[Choices], cpu_s: float) -> Result:
    """Hold the planner's mean regret against the bar, and against whoever else chooses best."""
    regrets = {one.who: one.regret for one in found if one.set == EVERY and one.regret is not None}
    least = min(regret for who, regret in regrets.items() if who != PLANNER)
    extras: dict[str, Extra] = {f"{who}_regret": round(regret, 4) for who, regret in regrets.items()}
    extras |= {f"{one.set}.{one.who}": round(one.regret, 4) for one in found if one.regret is not None}
    value = regrets[PLANNER]
    return Result(
        name="sweep_choices", value=round(value, 4), unit="mean regret on sweeps of others", bar=BAR,
        holds=value <= min(BAR, least), extras={**extras, "cpu_s": round(cpu_s, 1)},
    )  # fmt: skip


def page_text(text: str, found: Sequence[Choices]) -> str:
    """Return the page with its table written anew."""
    names = (
        "sweep", "who chooses", "groups", "mean regret", "worst", "to the second", "Spearman", "error", "inside",
        "width",
    )  # fmt: skip
    lines = [line([_bold(one.set), WORDS[one.who], *choices_cells(one)]) for one in found]
    table = "\n".join([*head(names, names[:2]), *lines])
    return with_table(text, "choices", table, "sweep_choices")


def _bold(name: str) -> str:
    """Return the name of a set, those that sum up others in bold.

    >>> _bold("all but nanotron_h100"), _bold("fms_fsdp")
    ('**all but nanotron_h100**', 'fms_fsdp')
    """
    return f"**{name}**" if name == EVERY or name.startswith(BUT) else name
