"""Many results on Weights & Biases: one group, a run for each, and the group's own run with the table and its plots."""

import hashlib
import json
import secrets
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError, InputError
from autoshard.extensions import EXTENSIONS
from autoshard.files import replace_text
from autoshard.report.sweep import varied_in
from autoshard.runtime.metrics.log import records_in, scalars
from autoshard.runtime.metrics.trackers import OnWandb
from autoshard.spec.files import json_line, yaml_of
from autoshard.sweep.points import Sweep, base_of, points_of_question
from autoshard.sweep.table import PROGRAM
from autoshard.sweep.work import Row, SweepJob, job_rows

_ID_LENGTH = 16
_STATE = "wandb.json"  # the group's token, and which points and which table it has
_PREDICTED = ("step_time_s", "tokens_per_s", "mfu", "peak_bytes", "usd_per_step", "usd_per_billion_tokens", "compile_s")
_MEASURED = {
    "measured_step_time_s": "step_time_s/measured",
    "measured_over_predicted": "step_time_s/ratio",
    "measured_state_bytes": "state_bytes/measured",
    "last_loss": "loss",
}
_RESULTS = (*_PREDICTED, *_MEASURED, "step_time_low_s", "step_time_high_s", "wall_s", "cpu_s", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One result as a run of a group."""

    key: str
    name: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    curve: Sequence[tuple[int, Mapping[str, Any]]] = ()  # steps with their numbers
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbGroup:
    """Runs that belong together; a folder keeps which of them were shown, so that none is shown twice."""

    project: str
    name: str
    folder: Path
    kind: str  # what the runs are
    charts: Mapping[str, tuple[str, str]]  # title -> x and y, columns of the table
    page: Path | None = None  # the same, drawn

    def show(self, results: Iterable[ShownRun], rows: Callable[[], Sequence[Row]]) -> list[str]:
        """Show results as they come, then the table of all rows; return what the user should know, once."""
        notes: list[str] = []
        try:
            token, done = self._state()
            for one in results:
                token_of_result = f"{one.key}{' failed' * one.failed}"
                if token_of_result not in done:
                    _send(self._begun(token + one.key, one.name, self.kind, one.config, notes), one)
                    done.append(token_of_result)
                    self._keep(token, done)
            table_rows = rows()
            table = f"table {hashlib.sha256(json.dumps(table_rows, default=str).encode()).hexdigest()[:_ID_LENGTH]}"
            if table in done:
                return ["Weights & Biases: all was shown before"]
            self._show_table(token, table_rows, notes)
            self._keep(token, [*(one for one in done if not one.startswith("table ")), table])
        except AutoshardError:  # of what makes the results
            raise
        except Exception as error:
            return [f"Weights & Biases failed; to go on with it, type the same again: {type(error).__name__}: {error}"]
        remaining = [note for note in dict.fromkeys(notes) if "wandb sync" not in note]
        send = f"kept offline. To send all, type: wandb sync {self.folder.resolve()}/wandb/offline-*"
        return [*remaining, *([f"Weights & Biases: {send}"] if any("wandb sync" in note for note in notes) else [])]

    def _state(self) -> tuple[str, list[str]]:
        """Return the token of this group, and the keys of the results that it has shown."""
        path = self.folder / _STATE
        state: Any = json_line(path.read_bytes()) if path.exists() else {}
        try:
            return state.get("group", secrets.token_hex(4)), list(state.get("shown", ()))
        except (AttributeError, TypeError):
            raise InputError.of(str(path), "is damaged. Remove it, and all points are shown again") from None

    def _keep(self, token: str, done: Sequence[str]) -> None:
        text = json.dumps({"group": token, "shown": list(done)}) + "\n"
        replace_text(self.folder / _STATE, text)

    def _begun(self, key: str, name: str, kind: str, config: Mapping[str, Any], notes: list[str]) -> OnWandb:
        labels = {"project": self.project, "group": self.name, "job_type": kind, "name": name}
        run_id = hashlib.sha256(key.encode()).hexdigest()[:_ID_LENGTH]
        tracker = OnWandb(labels=labels, run_id=run_id, folder=self.folder, files={})
        notes += tracker.start(config)
        return tracker

    def _show_table(self, token: str, rows: Sequence[Row], notes: list[str]) -> None:
        """Show the table of all results on a run of the group's own."""
        import wandb

        tracker = self._begun(token, self.name, "summary", {"kind": self.kind, "points": len(rows)}, notes)
        columns: Any = list(dict.fromkeys(name for row in rows for name in row))
        cells: Any = [[row.get(name) for name in columns] for row in rows]
        media: dict[str, Any] = {"table": wandb.Table(columns=columns, data=cells, allow_mixed_types=True)}
        for title, (x, y) in self.charts.items():
            pairs: Any = [[row[x], row[y]] for row in rows if row.get(x) is not None and row.get(y) is not None]
            chart: Any = wandb.plot.bar if any(isinstance(value, str) for value, _ in pairs) else wandb.plot.scatter
            if pairs:
                media[title] = chart(wandb.Table(columns=[x, y], data=pairs), x, y, title=title)
        if self.page:
            media["page"] = wandb.Html(self.page.read_text(encoding="utf-8"), inject=False)
        tracker.log(tracker.next_step, media)
        states = [row.get("status", "done") for row in rows]
        tracker.finish({f"points/{state}": states.count(state) for state in set(states)}, failed="failed" in states)


def log_sweep(rows: Sequence[Row], project: str, folder: Path, page: Path) -> list[str]:
    """Show the rows of a sweep, and its page."""
    ran = any(row["status"] == "ran" for row in rows)
    charts = {
        "step time of every point": ("point", "step_time_s"),
        "tokens a second over ranks": ("ranks", "tokens_per_s"),
        "dollars over ranks": ("ranks", "usd_per_billion_tokens"),
    }
    charts |= {"measured over predicted": ("ran_predicted_s", "measured_step_time_s")} if ran else {}
    varied = varied_in(rows, training=True) if ran else []
    charts |= {f"loss over {name.removeprefix('at.')}": (name, "last_loss") for name in varied}
    group = WandbGroup(
        project=project, name=folder.resolve().name, folder=folder, kind=rows[0]["mode"], charts=charts, page=page
    )  # fmt: skip
    return group.show(map(_run_of, rows), lambda: rows)


def controller_text(sweep: Sweep, source: Path, folder: Path, project: str) -> str:
    """Return a configuration for ``wandb sweep``, whose agents call ``agent_point`` for every point."""
    parameters = {
        name: {"values": [choice[name] for choice in choices] if name in sweep.grid else list(range(len(choices)))}
        for name, choices in sweep.axes.items()
    }
    command = [*shlex.split(PROGRAM), "sweep", str(source.resolve()), "--out", str(folder.resolve()), "--wandb-agent"]
    command += EXTENSIONS.options()
    timed = "measured" if sweep.mode == "run" else "predicted"
    content = {
        "name": source.stem,
        "project": project,
        "program": "autoshard",  # W&B asks for one; the command says what is called
        "command": command,
        "method": "grid",
        "metric": {"name": "loss" if sweep.varies_training else f"step_time_s/{timed}", "goal": "minimize"},
        "parameters": parameters,
    }
    return yaml_of(content, width=80)


def agent_point(sweep: Sweep, folder: Path, out: Path, project: str | None) -> Row:
    """Do the one point that W&B's controller has chosen for this process, and send it what came of it."""
    out.mkdir(parents=True, exist_ok=True)
    labels = {"job_type": sweep.mode, **({"project": project} if project else {})}
    tracker = OnWandb(labels=labels, run_id=None, folder=out, files={})
    tracker.start({})
    override: dict[str, Any] = {}
    for name, value in tracker.config.items():  # values of keys, or which of the sweep's lists
        override |= sweep.axes[name][int(value)] if name in ("list", "zip") and name in sweep.axes else {name: value}
    try:
        point = points_of_question(sweep, base_of(sweep, folder), override, folder)[0]
        row = job_rows(SweepJob(mode=sweep.mode, points=(point,), folder=out, rehearse=sweep.rehearse))[0]
    except InputError as error:
        tracker.finish({"message": str(error)}, failed=True)
        raise
    run = _run_of(row)
    _send(tracker, replace(run, summary={**run.config, **run.summary}))  # a controller has set the config
    return row


def _send(tracker: OnWandb, result: ShownRun) -> None:
    """Send a result; the last point of its curve carries its summary as well, which a controller reads."""
    *before, (last, values) = result.curve or ((tracker.next_step, {}),)
    for step, numbers in before:
        tracker.log(step, numbers)
    tracker.log(last, {**result.summary, **values})
    tracker.finish(result.summary, failed=result.failed)


def _run_of(row: Row) -> ShownRun:
    summary = {f"{name}/predicted": row[name] for name in _PREDICTED if row.get(name) is not None}
    summary |= {name: row[key] for key, name in _MEASURED.items() if row.get(key) is not None}
    summary |= {"message": row["message"]} if row["message"] is not None else {}
    config = {name: value for name, value in row.items() if name not in _RESULTS and not name.startswith("time_s.")}
    steps = records_in(Path(row["run"])) if row["status"] == "ran" else ()
    curve = [(number, dict(scalars(fields))) for number, fields in steps]
    return ShownRun(
        key=row["id"], name=row["point"], config=config, summary=summary, curve=curve, failed=row["status"] == "failed"
    )
