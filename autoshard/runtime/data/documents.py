"""Where text comes from: files, cut into pieces of work that depend on the source alone, or a Hugging Face hub.

Everything that can go wrong with a hub is one sentence with its remedy.
"""

import errno
import glob
import gzip
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, cast

from autoshard.errors import InputError, require
from autoshard.spec.files import json_line, parsed_line

Form = Literal["text", "jsonl", "parquet", "arrow"]
Where = Callable[[], str]  # finds out the line or row of a document, for a message

_FORMS: dict[str, Form] = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_SUFFIXES = ", ".join([*_FORMS, ".txt.gz", ".jsonl.gz"])
_LEAST_BYTES, _MOST_BYTES, _PIECES = 8 << 20, 1 << 30, 1024  # of a piece; how many a large source has
_ROWS = 1024  # of a table that are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A part of a file: the lines that begin in a range of bytes, a row group, some rows, or the whole file."""

    path: str
    form: Form
    begin: int
    end: int
    size: int  # bytes, about

    @property
    def packed(self) -> bool:
        """Whether the file is compressed as a whole."""
        return self.path.endswith(".gz")

    def open(self) -> IO[bytes] | gzip.GzipFile:
        """Open the file, which is decompressed as it is read."""
        return gzip.open(self.path, "rb") if self.packed else Path(self.path).open("rb")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """A source as its files were found."""

    text: str  # as the user gave it
    files: tuple[tuple[str, int, int], ...]  # path, bytes, time of the last change
    parts: tuple[FilePart, ...]
    revision: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self.files)

    def pieces(self) -> list[tuple[FilePart, ...]]:
        """Gather parts to pieces of work of about one size, in order."""
        most, pieces = piece_bytes(self.files), list[tuple[FilePart, ...]]()
        size = most
        for part in self.parts:
            if size >= most:
                pieces.append(())
                size = 0
            pieces[-1] += (part,)
            size += part.size
        return pieces


def piece_bytes(files: Iterable[tuple[str, int, int]]) -> int:
    """Return the bytes of one piece: a kill loses at most that much work, and processes take work piece by piece."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, sum(size for _, size, _ in files) // _PIECES))


def local_source(text: str) -> TextSource | None:
    """Return the source of the files that a path, a folder or a pattern names; None if there are none here."""
    path = Path(text)
    if path.is_dir():
        paths = [file for file in sorted(path.rglob("*")) if file.is_file() and _form(file) is not None]
        require((bool(paths), text, f"is a folder without any of {_SUFFIXES}"))
    elif path.exists():
        paths = [path]
    elif glob.has_magic(text):
        names = glob.glob(text, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
        paths = [Path(file) for file in sorted(names) if Path(file).is_file()]
        require((bool(paths), text, "fits no file"))
    else:
        return None
    require(*((_form(file) is not None, str(file), f"is none of {_SUFFIXES}") for file in paths))
    stats = [file.stat() for file in paths]
    files = tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(paths, stats, strict=True))
    size = piece_bytes(files)
    return TextSource(text=text, files=files, parts=tuple(part for file in paths for part in _parts(file, size)))


def _form(path: Path) -> Form | None:
    return _FORMS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix)


def _parts(path: Path, size: int) -> Iterator[FilePart]:
    form, length = _form(path), path.stat().st_size
    assert form is not None
    if form == "parquet":
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(path) as file:
                sizes = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
        except (ArrowException, OSError) as error:
            raise InputError.of(str(path), f"is not a Parquet file: {error}") from None
        for number, group_bytes in enumerate(sizes):
            yield FilePart(path=str(path), form=form, begin=number, end=number + 1, size=group_bytes)
        return
    step = size if form == "jsonl" and path.suffix != ".gz" else max(1, length)
    for begin in range(0, max(1, length), step):
        end = min(length, begin + step)
        yield FilePart(path=str(path), form=form, begin=begin, end=end, size=end - begin)


def arrow_parts(paths: Sequence[str], rows: Sequence[int], size: int) -> Iterator[FilePart]:
    """Cut the tables of a downloaded data set."""
    for path, num_rows in zip(paths, rows, strict=True):
        length = Path(path).stat().st_size
        step = max(1, num_rows * size // max(1, length))
        for begin in range(0, num_rows, step):
            end = min(num_rows, begin + step)
            yield FilePart(path=path, form="arrow", begin=begin, end=end, size=length * (end - begin) // num_rows)


def documents(part: FilePart, field: str) -> Iterator[tuple[Where, Any]]:
    """Read the documents of a part, each with what finds out its line or row."""
    try:
        if part.form == "text":
            with part.open() as file:
                yield partial(str, part.path), file.read().decode()
        elif part.form == "jsonl":
            yield from _lines(part, field)
        else:
            first, group = (0, f" row group {part.begin}") if part.form == "parquet" else (part.begin, "")
            for row, value in enumerate((value for column in _columns(part, field) for value in column), first):
                yield partial("{}{} row {}".format, part.path, group, row), value
    except (EOFError, OSError) as error:  # gzip says so of a file that was cut off
        raise InputError.of(part.path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError:
        raise InputError.of(part.path, "is not text in UTF-8") from None


def _lines(part: FilePart, field: str) -> Iterator[tuple[Where, Any]]:
    """Read the lines that begin in the range of a part: the one that crosses its begin belongs to the part before."""
    with part.open() as file:
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
    value: Any = json_line(line)
    if value is None:  # say why; or it is null, which is no object
        value = cast(Any, parsed_line(line, where()))
    try:
        return value[field]
    except (KeyError, TypeError):
        hint = f"it has {', '.join(value)}. Name one with --field" if isinstance(value, dict) else "it is no object"
        raise InputError.of(where(), f"has no {field!r}: {hint}") from None


def _line(part: FilePart, at: int) -> str:
    """Name the line that begins at a byte."""
    with part.open() as file:
        number = 1
        while at > 0 and (chunk := file.read(min(at, 1 << 20))):
            number, at = number + chunk.count(b"\n"), at - len(chunk)
        return f"{part.path} line {number}"


def _columns(part: FilePart, field: str) -> Iterator[list[Any]]:
    """Read one column of a table, some rows at a time."""

    def require_field(columns: Sequence[str]) -> None:
        message = f"has no column {field!r}: it has {', '.join(columns)}. Name one with --field"
        require((field in columns, part.path, message))

    if part.form == "parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(part.path) as file:
            require_field(file.schema_arrow.names)
            for batch in file.iter_batches(_ROWS, row_groups=[part.begin], columns=[field]):
                yield batch.column(0).to_pylist()
    else:
        from datasets import Dataset

        table = Dataset.from_file(part.path)
        require_field(table.column_names)
        for begin in range(part.begin, part.end, _ROWS):
            yield table[begin : min(part.end, begin + _ROWS)][field]


_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?$")
# Classes of exceptions, of whichever HTTP library is used.
_UNREACHED = {"ConnectError", "ConnectTimeout", "OfflineModeIsEnabled"}
_BROKEN = {"RemoteProtocolError", "ReadError", "PoolTimeout", "IncompleteRead", "ConnectionError", "TimeoutError"}
_BROKEN |= {"ReadTimeout"}
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN"
CONVERT = (
    "Write one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), and give that folder"
)


def is_hub_id(text: str) -> bool:
    """Tell an id, as in ``owner/name``, from a path."""
    return _ID.match(text) is not None


def hub_source(text: str, subset: str | None, split: str) -> TextSource:
    """Download a data set and find its tables; what was downloaded before is taken from the cache."""
    with _explained(text, "dataset"):
        import datasets
        from huggingface_hub import HfApi, constants

        revision = None
        if not constants.HF_HUB_OFFLINE:  # else what the cache has is all that there is
            HfApi().auth_check(text, repo_type="dataset")
            revision = HfApi().dataset_info(text).sha
        datasets.disable_progress_bars()
        try:
            table: Any = datasets.load_dataset(text, subset, split=split, revision=revision)
        except ValueError as error:  # no such subset or split: the message lists those that there are
            raise InputError.of(text, f"{' '.join(str(error).split())} See --subset and --split") from None
    paths = [entry["filename"] for entry in table.cache_files]
    rows = [datasets.Dataset.from_file(path).num_rows for path in paths]
    files = tuple((path, Path(path).stat().st_size, 0) for path in paths)
    parts = tuple(arrow_parts(paths, rows, piece_bytes(files)))
    name = "/".join(filter(None, (text, subset, split)))
    return TextSource(text=name, files=files, parts=parts, revision=revision)


def hub_tokenizer(name: str, files: tuple[str, ...]) -> Path:
    """Download the files of a tokenizer, of which the first must be there, and return their folder."""
    with _explained(name, "model"):
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=list(files)))
        require(((folder / files[0]).is_file(), name, f"has no {files[0]}. {CONVERT}"))
        return folder


@contextmanager
def _explained(name: str, kind: Literal["dataset", "model"]) -> Iterator[None]:
    """Raise exceptions of the Hugging Face libraries as one InputError with the remedy."""
    from huggingface_hub import constants, errors

    # Of the HTTP library, which is another one from time to time.
    http_error: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    try:
        yield
    except (OSError, RuntimeError, http_error) as error:
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        if any(isinstance(each_cause, OSError) and each_cause.errno in _OF_THE_DISK for each_cause in causes):
            raise
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
        raise InputError.of(name, _reason(causes, constants.ENDPOINT, page)) from error


def _reason(causes: Sequence[BaseException], hub: str, page: str) -> str:
    """Say why a page of a hub cannot be read, by an exception and its causes, and what to do about it."""
    from huggingface_hub import errors

    status = next((status for cause in causes if (status := _status(cause))), None)
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    if any(isinstance(cause, errors.GatedRepoError) for cause in causes):
        if status == 403:
            what = "its licence is not accepted by the account of your token"
            return f"{what}. Accept it at {page}, or give a token that may"
        return f"needs a token and an accepted licence. Accept it at {page}. {_LOGIN}"
    if status == 403:
        return f"your token may not read it. Ask its owner at {page}, or give a token that may"
    if status == 401 or any(isinstance(cause, errors.RepositoryNotFoundError) for cause in causes):
        what = f"there is no {page}, or it is private, or your token is wrong"
        return f"{what}. Look at the spelling. {_LOGIN} if it is private"
    if status is not None:
        return f"{hub} answers {status}. Start the same command again later: finished files are kept"
    if names & _UNREACHED:
        look = "Look at the network, at a proxy and at HF_ENDPOINT. Without a network, download elsewhere and give"
        return f"{hub} cannot be reached. {look} the folder"
    if names & _BROKEN:
        return f"the download from {hub} broke off. Start the same command again: finished files are kept"
    return f"cannot be read: {' '.join(str(causes[0]).split())}"


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
