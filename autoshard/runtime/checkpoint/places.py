"""Where checkpoints lie: a local folder, or any URL that fsspec reads, with one set of operations for both."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from autoshard.errors import InputError


class StorageError(Exception):
    """An operation on a file failed: which file, and why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of a filesystem; names in it are relative, with ``/`` between their parts."""

    system: Any  # fsspec.AbstractFileSystem, whose methods are not typed
    root: str

    @classmethod
    def of(cls, url: str, option: str = "checkpoint.to") -> "Place":
        """Open a path or a URL; a protocol that is unknown, or needs a package, is the user's to mend."""
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
                if self.is_local:
                    file.flush()
                    os.fsync(file.fileno())

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Open a file to read parts of it."""
        path = self.path(name)
        with _named(path), self.system.open(path, "rb") as file:
            yield file

    def read(self, name: str) -> bytes | None:
        """Return a whole file; None if there is none."""
        try:
            with self.reading(name) as file:
                return file.read()
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

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
        """Rename a local folder, for good."""
        assert self.is_local, "stores rename by copying"
        with _named(self.path(to)):
            Path(self.path(name)).rename(self.path(to))
            folder = os.open(self.root, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def _entries(self, folder: str) -> list[tuple[str, Any]]:
        path = self.path(folder)
        with _named(path):
            self.system.invalidate_cache(path)
            try:
                found = self.system.ls(path, detail=True)
            except FileNotFoundError:
                return []
        return [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in found]


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Let every failure name the file: each filesystem has its own exceptions."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise StorageError(f"{path}: {reason}") from error
