"""Which runs to measure, for a terminal and as data: today's choice, its expected regret, that after each run."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.calibration.advice import Advice
from autoshard.report.tables import Cell, FittingTable, prose, unbroken
from autoshard.report.terminal import prediction_of
from autoshard.report.words import axes_words
from autoshard.units import format_dollars, format_seconds

STEPS = 10  # of a run: the first two are not counted, and the others vary little
_LEGEND = (
    "Regret: how much longer the choice takes than the fastest of these plans, on average over what their step times "
    "may be. After: once this run and those above it are measured. Within: four of five step times lie in it."
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
            {"candidate": str(one.plan.candidate), "predicted_s": prediction_of(one.plan).step_time_s,
             "step_s": one.step_s, "within": one.within}
            for one in advice.options
        ],
        "runs": [
            {"candidate": str(one.plan.candidate), "model": one.plan.model.name, "nodes": one.plan.cluster.num_nodes,
             "global_batch": one.plan.workload.global_batch, "steps": STEPS,
             "predicted_s": prediction_of(one.plan).step_time_s, "usd": _usd_of_run(one.plan.dollars),
             "regret_after": _regret_json(advice, one.regret, total_tokens)}
            for one in advice.proposals
        ],
    }  # fmt: skip


def advice_report(advice: Advice, total_tokens: float | None) -> Group:
    """Return the advice in a sentence, the plans that can be chosen, and the runs to measure."""
    return Group(
        prose(_sentence(advice, total_tokens)),
        "",
        _options_table(advice),
        *([] if len(advice.options) > 1 else ["", prose("There is nothing to choose, so nothing can be regretted.")]),
        *(_runs_parts(advice) if advice.proposals else []),
        *(["", prose(_none(advice), "yellow")] if len(advice.options) > 1 and not advice.proposals else []),
    )


def _sentence(advice: Advice, total_tokens: float | None) -> str:
    found = _regret_json(advice, advice.regret, total_tokens)
    words = [f"{found['share']:.2%} of a step", format_seconds(found["s_per_step"])]
    words += (
        [f"{format_dollars(found['usd_per_billion_tokens'])} per billion tokens"]
        if found["usd_per_billion_tokens"]
        else []
    )
    words += [f"{format_dollars(found['usd'])} in all"] if found["usd"] else []
    rows = "1 row is known" if advice.num_rows == 1 else f"{advice.num_rows} rows are known"
    moved = advice.choice.plan is not advice.options[0].plan
    planner = "; the planner's constants alone would choose the first of these" if moved else ""
    return (
        f"today's choice: {advice.choice.plan.candidate}, {format_seconds(advice.choice.step_s)} a step{planner}. "
        f"{rows}. Expected regret: {', '.join(words)}"
    )


def _options_table(advice: Advice) -> FittingTable:
    rows: list[list[Cell]] = []
    for number, option in enumerate(advice.options, 1):
        chosen = "chosen" if option is advice.choice else ""
        figures = (prediction_of(option.plan).step_time_s, option.step_s)
        rows.append(
            [str(number), chosen, *map(format_seconds, figures), f"{option.within:.0%}", axes_words(option.plan)]
        )
    columns = (">plan", "", ">predicted", ">with the rows", ">within", "layout")
    return FittingTable("What can be chosen", columns, rows, drop=("layout",))


def _runs_parts(advice: Advice) -> list[RenderableType]:
    rows: list[list[Cell]] = []
    for number, one in enumerate(advice.proposals, 1):
        plan, found = one.plan, _regret_json(advice, one.regret, None)
        costs, per_billion = _usd_of_run(plan.dollars), found["usd_per_billion_tokens"]
        size = f"{plan.cluster.num_nodes}", f"{plan.model.num_layers}"
        takes = format_seconds(STEPS * prediction_of(plan).step_time_s)
        after = (
            f"{found['share']:.2%}",
            format_seconds(found["s_per_step"]),
            format_dollars(per_billion) if per_billion else "-",
        )
        rows.append([str(number), *size, takes, format_dollars(costs) if costs else "-", *after, axes_words(plan)])
    columns = (
        ">run",
        ">nodes",
        ">layers",
        f">{STEPS} steps",
        ">cost",
        ">regret after",
        ">of a step",
        ">per billion tokens",
        "layout",
    )
    lines = [
        unbroken(Text.assemble(f"{number:<4}", (str(one.plan.candidate), "green")))
        for number, one in enumerate(advice.proposals, 1)
    ]
    drop = ("layout", ">per billion tokens", ">layers")
    return ["", FittingTable("What to measure next", columns, rows, drop=drop), "", *lines, "", prose(_LEGEND, "dim")]


def _none(advice: Advice) -> str:
    """Say that no run helps, and what might."""
    return (
        f"None of {advice.num_runs} runs of this size would change the choice: they share too little with the plans. "
        "Allow more nodes with --run-nodes"
    )


def _regret_json(advice: Advice, share: float, total_tokens: float | None) -> dict[str, Any]:
    per_billion = advice.usd_per_billion_tokens(share)
    usd = None if per_billion is None or total_tokens is None else per_billion * total_tokens / 1e9
    return {
        "share": share,
        "s_per_step": share * advice.choice.step_s,
        "usd_per_billion_tokens": per_billion,
        "usd": usd,
    }


def _usd_of_run(dollars: Any) -> float | None:
    return dollars.usd_per_step * STEPS if dollars else None
