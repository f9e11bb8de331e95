"""Where checkpoints lie: a local folder, or any URL that fsspec reads, with one set of operations for both."""

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from autoshard.errors import InputError
from autoshard.files import bring_to_disk

Value = TypeVar("Value")

TRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # waits between tries, so that a store may be away for a minute
# For each part that is sent. The clients of stores limit how long they wait for the answer to a request, but not how
# long they wait for leave to send its body ("Expect: 100-continue"): aiohttp 3.14, client_reqrep.py: write_bytes.
ANSWER_S = 120.0
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
# cited: docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html: at most 10,000 parts, so a file of 320 GiB.
_SENT_BYTES = 2**25  # to a store at a time
_FETCHED_BYTES = 2**23  # from a store beyond what is asked for
# By the names of exceptions: packages of stores are not imported here, and each has its own.
_KEYS = "Name a profile in AWS_PROFILE, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role"
_REMEDIES = {
    "NoCredentialsError": _KEYS,
    "PartialCredentialsError": _KEYS,
    "PermissionError": "Whoever runs this must be allowed to list, read, write and remove there",
    "FileNotFoundError": "A bucket, or the disk of a folder, must be there before",
    "EndpointConnectionError": "Are the network and AWS_ENDPOINT_URL_S3 right?",
}


class StorageError(Exception):
    """An operation on a file failed: which file, and why."""

    @property
    def remedy(self) -> str:
        """The advice for the user."""
        return _REMEDIES.get(type(self.__cause__).__name__, "Give --checkpoint.to another place, or none")

    @property
    def lasts(self) -> bool:
        """Whether another try would fail too: a missing, forbidden, full or damaged place stays so."""
        cause = self.__cause__
        if cause is None or isinstance(cause, FileNotFoundError | PermissionError):
            return True
        return isinstance(cause, OSError) and cause.errno in _LASTING


def persistent(operation: Callable[[], Value], stop: Event | None = None) -> Value:
    """Try an operation again while a store fails, each time after a longer wait, until ``stop`` is set."""
    for wait_s in TRIES_S:
        try:
            return operation()
        except StorageError as error:
            if error.lasts or (stop or Event()).wait(wait_s):
                raise
    return operation()


@dataclass(frozen=True, slots=True)
class Storage:
    """A folder of a filesystem; names in it are relative, with ``/`` between their parts."""

    system: Any  # fsspec.AbstractFileSystem, whose methods are not typed
    root: str

    @classmethod
    def of(cls, url: str, option: str = "checkpoint.to") -> "Storage":
        """Open a path or a URL; refuse a protocol that is unknown or needs a package."""
        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            remedy = "Use a folder, or install what it names (S3: pip install 'autoshard[data]')"
            raise InputError.of(option, f"{url} cannot be opened: {error}. {remedy}") from None
        return cls(system, root.rstrip("/"))

    @property
    def is_local(self) -> bool:
        """Whether files here can be synchronised and renamed."""
        return isinstance(self.system, LocalFileSystem)

    def path(self, name: str = "") -> str:
        """Return the whole path of a name."""
        return f"{self.root}/{name}" if name else self.root

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """Open a new file; at the end it is on the disk, or in the store."""
        path = self.path(name)
        with _named(path):
            if self.is_local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with self.system.open(path, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                return
            file = self.system.open(path, "wb", block_size=_SENT_BYTES)
            try:
                yield _SentFile(file)
                _answered(file.close)
            except BaseException:
                if isinstance(file, AbstractBufferedFile):
                    # Or else Python closes it some day, which makes an object of what was sent. A store that is away
                    # keeps the parts, until its own rules remove them.
                    file.closed = True
                    with suppress(StorageError), _named(path):
                        file.discard()
                else:
                    file.close()
                raise

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Open a file to read parts of it."""
        path = self.path(name)
        options = {} if self.is_local else {"block_size": _FETCHED_BYTES}
        with _named(path), self.system.open(path, "rb", **options) as file:
            yield file

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        with self.writing(name) as file:
            file.write(data)

    def read(self, name: str) -> bytes | None:
        """Return a whole file; None if there is none."""
        path = self.path(name)
        with _named(path):
            try:
                return self.system.cat_file(path)
            except FileNotFoundError:
                return None

    def folders(self) -> list[str]:
        """Return the names of all folders here, in order; none if this place does not exist yet."""
        return sorted(name for name, entry in self._entries("") if entry["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the files of a folder with their bytes."""
        return {name: entry["size"] for name, entry in self._entries(folder) if entry["type"] == "file"}

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        path = self.path(name)
        with _named(path):
            self.system.rm(path, recursive=True)

    def rename(self, name: str, to: str) -> None:
        """Rename a local folder, so that its new name and its files survive a power cut."""
        assert self.is_local, "stores rename by copying"
        with _named(self.path(to)):
            bring_to_disk(Path(self.path(name)))
            Path(self.path(name)).rename(self.path(to))
            bring_to_disk(Path(self.root))

    def _entries(self, folder: str) -> list[tuple[str, Any]]:
        path = self.path(folder)
        with _named(path):
            self.system.invalidate_cache(path)
            try:
                entries = self.system.ls(path, detail=True)
            except FileNotFoundError:
                return []
        return [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]


@dataclass(frozen=True, slots=True)
class _SentFile:
    """A new file in a store."""

    file: Any  # fsspec.spec.AbstractBufferedFile

    def write(self, data: Any) -> int:
        return _answered(lambda: self.file.write(data))


def _answered(operation: Callable[[], Value]) -> Value:
    """Return what an operation of a store returns; a store that leaves it unanswered fails."""
    answer = Future[Value]()

    def run() -> None:
        try:
            answer.set_result(operation())
        except BaseException as error:
            answer.set_exception(error)

    thread = Thread(target=run, daemon=True)  # nothing ends it while the store is silent
    thread.start()
    thread.join(ANSWER_S)
    if not answer.done():
        raise TimeoutError(errno.ETIMEDOUT, f"the store did not answer for {ANSWER_S:g} s")
    return answer.result()


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Let every failure name the file: each filesystem has its own exceptions."""
    try:
        yield
    except (StorageError, AssertionError):
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise StorageError(f"{path}: {reason}") from error
