"""The answers to one question on several machines, side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.plan.plan import Plan
from autoshard.report.plan_sheets import total_cell, work_words
from autoshard.report.sheet import Cell, Sheet, Table, Words
from autoshard.report.structured import total_json
from autoshard.report.words import axes_words, prediction_of
from autoshard.spec.cluster import Cluster
from autoshard.spec.price import at_user_price
from autoshard.spec.record import encode
from autoshard.units import format_bytes, format_count, format_dollars, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineAnswer:
    """The plan of one machine; ``remark`` says why there is none, or that its search was not finished."""

    cluster: Cluster
    plan: Plan | None
    remark: str

    @property
    def step_s(self) -> float:
        """The predicted step; infinite without a plan."""
        return prediction_of(self.plan).step_time_s if self.plan else math.inf


def machines_json(answers: Sequence[MachineAnswer], total_tokens: float | None) -> dict[str, Any]:
    """Return a row for each machine, fastest first."""
    return {"machines": [_row(answer, total_tokens) for answer in answers], "tokens": total_tokens}


def _row(answer: MachineAnswer, total_tokens: float | None) -> Mapping[str, Any]:
    plan, cluster = answer.plan, answer.cluster
    where = {"cluster": cluster.name, "nodes": cluster.num_nodes, "ranks": cluster.num_ranks}
    if plan is None:
        return {**where, "plan": None, "remark": answer.remark}
    dollars = encode(plan.dollars)
    return {
        **where,
        "plan": str(plan.candidate),
        "prediction": encode(plan.prediction),
        "dollars": dollars,
        "total": total_json(plan, total_tokens),
        "remark": answer.remark,
    }


def machines_sheets(answers: Sequence[MachineAnswer], total_tokens: float | None) -> Iterator[Sheet]:
    """Yield a table with a row for each machine, fastest first, and what is to be typed for one of them."""
    rows: list[list[Cell]] = []
    for answer in answers:
        plan, cluster = answer.plan, answer.cluster
        place = [cluster.name, str(cluster.num_nodes), str(cluster.num_ranks)]
        if plan is None:
            rows.append([*place, *["-"] * (6 if total_tokens else 5), "no plan"])
            continue
        predicted = prediction_of(plan)
        total = [total_cell(plan, total_tokens)] if total_tokens else []
        rows.append([
            *place, format_seconds(predicted.step_time_s), format_seconds(predicted.high_s),
            format_count(predicted.tokens_per_s, "tokens/s"),
            format_dollars(plan.dollars.usd_per_billion_tokens) if plan.dollars else "-",
            *total, format_bytes(predicted.peak_bytes),
            f"{axes_words(plan)}; {plan.schedule.builder}",
        ])  # fmt: skip
    planned = next((answer.plan for answer in answers if answer.plan), None)
    about = work_words(planned) if planned else ""
    title = (Words(planned.model.name, "strong"), " on several machines") if planned else question_title(answers)
    whole = [">all tokens"] if total_tokens else []
    columns = ("cluster", ">nodes", ">ranks", ">step", ">up to", ">speed", ">a billion", *whole, ">memory", "plan")
    table = Table("", columns, rows, whole=("cluster",), drop=(">ranks", ">memory", ">speed"))
    reasons = [f"{answer.cluster.name}: {' '.join(answer.remark.split())}" for answer in answers if answer.remark]
    clusters = [answer.cluster for answer in answers]
    prices = "at your prices" if all(map(at_user_price, clusters)) else "on demand"
    words = f"fastest first; up to: the slow end of the 80% interval; a billion: dollars of so many tokens, {prices}"
    unknown = [cluster.name for cluster in clusters if cluster.price_usd_per_node_hour is None]
    more = [f"no price is known of {', '.join(unknown)}: type --price, one for each cluster"] if unknown else []
    yield Sheet(title=title, about=about, tables=[table], notes=[*reasons, Words(words, "soft"), *more])


def question_title(answers: Sequence[MachineAnswer]) -> Cell:
    """Say that nothing fits on any machine."""
    return f"nothing fits on any of {len(answers)} machines"
