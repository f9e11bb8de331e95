"""Which runs to measure, for a terminal and as data: today's choice, its expected regret, that after each run."""

from collections.abc import Iterator
from typing import Any

from autoshard.calibration.advice import Advice
from autoshard.plan.plan import Dollars
from autoshard.report.sheet import Cell, Sheet, Table, Words
from autoshard.report.words import axes_words, prediction_of
from autoshard.units import format_dollars, format_seconds

STEPS = 10  # of a run: the first two are not counted, and the others vary little
_LEGEND = (
    "Regret: how much longer the choice takes than the fastest of these plans, on average over what their step times "
    "may be. The choice is the plan of least expected time, which need not be the simple one that plan writes. After: "
    "once this run and those above it are measured, if these plans stay the ones to choose from; runs are chosen in "
    "pairs where one alone tells nothing."
)


def advice_json(advice: Advice, total_tokens: float | None) -> dict[str, Any]:
    """Return the advice as data."""
    return {
        "choice": str(advice.choice.plan.candidate),
        "step_s": advice.choice.step_s,
        "num_rows": advice.num_rows,
        "num_runs": advice.num_runs,
        "regret": _regret_json(advice, advice.regret, total_tokens),
        "options": [
            {"candidate": str(option.plan.candidate), "predicted_s": prediction_of(option.plan).step_time_s,
             "step_s": option.step_s, "low_s": option.low_s, "high_s": option.high_s}
            for option in advice.options
        ],
        "runs": [
            {"candidate": str(proposal.plan.candidate), "model": proposal.plan.model.name,
             "nodes": proposal.plan.cluster.num_nodes, "global_batch": proposal.plan.workload.global_batch,
             "steps": STEPS, "predicted_s": prediction_of(proposal.plan).step_time_s,
             "usd": _usd_of_run(proposal.plan.dollars),
             "regret_after": _regret_json(advice, proposal.regret, total_tokens)}
            for proposal in advice.proposals
        ],
    }  # fmt: skip


def advice_sheets(advice: Advice, total_tokens: float | None) -> Iterator[Sheet]:
    """Yield the advice in a sentence, the plans that can be chosen, and the runs to measure."""
    number = advice.options.index(advice.choice) + 1
    moved = ", though the planner's constants alone would choose plan 1" if number > 1 else ""
    rows = "1 row is known" if advice.num_rows == 1 else f"{advice.num_rows} rows are known"
    regret = ", ".join(_regret_words(_regret_json(advice, advice.regret, total_tokens)))
    yield Sheet(notes=[
        f"today's choice is plan {number}, {format_seconds(advice.choice.step_s)} a step{moved}; {rows}",
        Words(str(advice.choice.plan.candidate), "code"),
        f"expected regret: {regret}",
    ])  # fmt: skip
    yield Sheet(tables=[_options_table(advice)])
    if advice.proposals:
        yield Sheet(tables=[_runs_table(advice)])
        yield Sheet(notes=[Words(_LEGEND, "soft")])
    elif len(advice.options) > 1:
        why = f"None of {advice.num_runs} runs of this size would change the choice"
        words = f"{why}: they share too little with the plans. Allow more nodes with --run-nodes"
        yield Sheet(notes=[Words(words, "warning")])
    else:
        yield Sheet(notes=["There is nothing to choose, so nothing can be regretted."])


def _regret_words(regret: dict[str, Any]) -> list[str]:
    """Return a regret in every unit that is known."""
    per_billion, usd = regret["usd_per_billion_tokens"], regret["usd"]
    words = [f"{regret['share']:.2%} of a step", format_seconds(regret["s_per_step"])]
    words += [] if per_billion is None else [f"{format_dollars(per_billion)} per billion tokens"]
    return words if usd is None else [*words, f"{format_dollars(usd)} in all"]


def _options_table(advice: Advice) -> Table:
    rows: list[list[Cell]] = []
    for number, option in enumerate(advice.options, 1):
        chosen = "chosen" if option is advice.choice else ""
        seconds = map(format_seconds, (prediction_of(option.plan).step_time_s, option.step_s))
        between = f"{format_seconds(option.low_s)} to {format_seconds(option.high_s)}"
        rows.append([str(number), chosen, *seconds, between, axes_words(option.plan)])
    columns = (">plan", "", ">predicted", ">with the rows", ">80% within", "layout")
    return Table("What can be chosen", columns, rows, drop=("layout",))


def _runs_table(advice: Advice) -> Table:
    rows: list[list[Cell]] = []
    for number, proposal in enumerate(advice.proposals, 1):
        plan, (share, of_step, *dollars) = proposal.plan, _regret_words(_regret_json(advice, proposal.regret, None))
        takes, usd = format_seconds(STEPS * prediction_of(plan).step_time_s), _usd_of_run(plan.dollars)
        cost = "-" if usd is None else format_dollars(usd)
        after = [share.partition(" ")[0], of_step, dollars[0].partition(" ")[0] if dollars else "-"]
        rows.append([str(number), str(plan.cluster.num_nodes), str(plan.model.num_layers), takes, cost, *after,
                     axes_words(plan), Words(str(plan.candidate), "code")])  # fmt: skip
    columns = (">run", ">nodes", ">layers", f">{STEPS} steps", ">cost", ">regret after", ">of a step",
               ">per billion tokens", "layout", "candidate")  # fmt: skip
    # Without a price no row has dollars.
    shown = [place for place in range(len(columns)) if any(row[place] != "-" for row in rows)]
    columns, rows = [columns[place] for place in shown], [[row[place] for place in shown] for row in rows]
    drop = [name for name in ("layout", ">per billion tokens", ">layers") if name in columns]
    return Table("What to measure next", columns, rows, drop=drop, below="candidate")


def _regret_json(advice: Advice, share: float, total_tokens: float | None) -> dict[str, Any]:
    per_billion = advice.usd_per_billion_tokens(share)
    usd = None if per_billion is None or total_tokens is None else per_billion * total_tokens / 1e9
    return {
        "share": share,
        "s_per_step": share * advice.choice.step_s,
        "usd_per_billion_tokens": per_billion,
        "usd": usd,
    }


def _usd_of_run(dollars: Dollars | None) -> float | None:
    return dollars.usd_per_step * STEPS if dollars else None
