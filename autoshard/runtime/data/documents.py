"""Where text comes from: files, cut into pieces of work that depend on the source alone, and the documents in them."""

import glob
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autoshard.errors import Fault, InputError

Form = Literal["text", "jsonl", "parquet", "arrow"]

Where = Callable[[], str]

_FORMS: dict[str, Form] = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_SUFFIXES = ", ".join([*_FORMS, ".txt.gz", ".jsonl.gz"])
_LEAST_BYTES, _MOST_BYTES, _PIECES = 8 << 20, 1 << 30, 1024  # of a piece; how many a large source has
_ROWS = 1024  # of a table that are held at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Some of a file: the lines that begin in a range of bytes, row groups, rows, or all of it."""

    path: str
    form: Form
    begin: int
    end: int
    size: int  # bytes, about

    @property
    def packed(self) -> bool:
        """Whether the file is compressed as a whole."""
        return self.path.endswith(".gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """A source as its files were found."""

    text: str  # as the user gave it
    files: tuple[tuple[str, int, int], ...]  # path, bytes, time of the last change
    parts: tuple[FilePart, ...]
    revision: str | None = None

    def pieces(self) -> tuple[tuple[FilePart, ...], ...]:
        """Gather parts to pieces of work of about one size, in order."""
        most, found, held, size = piece_bytes(self.files), list[tuple[FilePart, ...]](), list[FilePart](), 0
        for part in self.parts:
            held.append(part)
            size += part.size
            if size >= most:
                found.append(tuple(held))
                held, size = [], 0
        return tuple([*found, tuple(held)] if held else found)


def piece_bytes(files: Iterable[tuple[str, int, int]]) -> int:
    """Return how much of a source is one piece: what a kill can lose, and what processes share work by."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, sum(size for _, size, _ in files) // _PIECES))


def local_source(text: str) -> TextSource | None:
    """Find the files that a path, a folder or a pattern names; None if it names nothing here."""
    path = Path(text)
    if path.is_dir():
        paths = [one for one in sorted(path.rglob("*")) if one.is_file() and _form(one) is not None]
        if not paths:
            raise InputError.of(text, f"is a folder without any of {_SUFFIXES}")
    elif path.exists():
        paths = [path]
    elif glob.has_magic(text):
        found = glob.glob(text, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        paths = [Path(one) for one in sorted(found) if Path(one).is_file()]
        if not paths:
            raise InputError.of(text, "fits no file")
    else:
        return None
    if unknown := [one for one in paths if _form(one) is None]:
        raise InputError(Fault(where=str(one), message=f"is none of {_SUFFIXES}") for one in unknown)
    stats = [one.stat() for one in paths]
    files = tuple((str(one), stat.st_size, stat.st_mtime_ns) for one, stat in zip(paths, stats, strict=True))
    size = piece_bytes(files)
    parts = [part for one in paths for part in _parts(one, size)]
    return TextSource(text=text, files=files, parts=tuple(parts))


def _form(path: Path) -> Form | None:
    return _FORMS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix)


def _parts(path: Path, size: int) -> Iterator[FilePart]:
    form, length = _form(path), path.stat().st_size
    assert form is not None
    if form == "parquet":
        yield from _row_groups(path)
    elif form == "jsonl" and path.suffix != ".gz":
        for begin in range(0, length, size):
            end = min(length, begin + size)
            yield FilePart(path=str(path), form=form, begin=begin, end=end, size=end - begin)
    else:
        yield FilePart(path=str(path), form=form, begin=0, end=length, size=length)


def _row_groups(path: Path) -> Iterator[FilePart]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            sizes = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
    except (ArrowException, OSError) as error:
        raise InputError.of(str(path), f"is not a Parquet file: {error}") from None
    for number, size in enumerate(sizes):
        yield FilePart(path=str(path), form="parquet", begin=number, end=number + 1, size=size)


def arrow_parts(paths: Sequence[str], rows: Sequence[int], size: int) -> Iterator[FilePart]:
    """Cut the tables of a downloaded data set."""
    for path, num_rows in zip(paths, rows, strict=True):
        length = Path(path).stat().st_size
        step = max(1, num_rows * size // max(1, length))
        for begin in range(0, num_rows, step):
            end = min(num_rows, begin + step)
            yield FilePart(path=path, form="arrow", begin=begin, end=end, size=length * (end - begin) // num_rows)


def documents(part: FilePart, field: str) -> Iterator[tuple[Where, Any]]:
    """Read the documents of a part, each with how to find out the place that messages name."""
    try:
        if part.form == "text":
            yield partial(str, part.path), _text(part)
        elif part.form == "jsonl":
            yield from _lines(part, field)
        else:
            yield from _rows(part, field)
    except (EOFError, OSError) as error:  # gzip says so of a file that was cut off
        raise InputError.of(part.path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError:
        raise InputError.of(part.path, "is not text in UTF-8") from None


def _text(part: FilePart) -> str:
    data = Path(part.path).read_bytes()
    return (gzip.decompress(data) if part.packed else data).decode()


def _lines(part: FilePart, field: str) -> Iterator[tuple[Where, Any]]:
    """Read the lines that begin in the range of a part: the one that crosses its begin belongs to the part before."""
    with gzip.open(part.path, "rb") if part.packed else open(part.path, "rb") as file:  # noqa: PTH123
        if part.begin:
            file.seek(part.begin - 1)
            file.readline()
        at = file.tell()
        for line in file:
            if at >= part.end and not part.packed:
                return
            if line.strip():
                where = partial(_line, part, at)
                yield where, _field(line, field, where)
            at += len(line)


def _field(line: bytes, field: str, where: Where) -> Any:
    value = None
    try:
        value = json.loads(line)
        return value[field]
    except ValueError as error:
        raise InputError.of(where(), f"is not JSON: {error}") from None
    except (KeyError, TypeError):
        hint = f"it has {', '.join(value)}. Name one with --field" if isinstance(value, dict) else "it is no object"
        raise InputError.of(where(), f"has no {field!r}: {hint}") from None


def _line(part: FilePart, at: int) -> str:
    """Name the line that begins at a byte."""
    with gzip.open(part.path, "rb") if part.packed else open(part.path, "rb") as file:  # noqa: PTH123
        number = 1
        while at > 0 and (chunk := file.read(min(at, 1 << 20))):
            number, at = number + chunk.count(b"\n"), at - len(chunk)
        return f"{part.path} line {number}"


def _rows(part: FilePart, field: str) -> Iterator[tuple[Where, Any]]:
    first, group = (0, f" row group {part.begin}") if part.form == "parquet" else (part.begin, "")
    values = (value for column in _columns(part, field) for value in column)
    for row, value in enumerate(values, first):
        yield partial("{}{} row {}".format, part.path, group, row), value


def _columns(part: FilePart, field: str) -> Iterator[list[Any]]:
    """Read one column of a table, some rows at a time."""
    if part.form == "parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(part.path) as file:
            _require_column(part.path, field, file.schema_arrow.names)
            for batch in file.iter_batches(_ROWS, row_groups=[part.begin], columns=[field]):
                yield batch.column(0).to_pylist()
    else:
        from datasets import Dataset

        table = Dataset.from_file(part.path)
        _require_column(part.path, field, table.column_names)
        for begin in range(part.begin, part.end, _ROWS):
            yield table[begin : min(part.end, begin + _ROWS)][field]


def _require_column(path: str, field: str, columns: Sequence[str]) -> None:
    if field not in columns:
        raise InputError.of(path, f"has no column {field!r}: it has {', '.join(columns)}. Name one with --field")
