"""The one table of a sweep: a line for every point, written by one process; a kill takes no line that is whole."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from autoshard.errors import InputError
from autoshard.sweep.work import Row

ROWS, PARQUET, PARTS = "rows.jsonl", "rows.parquet", "parts"


class RowFile:
    """The rows of a sweep's folder, in a file to which whole lines are added."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROWS
        self.rows = kept_rows(folder)
        if self._path.exists():
            os.truncate(self._path, len(_whole(self._path)))  # a kill may have cut the last line
        for part in sorted((folder / PARTS).glob("*.json")):  # of the tasks of a job array
            found: list[Row] = json.loads(part.read_text(encoding="utf-8"))
            self.add([row for row in found if row["id"] not in self.rows])
            part.unlink()

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows at the end, together."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.rows.update((row["id"], row) for row in rows)

    def forget_failed(self) -> None:
        """Take failed points out of the file, so that they are done again."""
        self.rows = {name: row for name, row in self.rows.items() if row["status"] != "failed"}
        aside = self._path.with_suffix(".part")
        aside.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()), encoding="utf-8")
        aside.replace(self._path)


def kept_rows(folder: Path) -> dict[str, Row]:
    """Return the rows of a sweep's folder by their points."""
    path, found = folder / ROWS, dict[str, Row]()
    for number, line in enumerate(_whole(path).splitlines() if path.exists() else (), 1):
        try:
            row: Row = json.loads(line)
            found[row["id"]] = row
        except (ValueError, TypeError, KeyError):
            message = "is no row of a sweep. Remove the line, and its point is done again"
            raise InputError.of(f"{path} line {number}", message) from None
    return found


def _whole(path: Path) -> bytes:
    """Return the lines of a file that end."""
    kept = path.read_bytes()
    return kept[: kept.rfind(b"\n") + 1]


def write_part(rows: Sequence[Row], folder: Path, name: str) -> None:
    """Keep what one task of a job array has found, whole or not at all, for whoever gathers it."""
    path = folder / PARTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(rows, allow_nan=False), encoding="utf-8")
    aside.replace(path)


def columns_of(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the names of all values, in the order in which they are met."""
    return tuple(dict.fromkeys(name for row in rows for name in row))


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
    parquet.write_table(arrow.table({name: column(name) for name in columns_of(rows)}), aside)
    aside.replace(path)
    return path
