"""The one table of a sweep: a line for every point, written by one process; a kill takes no line that is whole.

Tasks of a job array leave their rows in files beside it, which the next sweep gathers.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from autoshard.errors import require
from autoshard.extensions import EXTENSIONS
from autoshard.files import naming, replace_text
from autoshard.jobs.quoting import remark, shell_words, word
from autoshard.spec.files import json_line, read_data
from autoshard.sweep.points import Sweep
from autoshard.sweep.work import Row, SweepJob

ROWS, PARQUET = "rows.jsonl", "rows.parquet"
PROGRAM = f"{word(sys.executable)} -m autoshard.cli"
_TASKS_AT_A_TIME = 16


class RowFile:
    """The rows of a sweep's folder, in a file to which whole lines are added."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROWS
        self.rows = stored_rows(folder)
        if self._path.exists():
            os.truncate(self._path, len(_whole(self._path)))  # a kill may have cut the last line
        for path in sorted(task_file(folder, "*").parent.glob("*.json")):
            parts = cast(list[object], data) if isinstance(data := read_data(path), list) else [data]
            rows = [_row(part, str(path), "the file, and its points are") for part in parts]
            self.add([row for row in rows if row["id"] not in self.rows])
            path.unlink()

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows at the end, together."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.rows.update((row["id"], row) for row in rows)

    def forget_failed(self) -> None:
        """Take failed points out of the file, so that they are done again."""
        self.rows = {name: row for name, row in self.rows.items() if row["status"] != "failed"}
        replace_text(self._path, "".join(json.dumps(row) + "\n" for row in self.rows.values()))


def stored_rows(folder: Path) -> dict[str, Row]:
    """Return the rows of a sweep's folder by their points."""
    path, rows = folder / ROWS, dict[str, Row]()
    for number, line in enumerate(_whole(path).splitlines() if path.exists() else (), 1):
        row = _row(json_line(line), f"{path} line {number}", "the line, and its point is")
        rows[row["id"]] = row
    return rows


def _row(value: object, where: str, what: str) -> Row:
    """Return the value of a line as a row, or say which line to remove."""
    row = cast(Row, value) if isinstance(value, dict) else Row()
    require((isinstance(row.get("id"), str), where, f"is no row of a sweep. Remove {what} done again"))
    return row


def task_file(folder: Path, name: str) -> Path:
    """Return where a task of a job array leaves its rows."""
    return folder / "parts" / f"{name}.json"


def write_task(rows: Sequence[Row], folder: Path, name: str) -> None:
    """Write the rows of one task of a job array, whole or not at all."""
    task_file(folder, name).parent.mkdir(parents=True, exist_ok=True)
    replace_text(task_file(folder, name), json.dumps(rows, allow_nan=False))


def write_parquet(rows: Sequence[Row], folder: Path) -> Path:
    """Write rows as a Parquet file, whole or not at all; a column with values of several kinds is text."""
    import pyarrow as arrow
    from pyarrow import parquet

    def column(name: str) -> list[object]:
        values: list[object] = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        plain = len(kinds) <= 1 or kinds <= {int, float}
        return values if plain else [value if value is None else str(value) for value in values]

    path = folder / PARQUET
    aside = path.with_suffix(".part")
    parquet.write_table(arrow.table({name: column(name) for row in rows for name in row}), aside)
    aside.replace(path)
    return path


def array_script(sweep: Sweep, jobs: Sequence[SweepJob], source: Path, folder: Path) -> str:
    """Return the script of a job array of Slurm: a task for each job."""
    many = {job.name for job in jobs if sweep.mode == "run" and not sweep.rehearse and job.points[0].recipe.nodes > 1}
    more = f"a task has one node, and {', '.join(sorted(many)[:3])} runs on more. Set rehearse, or use autoshard launch"
    require((not many, "--scheduler", more))
    name, place = re.sub(r"\W+", "-", source.stem), word(str(folder.resolve()))
    gathers = remark(f"autoshard sweep {word(str(source))} --out {word(str(folder))}")
    log = word(f"{folder.resolve()}/".replace("%", "%%") + "task-%a.log")  # sbatch reads quotes as a shell does
    digest = hashlib.sha256("".join(point.id for job in jobs for point in job.points).encode()).hexdigest()[:12]
    size = "#SBATCH --exclusive" if sweep.mode == "run" else "#SBATCH --cpus-per-task=1"
    return f"""\
#!/bin/bash
# The points of the sweep {name} as tasks of a job array. Written by autoshard sweep --scheduler slurm; points {digest}.
# Then: {gathers}     gathers the rows, does what is left, and prints the table.
#SBATCH --job-name={name}
#SBATCH --array=0-{len(jobs) - 1}%{_TASKS_AT_A_TIME}
#SBATCH --nodes=1
#SBATCH --ntasks=1
{size}
#SBATCH --output={log}
set -euo pipefail
cd {word(str(Path.cwd()))}
task=$SLURM_ARRAY_TASK_ID
unset SLURM_PROCID SLURM_NTASKS  # a run starts its own ranks here; it is no task of this job's
exec {PROGRAM} sweep {shell_words([str(source), *EXTENSIONS.options()])} --out {place} --task "$task"
"""


def _whole(path: Path) -> bytes:
    """Return the lines of a file that have their line break."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]
