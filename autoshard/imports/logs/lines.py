"""Lines of text files, plain or packed with gzip, in a stream: a log may be larger than memory."""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autoshard.errors import InputError, file_faults

_LONGEST = 1 << 16  # letters of a line; what is longer comes in pieces
_REPORT_EVERY = 50_000  # lines
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(r"\[(?:rank|default|\d+,)\s?(\d+)\]|^\s*(\d{1,6}): ")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSoFar:
    """How much of a file was read."""

    done_bytes: int
    all_bytes: int
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line without colours; ``whole`` says whether it was written to its end."""

    text: str
    whole: bool

    @property
    def rank(self) -> str:
        """The rank that a launcher puts before each line; "" where there is none.

        >>> [LogLine(text, True).rank for text in ("[rank3]:[titan] step", " 7:  iteration 3", "[1,0]<stdout>:a", "b")]
        ['3', '7', '0', '']
        """
        match = _RANK.search(self.text[:80])
        return (match[1] or match[2]) if match else ""

    @property
    def stamp(self) -> tuple[float, float, str] | None:
        """The clock of a line: seconds, resolution and date.

        >>> LogLine("[titan] 2025-06-04 08:51:58,557 - root", True).stamp[1:]
        (0.001, '2025-06-04')
        """
        match = _STAMP.search(self.text)
        if match is None:
            return None
        fraction = match[3] or ""
        try:
            moment = datetime.fromisoformat(f"{match[1]}T{match[2]}").replace(tzinfo=UTC)
        except ValueError:  # no such day or hour
            return None
        return moment.timestamp() + float(f"0.{fraction or 0}"), 10.0 ** -len(fraction), match[1]


def log_lines(
    path: Path, marks: Sequence[str], report: Callable[[ReadSoFar], None] = lambda _: None
) -> Iterator[LogLine]:
    """Yield the lines of a file that hold one of the marks; bars that are redrawn are lines as well."""
    with file_faults(str(path), "read"), path.open("rb") as raw:
        size = path.stat().st_size
        packed = raw.peek(2)[:2] == _GZIP
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="replace", newline=None)
        try:
            for number, line in enumerate(iter(lambda: text.readline(_LONGEST), "")):
                if number % _REPORT_EVERY == 0:
                    report(ReadSoFar(done_bytes=raw.tell(), all_bytes=size))
                for mark in marks:  # any() of a generator takes three times as long, and most lines have none
                    if mark in line:
                        plain = _COLOUR.sub("", line) if "\x1b" in line else line
                        yield LogLine(plain.rstrip("\n"), line.endswith("\n"))
                        break
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError.of(str(path), f"is packed, and its end is missing or broken: {error}") from None
