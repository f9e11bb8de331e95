"""What a folder of tokens says of itself: ``manifest.json``, and how files are held against it."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autoshard.errors import Fault, InputError, require
from autoshard.runtime.data.indexed import AGAIN, wrong_size
from autoshard.spec import record
from autoshard.spec.files import read_data

NAME = "manifest.json"
SCHEMA = 1
Kind = Literal["text", "chat"]  # chat: whole conversations, with a mask of the answers


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a set, as it was written."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRecord:
    """What made the tokens."""

    name: str
    vocab: int  # ids go from 0 to one less
    eos: int | None  # what closes a document; conversations close as their template says
    sha256: str | None = None  # of tokenizer.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole set; the same for the same source and tokenizer, however many processes made it."""

    schema: int
    source: str
    revision: str | None  # of a data set on a hub
    kind: Kind
    tokenizer: TokenizerRecord
    dtype: Literal["uint16", "int32"]
    num_tokens: int
    num_documents: int
    num_empty: int  # documents without text, which are left out
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        """Refuse manifests of another time."""
        other = f"must be {SCHEMA}, not {self.schema}. Update autoshard, or tokenize again"
        require((self.schema == SCHEMA, "schema", other), (bool(self.files), "files", "must name at least one"))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; its faults name the file."""
    try:
        return record.decode(Manifest, read_data(path))
    except InputError as error:
        raise error.under(str(path)) from None


def write_record(value: object, path: Path) -> None:
    """Write JSON so that the file is there whole or not at all, also after a power cut."""
    aside = path.with_name(path.name + ".partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(record.encode(value), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sha256(path: Path) -> str:
    """Read a whole file for its checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def described(path: Path) -> FileRecord:
    """Return the record of a file that was just written."""
    return FileRecord(name=path.name, bytes=path.stat().st_size, sha256=sha256(path))


def missing_or_resized(folder: Path, files: Iterable[FileRecord]) -> Iterator[Fault]:
    """Hold files against their records by size alone."""
    for file in files:
        path = folder / file.name
        try:
            found = path.stat().st_size
        except OSError as error:
            yield Fault(where=str(path), message=f"cannot be read: {error.strerror}. The manifest lists it: {AGAIN}")
            continue
        if found != file.bytes:
            yield Fault(where=str(path), message=f"{wrong_size(found, file.bytes)} by its manifest")


def altered(folder: Path, files: Iterable[FileRecord]) -> Iterator[Fault]:
    """Hold files against their checksums, several at a time: reads every byte."""
    known = tuple(files)
    with ThreadPoolExecutor() as pool:
        for file, found in zip(known, pool.map(lambda file: sha256(folder / file.name), known), strict=True):
            if found != file.sha256:
                yield Fault(where=str(folder / file.name), message=f"is altered: {AGAIN}. Its checksum is another")
