r"""Megatron's indexed format: tokens in PREFIX.bin; lengths, places and documents of their sequences in PREFIX.idx.

An index is: 9 bytes ``MMIDIDX\0\0``, a version (1), a code of the tokens' format, how many sequences and how many
document entries; then per sequence its length (int32), per sequence its first byte in the .bin (int64), and the number
of the first sequence of each document, closed by the number of sequences (int64). All of it is little-endian.

Files are read by ``pread``, not mapped: a file that shrinks under a run is then an error with a name and not a SIGBUS,
a slow disk does not hold Python's lock, and thousands of files need no descriptor each.
"""

import os
import struct
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from autoshard.errors import Fault, InputError, RunFailed, require
from autoshard.graph.op import Array

_MAGIC = b"MMIDIDX\0\0"
_OLD_MAGIC = b"TNTIDX\0\0"  # of fairseq's older "cached" and "lazy" forms
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {"int32": 4, "uint16": 8}
_FLOATS = {6: "float64", 7: "float32"}
_LENGTH, _PLACE = np.dtype("<i4"), np.dtype("<i8")
_MOST_OPEN = 64  # descriptors
_CHUNK = 1 << 24  # bytes that a check reads at a time

AGAIN = "copy it again from where it was made, or tokenize again"


def sibling_file(prefix: Path, suffix: str) -> Path:
    """Return a file of a set: its name may hold dots."""
    return Path(f"{prefix}{suffix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """What stands where in one pair of files; made by ``read_index``, which checks it against their sizes."""

    prefix: Path
    dtype: np.dtype
    num_sequences: int
    num_entries: int  # of documents: one more than there are
    num_tokens: int

    @property
    def bin(self) -> Path:
        """The file of the tokens."""
        return sibling_file(self.prefix, ".bin")

    @property
    def idx(self) -> Path:
        """The file of the index."""
        return sibling_file(self.prefix, ".idx")

    @property
    def mask(self) -> Path:
        """The file that says which tokens are answers: one byte each, 1 or 0. Only conversations have one."""
        return sibling_file(self.prefix, ".mask.bin")

    @property
    def places_at(self) -> int:
        """Where in the index the first bytes of the sequences are listed."""
        return _HEADER.size + _LENGTH.itemsize * self.num_sequences

    @property
    def documents_at(self) -> int:
        """Where in the index the documents are listed."""
        return self.places_at + _PLACE.itemsize * self.num_sequences


def read_index(prefix: Path) -> TokenIndex:
    """Read an index, and check it against the sizes of both files; costs a few small reads for any size."""
    idx, tokens = sibling_file(prefix, ".idx"), sibling_file(prefix, ".bin")
    try:
        with idx.open("rb", buffering=0) as file:
            dtype, num_sequences, num_entries = _header(idx, file.read(_HEADER.size))
            bin_bytes = tokens.stat().st_size
            index = TokenIndex(
                prefix=prefix,
                dtype=dtype,
                num_sequences=num_sequences,
                num_entries=num_entries,
                num_tokens=bin_bytes // dtype.itemsize,
            )
            num_bytes = _end(index, file.fileno())
    except OSError as error:
        raise InputError.of(error.filename or str(idx), f"cannot be read: {error.strerror}") from error
    require((num_bytes == bin_bytes, str(tokens), f"{wrong_size(bin_bytes, num_bytes)} by its index"))
    return index


def _header(idx: Path, header: bytes) -> tuple[np.dtype, int, int]:
    """Return the format of the tokens, how many sequences there are, and how many entries of documents."""
    old = header.startswith(_OLD_MAGIC)
    require((not old, str(idx), "is in an older form (TNTIDX). Tokenize again, or convert it with Megatron-LM"))
    whole = len(header) == _HEADER.size and header.startswith(_MAGIC)
    require((whole, str(idx), f"is not an index of Megatron's form: it begins with {header[:9]!r}"))
    _, version, code, num_sequences, num_entries = _HEADER.unpack(header)
    require((version == 1, str(idx), f"has version {version}; only version 1 is known"))
    format_name = _FLOATS.get(code, f"of the unknown format {code}")
    require((code in _DTYPES, str(idx), f"says that tokens are {format_name}"))
    return np.dtype(_DTYPES[code]), num_sequences, num_entries


def wrong_size(actual: int, expected: int) -> str:
    """Say that a file has not the size that it must have, as the begin of a sentence."""
    what = "truncated" if actual < expected else "altered"
    return f"is {what}: {AGAIN}. It has {actual} bytes and should have {expected}"


def _end(index: TokenIndex, file: int) -> int:
    """Check the size of an index and the ends of its columns; return how many bytes its sequences take."""
    where, actual = str(index.idx), os.fstat(file).st_size
    expected = index.documents_at + _PLACE.itemsize * index.num_entries
    modes = index.num_sequences and actual == expected + index.num_sequences
    require((not modes, where, "holds the modes of a multimodal set; only sets of text can be read"))
    require((actual == expected, where, f"{wrong_size(actual, expected)} by its header"))

    def one(dtype: np.dtype, offset: int) -> int:
        return int.from_bytes(os.pread(file, dtype.itemsize, offset), "little", signed=True)

    begins = index.num_entries and one(_PLACE, index.documents_at) == 0
    require((bool(begins), where, f"is altered: {AGAIN}. Its documents do not begin with sequence 0"))
    if not index.num_sequences:
        return 0
    last = index.num_sequences - 1
    length = one(_LENGTH, _HEADER.size + last * _LENGTH.itemsize)
    place = one(_PLACE, index.places_at + last * _PLACE.itemsize)
    closed_by = one(_PLACE, index.documents_at + (index.num_entries - 1) * _PLACE.itemsize)
    wrong = one(_PLACE, index.places_at) or place < 0 or length < 0 or closed_by > index.num_sequences
    require((not wrong, where, f"is altered: {AGAIN}. Its first or last sequence cannot be"))
    return place + length * index.dtype.itemsize


class OpenFiles:
    """Reads parts of many files, and keeps the descriptors of those used last; for one thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, dtype: np.dtype, first: int, count: int, start: int = 0) -> Array:
        """Read some items of a file whose items begin at byte ``start``."""
        data = bytearray(count * dtype.itemsize)
        view, offset = memoryview(data), start + first * dtype.itemsize
        try:
            if path not in self._open:
                if len(self._open) >= _MOST_OPEN:
                    os.close(self._open.popitem(last=False)[1])
                self._open[path] = os.open(path, os.O_RDONLY)
            self._open.move_to_end(path)
            while view and (got := os.preadv(self._open[path], [view], offset)):  # at most 2 GiB at a time
                view, offset = view[got:], offset + got
        except OSError as error:
            raise RunFailed(f"{path}: cannot be read: {error.strerror}") from error
        if view:
            raise RunFailed(f"{path}: ends too early; it was whole when it was opened. Copy it again, then start again")
        return np.frombuffer(data, dtype)

    def close(self) -> None:
        """Close all files; reading opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        """Leave no descriptor behind."""
        self.close()


def starts_within(index: TokenIndex, files: OpenFiles, first: int, count: int) -> Array:
    """Return which of the tokens ``first`` to ``first + count - 1`` begin a document, counted from ``first``."""

    def span(start: int, length: int, low: int, high: int) -> tuple[int, Array]:
        """Return the entries of a rising column that are at least ``low`` and below ``high``, and where they begin."""

        def entry(number: int) -> int:
            return int(files.read(index.idx, _PLACE, number, 1, start)[0])

        begin = bisect_left(range(length), low, key=entry)
        end = bisect_left(range(length), high, lo=begin, key=entry)
        return begin, files.read(index.idx, _PLACE, begin, end - begin, start)

    item, sequences = index.dtype.itemsize, index.num_sequences
    begin, places = span(index.places_at, sequences, first * item, (first + count) * item)
    begins = places // item - first
    if index.num_entries == sequences + 1:  # every sequence is a document, as in all sets of text
        return begins
    _, entries = span(index.documents_at, index.num_entries, begin, begin + len(begins))
    return begins[entries - begin]


def document_lengths(index: TokenIndex, files: OpenFiles) -> Array:
    """Return the tokens of every document; reads the whole index."""
    lengths = files.read(index.idx, _LENGTH, 0, index.num_sequences, _HEADER.size).astype(np.int64)
    if index.num_entries == index.num_sequences + 1:
        return lengths
    entries = files.read(index.idx, _PLACE, 0, index.num_entries, index.documents_at)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return np.diff(ends[np.unique(np.append(entries, index.num_sequences))])


def faults_inside(index: TokenIndex, files: OpenFiles, vocab: int) -> Iterator[Fault]:
    """Read both files whole, and yield what in them cannot be."""
    num_bytes = files.read(index.idx, _LENGTH, 0, index.num_sequences, _HEADER.size).astype(np.int64)
    num_bytes *= index.dtype.itemsize
    places = files.read(index.idx, _PLACE, 0, index.num_sequences, index.places_at)
    entries = files.read(index.idx, _PLACE, 0, index.num_entries, index.documents_at)
    if (num_bytes < 0).any() or (places != np.cumsum(num_bytes) - num_bytes).any():
        yield Fault(where=str(index.idx), message=f"is altered: {AGAIN}. Its sequences do not follow one another")
    if (np.diff(entries) < 0).any():
        yield Fault(where=str(index.idx), message=f"is altered: {AGAIN}. Its documents do not follow one another")
    step = _CHUNK // index.dtype.itemsize
    for first in range(0, index.num_tokens, step):
        tokens = files.read(index.bin, index.dtype, first, min(step, index.num_tokens - first))
        if wrong := foreign_token(tokens, vocab):
            yield Fault(where=str(index.bin), message=wrong)
            return


def foreign_token(tokens: Array, vocab: int) -> str:
    """Say that some token is not of a model's vocabulary; nothing if all are."""
    if not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab):
        return ""
    least, most = int(tokens.min()), int(tokens.max())
    larger = f", or train a model with at least {most + 1} tokens" if least >= 0 else ""
    what = f"holds the token {most if least >= 0 else least}, and the model knows 0 to {vocab - 1}"
    return f"{what}. Tokenize with the model's own tokenizer{larger}"


class IndexedWriter:
    """Writes a set document by document; only lengths stay in memory until ``close`` writes the index.

    As a context it leaves no file open when something goes wrong.
    """

    def __init__(self, prefix: Path, vocab: int, *, masked: bool = False) -> None:
        self.prefix, self.num_tokens, self.num_answers = prefix, 0, 0
        self._dtype = np.dtype(dtype_of(vocab))
        self._lengths = array("i")
        self._bin = sibling_file(prefix, ".bin").open("wb")
        self._mask = sibling_file(prefix, ".mask.bin").open("wb") if masked else None

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._bin, self._mask):
            if file is not None:
                file.close()

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._lengths)

    def add(self, document: Sequence[int] | Array, answers: Sequence[bool] = ()) -> None:
        """Write one document, and which of its tokens are answers."""
        message = f"a document has {len(document)} tokens; the format holds 2 ** 31 - 1"
        require((len(document) <= np.iinfo(_LENGTH).max, str(self.prefix), message))
        self._bin.write(np.asarray(document).astype(self._dtype).tobytes())
        if self._mask is not None:
            self._mask.write(np.array(answers, np.uint8).tobytes())
        self._lengths.append(len(document))
        self.num_tokens += len(document)
        self.num_answers += sum(answers)

    def close(self) -> tuple[Path, ...]:
        """Write the index, see all files onto the disk, and return them; nothing is left of a set without documents."""
        idx = sibling_file(self.prefix, ".idx").open("wb")
        idx.write(_HEADER.pack(_MAGIC, 1, _CODES[self._dtype.name], self.num_documents, self.num_documents + 1))
        lengths = np.array(self._lengths, np.int64)
        idx.write(lengths.astype(_LENGTH).tobytes())
        idx.write(((np.cumsum(lengths) - lengths) * self._dtype.itemsize).astype(_PLACE).tobytes())
        idx.write(np.arange(self.num_documents + 1, dtype=_PLACE).tobytes())
        paths: list[Path] = []
        for file in (self._bin, idx, self._mask):
            if file is None:
                continue
            file.flush()
            os.fsync(file.fileno())
            file.close()
            paths.append(Path(file.name))
            if not self.num_documents:
                paths.pop().unlink()
        return tuple(paths)


def dtype_of(vocab: int) -> Literal["uint16", "int32"]:
    """Return the format of tokens, as Megatron chooses it."""
    return "uint16" if vocab < 65500 else "int32"
