"""Many results on Weights & Biases: one group, a run for each, and the group's own run with the table and its plots."""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError, InputError
from autoshard.runtime.metrics.log import METRICS, scalars
from autoshard.runtime.metrics.on_wandb import OnWandb
from autoshard.sweep.points import Sweep, base_of, question
from autoshard.sweep.table import columns_of
from autoshard.sweep.work import Row, SweepJob, rows_of

_ID_LENGTH = 16
_KEPT = "wandb.json"  # the group's token, and which points it has
_PREDICTED = ("step_time_s", "tokens_per_s", "mfu", "peak_bytes", "usd_per_step", "usd_per_billion_tokens", "compile_s")
_MEASURED = {
    "measured_step_time_s": "step_time_s/measured",
    "measured_over_predicted": "step_time_s/ratio",
    "measured_state_bytes": "state_bytes/measured",
    "last_loss": "loss",
}
_RESULTS = (*_PREDICTED, *_MEASURED, "step_time_low_s", "step_time_high_s", "wall_s", "cpu_s", "message")

Curve = Iterable[tuple[int, Mapping[str, Any]]]  # steps with their numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One result as a run of a group."""

    key: str
    name: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    curve: Curve = ()
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbGroup:
    """Runs that belong together; a folder keeps which of them were shown, so that none is shown twice."""

    project: str
    name: str
    folder: Path
    kind: str  # what the runs are
    charts: Mapping[str, tuple[str, str]]  # title -> x and y, columns of the table

    def show(self, results: Iterable[ShownRun], rows: Callable[[], Sequence[Row]]) -> list[str]:
        """Show results as they come, then the table of all rows; return what the user should know, once."""
        notes: dict[str, None] = {}
        try:
            notes.update(dict.fromkeys(self._told(results, rows)))
        except AutoshardError:  # of what makes the results
            raise
        except Exception as error:
            return [f"Weights & Biases failed; to go on with it, type the same again: {type(error).__name__}: {error}"]
        others = [note for note in notes if "wandb sync" not in note]
        send = f"kept offline. To send all, type: wandb sync {self.folder.resolve()}/wandb/offline-*"
        return others if len(others) == len(notes) else [*others, f"Weights & Biases: {send}"]

    def _told(self, results: Iterable[ShownRun], rows: Callable[[], Sequence[Row]]) -> Iterator[str]:
        token, done = self._kept()
        for one in results:
            known = f"{one.key}{' failed' * one.failed}"
            if known in done:
                continue
            tracker, notes = self._begun(token + one.key, one.name, self.kind, one.config)
            yield from notes
            _tell(tracker, one)
            done.append(known)
            (self.folder / _KEPT).write_text(json.dumps({"group": token, "shown": done}) + "\n", encoding="utf-8")
        yield from self._summary(token, rows())

    def _kept(self) -> tuple[str, list[str]]:
        path = self.folder / _KEPT
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return kept["group"], kept["shown"]
        except FileNotFoundError:
            return secrets.token_hex(4), []
        except (ValueError, KeyError, TypeError):
            raise InputError.of(str(path), "is damaged. Remove it, and all points are shown again") from None

    def _begun(self, key: str, name: str, kind: str, config: Mapping[str, Any]) -> tuple[OnWandb, Sequence[str]]:
        labels = {"project": self.project, "group": self.name, "job_type": kind, "name": name}
        run_id = hashlib.sha256(key.encode()).hexdigest()[:_ID_LENGTH]
        tracker = OnWandb(labels=labels, run_id=run_id, folder=self.folder, files={})
        return tracker, tracker.start(config)

    def _summary(self, token: str, rows: Sequence[Row]) -> Sequence[str]:
        """Show the table of all results on a run of the group's own."""
        import wandb

        tracker, notes = self._begun(token, self.name, "summary", {"kind": self.kind, "points": len(rows)})
        columns = columns_of(rows)
        cells: Any = [[row.get(name) for name in columns] for row in rows]
        media: dict[str, Any] = {"table": wandb.Table(columns=list(columns), data=cells, allow_mixed_types=True)}
        for title, (x, y) in self.charts.items():
            pairs: Any = [[row[x], row[y]] for row in rows if row.get(x) is not None and row.get(y) is not None]
            chart: Any = wandb.plot.bar if any(isinstance(one, str) for one, _ in pairs) else wandb.plot.scatter
            if pairs:
                media[title] = chart(wandb.Table(columns=[x, y], data=pairs), x, y, title=title)
        tracker.log(tracker.next_step, media)
        states = [row.get("status", "done") for row in rows]
        tracker.finish({f"points/{state}": states.count(state) for state in set(states)}, failed="failed" in states)
        return notes


def log_sweep(rows: Sequence[Row], project: str, folder: Path) -> list[str]:
    """Show the rows of a sweep."""
    ran = any(row["status"] == "ran" for row in rows)
    charts = {
        "step time of every point": ("point", "step_time_s"),
        "tokens a second over ranks": ("ranks", "tokens_per_s"),
        "dollars over ranks": ("ranks", "usd_per_billion_tokens"),
    }
    charts |= {"measured over predicted": ("ran_predicted_s", "measured_step_time_s")} if ran else {}
    group = WandbGroup(project=project, name=folder.resolve().name, folder=folder, kind=rows[0]["mode"], charts=charts)
    return group.show(map(_shown, rows), lambda: rows)


def chosen_point(sweep: Sweep, folder: Path, out: Path, project: str | None) -> Row:
    """Do the one point that W&B's controller has chosen for this process, and tell it what came of it."""
    out.mkdir(parents=True, exist_ok=True)
    labels = {"job_type": sweep.mode, **({"project": project} if project else {})}
    tracker = OnWandb(labels=labels, run_id=None, folder=out, files={})
    tracker.start({})
    try:
        point = question(sweep, base_of(sweep, folder), dict(_overrides(sweep, tracker.config)), folder)[0]
        row = rows_of(SweepJob(mode=sweep.mode, points=(point,), folder=out, rehearse=sweep.rehearse))[0]
    except InputError as error:
        tracker.finish({"message": str(error)}, failed=True)
        raise
    shown = _shown(row)
    _tell(tracker, replace(shown, summary={**shown.config, **shown.summary}))  # a controller has set the config
    return row


def _tell(tracker: OnWandb, one: ShownRun) -> None:
    """Tell all of a result."""
    for step, values in one.curve:
        tracker.log(step, values)
    tracker.log(tracker.next_step, one.summary)
    tracker.finish(one.summary, failed=one.failed)


def _overrides(sweep: Sweep, chosen: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that a controller's choice sets: values of keys, or which of the sweep's lists."""
    for name, value in chosen.items():
        if name in ("list", "zip") and name in sweep.axes:
            yield from sweep.axes[name][int(value)].items()
        else:
            yield name, value


def _shown(row: Row) -> ShownRun:
    summary = {f"{name}/predicted": row[name] for name in _PREDICTED if row.get(name) is not None}
    summary |= {name: row[key] for key, name in _MEASURED.items() if row.get(key) is not None}
    summary |= {"message": row["message"]} if row["message"] is not None else {}
    config = {name: value for name, value in row.items() if name not in _RESULTS and not name.startswith("time_s.")}
    return ShownRun(
        key=row["id"], name=row["point"], config=config, summary=summary, curve=_curve(row),
        failed=row["status"] == "failed",
    )  # fmt: skip


def _curve(row: Row) -> Curve:
    """Yield the steps of a run."""
    if row["status"] == "ran":
        for line in (Path(row["run"]) / METRICS).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            yield record["step"], dict(scalars(record))
