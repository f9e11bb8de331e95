"""The sheets of a sweep: what varies, the best points, the layout of each with its scaling and its cost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.report.sheet import Cell, Column, Fact, Node, Sheet, Table, Words, sheet_rows
from autoshard.spec.recipe import TRAINING_KEYS
from autoshard.units import counted

Row = Mapping[str, Any]

SIZES = ("at.nodes", "at.ranks")
GOOD = ("planned", "ran")
_MOST = 200  # rows that a terminal shows
_MOST_LINES = 8


def sweep_sheets(name: str, rows: Sequence[Row], most: int = _MOST) -> dict[str, Sheet]:
    """Return the best points, a table of those that have a plan, and why others have none; a sweep may lack either."""
    figures = Node({"rows": list(rows)})["rows"]
    good = [row for row in figures if row["status"].value in GOOD]
    bad = [row for row in figures if row["status"].value not in GOOD]
    varied = ", ".join(name.removeprefix("at.") for name in varied_in(rows)) or "nothing"
    sheets = {"head": Sheet(title=f"Sweep {name}", facts=[Fact("points", f"{len(rows)}; what varies: {varied}"),
                                                          *_bests(good)])}  # fmt: skip
    if good:
        sheets["points"] = Sheet(name="points", title="The points of the sweep", tables=[_table(good, most)],
                                 notes=_left_out(len(good), most))  # fmt: skip
    if bad:
        lines = [(row["point"].value, Words(row["status"].value, "bad"), _why(row)) for row in bad[:most]]
        table = Table("", ("point", "status", "why"), lines)
        sheets["failed"] = Sheet(name="failed", title="Points without a plan", tables=[table],
                                 notes=_left_out(len(bad), most))  # fmt: skip
    return sheets


def _why(row: Node) -> Cell:
    """Return the first line of what a point's planner says; a page shows the others under the pointer."""
    return Words(str(row["message"].value).partition("\n")[0], "soft", str(row["message"].value))


def _left_out(count: int, most: int) -> list[Cell]:
    return [Words(f"the first {most} of {count}; the file has all", "soft")] if count > most else []


def _bests(rows: Sequence[Node]) -> Iterator[Fact]:
    """Yield the fastest, the cheapest and the busiest point, and the least loss of every question."""
    ways = {"most tokens a second": ("tokens_per_s", max), "cheapest billion tokens": ("usd_per_billion_tokens", min),
            "best MFU": ("mfu", max)}  # fmt: skip
    for name, (key, best_of) in ways.items():
        if valued := [row for row in rows if row[key].value is not None]:
            best = best_of(valued, key=lambda row: row[key].value)
            yield Fact(name, best[key].figure(), f", predicted of {best['point'].value}")
    for best, group in best_trained([row.value for row in rows])[:_MOST_LINES]:
        lengths = {row["num_steps"] for row in group}
        longer = f" (they took {min(lengths)} to {max(lengths)} steps)" if len(lengths) > 1 else ""
        node = next(row for row in rows if row.value is best)
        words = (
            f" of {best['point']} after {counted(best['num_steps'], 'step')}, of {counted(len(group), 'run')}{longer}"
        )
        yield Fact("least loss", node["last_loss"].figure("{:.4f}".format), words)


def varied_in(rows: Sequence[Row], *, training: bool = False) -> list[str]:
    """Return the columns of what varies in a sweep, or only those that say how a plan is trained."""
    varied = dict.fromkeys(name for row in rows for name in row if name.startswith("at."))
    return [name for name in varied if not training or _section(name) in TRAINING_KEYS]


def _section(name: str) -> str:
    return name.removeprefix("at.").partition(".")[0]


def best_trained(rows: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """Return for every question whose training varies the run with the least loss, and the runs it is compared with.

    Losses on other data, or of other questions, say nothing about each other.
    """
    training = {name for name in varied_in(rows, training=True) if _section(name) != "data"}
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row.get("last_loss") is not None:
            question = [(name, row.get(name)) for name in varied_in(rows) if name not in training]
            groups.setdefault(str(question), []).append(row)
    comparable = [group for group in groups.values() if training and len(group) > 1]
    return [(min(group, key=lambda row: row["last_loss"]), group) for group in comparable]


def scaling_efficiency(rows: Sequence[Row]) -> dict[str, float]:
    """Return by id the tokens/s per rank, over that of the same question on the fewest ranks.

    >>> row = {"choice": 1, "tokens_per_s": 100.0, "ranks": 4, "at.nodes": 1, "at.lnc": 1}
    >>> more = {**row, "id": "b", "ranks": 16, "at.nodes": 4, "tokens_per_s": 300.0}
    >>> scaling_efficiency([more, {**row, "id": "a"}])
    {'b': 0.75, 'a': 1.0}
    """
    speeds = {row["id"]: row["tokens_per_s"] / row["ranks"] for row in rows}
    first: dict[object, Row] = {}
    for row in sorted(rows, key=lambda row: row["ranks"]):
        first.setdefault(series_of(row), row)
    return {row["id"]: speeds[row["id"]] / speeds[first[series_of(row)]["id"]] for row in rows}


def series_of(row: Row) -> object:
    """Return a key that is equal for rows that differ only in the number of nodes or ranks."""
    varied = {name: value for name, value in row.items() if name.startswith("at.") and name not in SIZES}
    return (row["choice"], *sorted(varied.items(), key=str))


def _table(rows: Sequence[Node], most: int) -> Table:
    """Return a table of what varies, the plan and its figures; columns that few sweeps have come last."""
    values = [row.value for row in rows]
    varied, shares = {name.removeprefix("at."): name for name in varied_in(values)}, scaling_efficiency(values)
    columns: dict[str, Column] = {
        **varied, **({"answer": "choice"} if any(row["choice"] > 1 for row in values) else {}),
        "layout": lambda row: Words(short_layout(row.value), "strong", row["candidate"].value), ">step": "step_time_s",
        ">tokens/s": "tokens_per_s", ">MFU": "mfu", ">peak": "peak_bytes",
    }  # fmt: skip
    if any(len({row.get(at) for row in values}) > 1 for at in SIZES):
        columns[">per rank"] = lambda row: f"{shares[row['id'].value]:.0%}"
    if any(row["usd_per_billion_tokens"] is not None for row in values):
        columns[">$ / 1e9 tokens"] = "usd_per_billion_tokens"
    if any(row["status"] == "ran" for row in values):
        columns[">loss"] = lambda row: row.at("last_loss").figure("{:.4f}".format)
        columns[">measured"] = "measured_step_time_s"
        columns[">/ predicted"] = lambda row: row.at("measured_over_predicted").figure("{:.2f}".format)
    drop = [name for name in (">peak", ">MFU", ">per rank", ">tokens/s", ">$ / 1e9 tokens") if name in columns]
    return Table("", [*columns], sheet_rows(rows[:most], columns), widths=dict.fromkeys(varied, 24), drop=drop)


def short_layout(row: Row) -> str:
    """Name a layout by its outer point and its kinds of recompute, without the lists of stages.

    >>> short_layout({"candidate": "tp=2,pp=2,recompute=full:3/none+offload", "ranks": 4})
    'tp=2,pp=2,dp=1 recompute full/none/none+offload'
    """
    candidate = Candidate.parse(row["candidate"], row["ranks"])
    kinds = dict.fromkeys(
        part.kind + "+offload" * part.offload for recompute in candidate.recompute for part in recompute.kinds
    )
    again = "" if set(kinds) == {"none"} else f" recompute {'/'.join(kinds)}"
    return str(replace(candidate, recompute=(Recompute(),), stages=None, place=None)) + again
