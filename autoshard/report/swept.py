"""The summary of a sweep for a terminal: what varies, the best layout of each point, how it scales, what it costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from autoshard.report.terminal import make_table
from autoshard.units import format_bytes, format_count, format_dollars, format_seconds

Row = Mapping[str, Any]
Show = Callable[[Row, float], str]  # a row, and its share of what a rank does on the fewest

_SIZES = ("at.nodes", "at.ranks")
_MOST = 200  # rows that are shown
_MESSAGE = 110


def swept_report(rows: Sequence[Row]) -> Group:
    """Return a line for every point that has a plan, and why the others have none."""
    good = [row for row in rows if row["status"] in ("planned", "ran")]
    parts: list[RenderableType] = ["", _table(good)] if good else []
    bad = [row for row in rows if row["status"] not in ("planned", "ran")]
    lines = [Text.assemble((f"{row['status']}: ", "bold red"), f"{row['point']}: {_first(row)}") for row in bad]
    parts += ["", *lines[:_MOST]] if lines else []
    if max(len(good), len(bad)) > _MOST:
        parts.append(Text(f"only {_MOST} rows of each kind are shown; all are in the file", "dim"))
    return Group(*parts)


def efficiency(rows: Sequence[Row]) -> dict[str, float]:
    """Return by id the tokens a second of each rank, over those of the fewest ranks on which all else was asked alike.

    >>> row = {"choice": 1, "tokens_per_s": 100.0, "ranks": 4, "at.nodes": 1, "at.lnc": 1}
    >>> more = {**row, "id": "b", "ranks": 16, "at.nodes": 4, "tokens_per_s": 300.0}
    >>> efficiency([more, {**row, "id": "a"}])
    {'b': 0.75, 'a': 1.0}
    """
    speeds = {row["id"]: row["tokens_per_s"] / row["ranks"] for row in rows}
    first: dict[object, Row] = {}
    for row in sorted(rows, key=lambda row: row["ranks"]):
        first.setdefault(_series(row), row)
    return {row["id"]: speeds[row["id"]] / speeds[first[_series(row)]["id"]] for row in rows}


def _series(row: Row) -> object:
    """Return what rows have alike that differ in their size only."""
    others = {name: value for name, value in row.items() if name.startswith("at.") and name not in _SIZES}
    return (row["choice"], *sorted(others.items(), key=str))


def _table(rows: Sequence[Row]) -> Table:
    ran, scales = (
        any(row["status"] == "ran" for row in rows),
        any(len({row.get(at) for row in rows}) > 1 for at in _SIZES),
    )
    priced = any(row["usd_per_billion_tokens"] is not None for row in rows)
    varied = list(dict.fromkeys(name for row in rows for name in row if name.startswith("at.")))
    table = make_table("The points of the sweep")
    for name in varied:
        table.add_column(name.removeprefix("at."), overflow="fold", max_width=24)
    shown, shares = _columns(ran=ran, scales=scales, priced=priced), efficiency(rows)
    for name in shown:
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=name != "plan")
    for row in rows[:_MOST]:
        cells = [_plain(row.get(name)) for name in varied]
        table.add_row(*cells, *(show(row, shares[row["id"]]) for show in shown.values()))
    return table


def _columns(*, ran: bool, scales: bool, priced: bool) -> dict[str, Show]:
    """Return what is shown of a row, by the heads of the columns."""
    columns: dict[str, Show] = {
        "plan": lambda row, _: _short(row),
        "step": lambda row, _: format_seconds(row["step_time_s"]),
        "tokens/s": lambda row, _: format_count(row["tokens_per_s"]),
        "MFU": lambda row, _: f"{row['mfu']:.1%}",
        "peak": lambda row, _: format_bytes(row["peak_bytes"]),
    }
    more: dict[str, Show] = {
        "per rank": lambda row, share: f"{share:.0%}",
        "$ / 1e9": lambda row, _: _or_none(row["usd_per_billion_tokens"], format_dollars),
        "measured": lambda row, _: _or_none(row.get("measured_step_time_s"), format_seconds),
        "/ predicted": lambda row, _: _or_none(row.get("measured_over_predicted"), "{:.2f}".format),
    }
    wanted = {"per rank": scales, "$ / 1e9": priced, "measured": ran, "/ predicted": ran}
    return columns | {name: show for name, show in more.items() if wanted[name]}


def _short(row: Row) -> str:
    """Name a layout by its outer point, and which kinds of recompute it has; those of single stages are long."""
    candidate = Candidate.parse(row["candidate"], row["ranks"])
    kinds = dict.fromkeys(part.kind for recompute in candidate.recompute for part in recompute.kinds)
    again = "" if set(kinds) == {"none"} else f" recompute {'/'.join(kinds)}"
    return str(replace(candidate, recompute=(Recompute(),), stages=None, place=None)) + again


def _or_none(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _plain(value: object) -> str:
    return "-" if value is None else str(value)


def _first(row: Row) -> str:
    line = str(row["message"]).partition("\n")[0]
    return line if len(line) <= _MESSAGE else f"{line[:_MESSAGE]}..."
