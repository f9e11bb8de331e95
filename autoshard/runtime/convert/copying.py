"""The copy itself: file by file from a source, in threads, in little memory, taken up after a kill."""

import hashlib
import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

import torch

from autoshard.engine.patches import Patch
from autoshard.errors import require
from autoshard.files import naming, takes_lock
from autoshard.runtime.checkpoint.files import header_of
from autoshard.runtime.convert.stored import StateFile, WeightSource, square
from autoshard.runtime.futures import as_they_end

JOURNAL = "converted.jsonl"
_FORMAT = 2  # of its lines; a journal of another format is begun anew
_CHUNK_BYTES = 2**24  # of a tensor that are put together and written at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a target, and its boxes of ours."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    patches: tuple[Patch, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file of a target: a safetensors file, or a state dict of torch."""

    file: str
    entries: tuple[Entry, ...]
    kind: Literal["safetensors", "state"] = "safetensors"
    summed: bool = False  # whether an index needs its checksums
    metadata: Mapping[str, str] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all numbers in it."""
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A written file: its bytes, and for every tensor its first byte, its checksum and its sums of squares."""

    file: str
    num_bytes: int
    starts: tuple[int, ...]
    crc32s: tuple[int, ...]
    squares: tuple[tuple[float, ...], ...] = ()  # the sum of squares of each of its boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgress:
    """How far a conversion is."""

    done_bytes: int
    all_bytes: int
    kept_bytes: int  # of files that were there from before a kill


class Copying:
    """Writes target files into a folder; files that a journal there knows are kept."""

    def __init__(
        self, source: WeightSource, outputs: Sequence[TargetFile], folder: Path, say: Callable[[CopyProgress], None]
    ) -> None:
        self._source, self._outputs, self._folder, self._say = source, outputs, folder, say
        self._all, self._done, self.kept_bytes = sum(output.num_bytes for output in outputs), 0, 0
        self._lock, self._stop = threading.Lock(), threading.Event()

    def run(self, workers: int) -> list[WrittenFile]:
        """Write the files that are not there yet; the first failure ends all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / JOURNAL).open("a+", encoding="utf-8") as journal:
            written = self._begun(journal)
            to_write = [output for output in self._outputs if output.file not in written]
            self._advance(0)
            lone = {"initializer": torch.set_num_threads, "initargs": (1,)}  # files share the cores already
            with ThreadPoolExecutor(min(workers, max(1, len(to_write))), **lone) as pool:
                tasks = [pool.submit(self._write, output, journal) for output in to_write]
                try:
                    written |= {done.file: done for done in (task.result() for task in as_they_end(tasks))}
                except BaseException:
                    self._stop.set()
                    pool.shutdown(cancel_futures=True)
                    raise
            return [written[output.file] for output in self._outputs]

    def _begun(self, journal: IO[str]) -> dict[str, WrittenFile]:
        """Take up the journal of this same conversion; anything else in the folder is removed."""
        require((takes_lock(journal), str(self._folder), "another process converts into it. Wait for it"))
        stats = {
            file: Path(file).stat()
            for file in sorted({file for tensor in self._source.stored for file in tensor.files})
        }
        read = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()]
        conversion = repr((_FORMAT, read, self._outputs))
        sign = hashlib.sha256(conversion.encode()).hexdigest()  # differs for any other conversion
        journal.seek(0)
        written, lines = dict[str, WrittenFile](), journal.read().split("\n")[:-1]
        for line in lines[1:] if lines and json.loads(lines[0]) == sign else []:
            record = json.loads(line)
            squares = tuple(map(tuple, record["squares"]))
            sums = {"starts": tuple(record["starts"]), "crc32s": tuple(record["crc32s"]), "squares": squares}
            file = WrittenFile(**{**record, **sums})
            path = self._folder / file.file
            if path.is_file() and path.stat().st_size == file.num_bytes:
                written[file.file] = file
        for path in (path for path in self._folder.rglob("*") if path.is_file() and path.name != JOURNAL):
            if str(path.relative_to(self._folder)) not in written:
                path.unlink()
        journal.seek(0)
        journal.truncate()
        journal.writelines(json.dumps(line) + "\n" for line in (sign, *map(asdict, written.values())))
        journal.flush()
        self.kept_bytes = self._done = sum(output.num_bytes for output in self._outputs if output.file in written)
        return written

    def _write(self, output: TargetFile, journal: IO[str]) -> WrittenFile:
        path = self._folder / output.file
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.part")
        sums = _Sums(self._source.squares is not None, output.summed)
        table = [(entry.name, entry.dtype, entry.shape) for entry in output.entries]
        with naming(aside), aside.open("wb") as stream:
            if output.kind == "state":
                starts = [0] * len(table)
                with StateFile(stream, table) as state:
                    for number, entry in enumerate(output.entries):
                        state.write(number, entry.num_bytes, self._raw(entry, stream, sums))
            else:
                head, (*starts, _) = header_of(table, output.metadata)
                stream.write(head)
                for entry in output.entries:
                    stream.writelines(self._raw(entry, stream, sums))
            stream.flush()
            os.fsync(stream.fileno())
        written = WrittenFile(
            file=output.file, num_bytes=aside.stat().st_size, starts=tuple(starts),
            crc32s=tuple(sums.crc32s), squares=tuple(map(tuple, sums.squares)),
        )  # fmt: skip
        aside.rename(path)
        with self._lock, naming(self._folder / JOURNAL):
            journal.write(json.dumps(asdict(written)) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        return written

    def _raw(self, entry: Entry, stream: IO[bytes], sums: "_Sums") -> Iterator[memoryview]:
        """Yield the bytes of a tensor for a stream, and add its numbers to the sums."""
        sums.begin(entry)
        for numbers in self._chunks(entry, sums):
            raw, before = numbers.reshape(-1).view(torch.uint8).numpy().data, stream.tell()
            sums.add_bytes(raw)
            yield raw
            if hasattr(os, "posix_fadvise"):  # begin to write to the disk, and keep the cache for what is read
                os.posix_fadvise(stream.fileno(), 0, before, os.POSIX_FADV_DONTNEED)
            self._advance(len(raw))

    def _chunks(self, entry: Entry, sums: "_Sums") -> Iterator[torch.Tensor]:
        """Yield the numbers of a tensor, some rows at a time; their memory is filled again for the next ones."""
        rows = max(1, _CHUNK_BYTES // (math.prod(entry.shape[1:]) * entry.dtype.itemsize))
        memory = torch.empty((min(rows, entry.shape[0]), *entry.shape[1:]), dtype=entry.dtype)
        for low in range(0, entry.shape[0], rows):
            high = min(low + rows, entry.shape[0])
            numbers = memory[: high - low].zero_()
            for number, whole in enumerate(entry.patches):
                for part in whole.rows(low, high):
                    view = part.view(numbers)
                    self._source.fill(view, part.tensor, part.box[0])
                    sums.add_numbers(number, view)
            yield numbers

    def _advance(self, num_bytes: int) -> None:
        if self._stop.is_set():
            raise InterruptedError("another file failed")
        with self._lock:
            self._done += num_bytes
            self._say(CopyProgress(done_bytes=self._done, all_bytes=self._all, kept_bytes=self.kept_bytes))


class _Sums:
    """Checksums and sums of squares of the tensors of a file, computed while they are written."""

    def __init__(self, squares: bool, crc32s: bool) -> None:
        self._with_squares, self._with_crc32s = squares, crc32s
        self.squares, self.crc32s = list[list[float]](), list[int]()

    def begin(self, entry: Entry) -> None:
        """Start the sums of the next tensor of the file."""
        if self._with_squares:
            self.squares.append([0.0] * len(entry.patches))
        if self._with_crc32s:
            self.crc32s.append(0)

    def add_numbers(self, patch: int, numbers: torch.Tensor) -> None:
        """Add numbers of one of its boxes."""
        if self._with_squares:
            self.squares[-1][patch] += square(numbers)

    def add_bytes(self, raw: memoryview) -> None:
        """Add bytes to the checksum."""
        if self._with_crc32s:
            self.crc32s[-1] = zlib.crc32(raw, self.crc32s[-1])
