"""The summary of a sweep for a terminal: what varies, the best layout of each point, its scaling and its cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.report.tables import FittingTable, prose
from autoshard.spec.recipe import TRAINING_KEYS
from autoshard.units import format_bytes, format_count, format_dollars, format_seconds

Row = Mapping[str, Any]

SIZES = ("at.nodes", "at.ranks")
_MOST = 200  # rows that are shown
_MESSAGE = 110
_MOST_LINES = 8


def sweep_report(rows: Sequence[Row]) -> Group:
    """Return a table of the points that have a plan, and the reasons of those that have none."""
    good = [row for row in rows if row["status"] in ("planned", "ran")]
    bad = [row for row in rows if row["status"] not in ("planned", "ran")]
    parts: list[RenderableType] = ["", _table(good)] if good else []
    parts += ["", *map(prose, least_losses(good)[:_MOST_LINES])] if least_losses(good) else []
    parts += [""] if bad else []
    for row in bad[:_MOST]:
        line = str(row["message"]).partition("\n")[0]
        line = line if len(line) <= _MESSAGE else f"{line[:_MESSAGE]}..."
        parts.append(prose(Text.assemble((f"{row['status']}: ", "bold red"), f"{row['point']}: {line}")))
    if max(len(good), len(bad)) > _MOST:
        parts.append(Text(f"only the first {_MOST} rows are printed; the file has all", "dim"))
    return Group(*parts)


def varied_in(rows: Sequence[Row], *, training: bool = False) -> list[str]:
    """Return the columns of what varies in a sweep, or only those that say how a plan is trained."""
    varied = dict.fromkeys(name for row in rows for name in row if name.startswith("at."))
    return [name for name in varied if not training or _section(name) in TRAINING_KEYS]


def _section(name: str) -> str:
    return name.removeprefix("at.").partition(".")[0]


def best_trained(rows: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """Return the run with the least loss, and all it is compared with, of every question whose training varies.

    Losses on other data, or of other questions, say nothing about each other.
    """
    training = {name for name in varied_in(rows, training=True) if _section(name) != "data"}
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row.get("last_loss") is not None:
            others = [(name, row.get(name)) for name in varied_in(rows) if name not in training]
            groups.setdefault(str(others), []).append(row)
    alike = [group for group in groups.values() if training and len(group) > 1]
    return [(min(group, key=lambda row: row["last_loss"]), group) for group in alike]


def least_losses(rows: Sequence[Row]) -> list[str]:
    """Say which way of training has come to the least loss, a sentence for every question."""
    lines: list[str] = []
    for best, group in best_trained(rows):
        lengths = {row["num_steps"] for row in group}
        longer = f" (they took {min(lengths)} to {max(lengths)} steps)" if len(lengths) > 1 else ""
        loss, steps = f"{best['last_loss']:.4f}", f"{best['num_steps']} steps"
        lines.append(f"best: {best['point']}, with loss {loss} after {steps}, the least of {len(group)} runs{longer}")
    return lines


def efficiency(rows: Sequence[Row]) -> dict[str, float]:
    """Return by id the tokens/s per rank, over that of the same question on the fewest ranks.

    >>> row = {"choice": 1, "tokens_per_s": 100.0, "ranks": 4, "at.nodes": 1, "at.lnc": 1}
    >>> more = {**row, "id": "b", "ranks": 16, "at.nodes": 4, "tokens_per_s": 300.0}
    >>> efficiency([more, {**row, "id": "a"}])
    {'b': 0.75, 'a': 1.0}
    """
    speeds = {row["id"]: row["tokens_per_s"] / row["ranks"] for row in rows}
    first: dict[object, Row] = {}
    for row in sorted(rows, key=lambda row: row["ranks"]):
        first.setdefault(series_of(row), row)
    return {row["id"]: speeds[row["id"]] / speeds[first[series_of(row)]["id"]] for row in rows}


def series_of(row: Row) -> object:
    """Return a key that is equal for rows that differ only in the number of nodes or ranks."""
    others = {name: value for name, value in row.items() if name.startswith("at.") and name not in SIZES}
    return (row["choice"], *sorted(others.items(), key=str))


def _table(rows: Sequence[Row]) -> FittingTable:
    """Return a table of what varies, the plan and its figures; columns that few sweeps have come last."""
    ran = any(row["status"] == "ran" for row in rows)
    scales = any(len({row.get(at) for row in rows}) > 1 for at in SIZES)
    priced = any(row["usd_per_billion_tokens"] is not None for row in rows)
    shares = efficiency(rows)
    varied = varied_in(rows)
    columns: dict[str, Callable[[Row], str]] = {
        **{name.removeprefix("at."): lambda row, name=name: _text(row.get(name), str) for name in varied},
        "plan": short_layout,
        ">step": lambda row: format_seconds(row["step_time_s"]),
        ">tokens/s": lambda row: format_count(row["tokens_per_s"]),
        ">MFU": lambda row: f"{row['mfu']:.1%}",
        ">peak": lambda row: format_bytes(row["peak_bytes"]),
    }
    if scales:
        columns[">per rank"] = lambda row: f"{shares[row['id']]:.0%}"
    if priced:
        columns[">$ / 1e9"] = lambda row: _text(row["usd_per_billion_tokens"], format_dollars)
    if ran:
        columns[">loss"] = lambda row: _text(row.get("last_loss"), "{:.4f}".format)
        columns[">measured"] = lambda row: _text(row.get("measured_step_time_s"), format_seconds)
        columns[">/ predicted"] = lambda row: _text(row.get("measured_over_predicted"), "{:.2f}".format)
    cells = [[text(row) for text in columns.values()] for row in rows[:_MOST]]
    widths = {name.removeprefix("at."): 24 for name in varied}
    drop = [name for name in (">peak", ">MFU", ">per rank", ">tokens/s", ">$ / 1e9") if name in columns]
    return FittingTable("The points of the sweep", tuple(columns), cells, widths=widths, drop=drop)


def short_layout(row: Row) -> str:
    """Name a layout by its outer point and its kinds of recompute, without the lists of stages."""
    candidate = Candidate.parse(row["candidate"], row["ranks"])
    kinds = dict.fromkeys(part.kind for recompute in candidate.recompute for part in recompute.kinds)
    again = "" if set(kinds) == {"none"} else f" recompute {'/'.join(kinds)}"
    return str(replace(candidate, recompute=(Recompute(),), stages=None, place=None)) + again


def _text(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)
