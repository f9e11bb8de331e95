"""Files that are whole or absent: written aside, brought to the disk, and renamed over what was there."""

import errno
import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_ASIDE = ".partial"  # ends the hidden name of a file that is being written
_MODE = 0o666  # less what the umask takes
# Answers of file systems that bring no folder to the disk, and need not: CIFS, and many in user space.
_NOTHING_TO_BRING = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}
_LOCKED = {errno.EWOULDBLOCK, errno.EACCES}


class FolderPath(type(Path())):
    """A path that was typed with a slash at its end: that of a folder, whether there is one or not.

    >>> FolderPath("out/"), isinstance(FolderPath("out/"), Path)
    (FolderPath('out'), True)
    """


def replace_text(path: Path, text: str) -> bool:
    """Let a file hold a text, whatever kills this process or fills the disk; return whether anything was written.

    A file that holds the text already is not touched. A link stays a link; a device or a pipe is written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_text(Path(folder, "plan.json"), "{}"), replace_text(Path(folder, "plan.json"), "{}")
    (True, False)
    """
    content = text.encode()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return True
    path = path.resolve()
    if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return False
    with replacing(path) as aside:
        aside.write_bytes(content)
    return True


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a name aside for the new content of a file; when the block ends well, it takes the file's place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}{_ASIDE}")
    try:
        with naming(path):
            yield aside
            with aside.open("rb") as file:
                os.fsync(file.fileno())
        if path.exists():
            aside.chmod(path.stat().st_mode & 0o7777)
        aside.rename(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    bring_to_disk(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file in a single write; half a line that a kill has left there is ended first."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
    try:
        size = os.fstat(number).st_size
        broken = size > 0 and os.pread(number, 1, size - 1) != b"\n"
        content = (("\n" if broken else "") + line + "\n").encode()
        with naming(path):
            if os.write(number, content) < len(content):
                os.ftruncate(number, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(number)


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Let what the file system refuses in a block name a path, where Python names none: a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def bring_to_disk(path: Path) -> None:
    """Make the names in a folder, or the lines of a file, last; some file systems have no such thing and need none."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NOTHING_TO_BRING:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(number)


def takes_lock(file: IO[str]) -> bool:
    """Take the lock of a file if nobody has it; a file system that has no locks fails, and names the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        reason = f"it takes no lock ({error.strerror}), which keeps two processes apart. Mount it with locks"
        raise OSError(error.errno, reason, file.name) from error
    return True


def is_aside(path: Path) -> bool:
    """Say whether a killed process may have left this file beside one that it was replacing."""
    return path.name.startswith(".") and path.name.endswith(_ASIDE)


def remove_asides(folder: Path) -> None:
    """Remove what killed processes have left beside the files that they were replacing; nobody else may be at work."""
    for path in folder.iterdir():
        if is_aside(path):
            path.unlink(missing_ok=True)
