"""Places that a command writes to after its work, tried before it."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from autoshard.files import FolderPath

Check = tuple[bool, str, str]
CALIBRATION, TRACE, CONTRIBUTION = b'"matrix_efficiency"', b'"displayTimeUnit"', b'"contributed"'
_PAGE = b"Written by autoshard"  # what only files of a kind hold that a command writes
_MOST_BYTES = 2**26  # that are looked through


def place_checks(out: Path, option: str = "--out", holds: bytes = b"") -> list[Check]:
    """Check that a file can be written at the path of an option; one that is there is kept unless it ``holds`` this."""
    checks = _checked(_against_file, out, option)
    if not holds or not checks[0][0] or not out.is_file():
        return checks
    with out.open("rb") as file:
        before = file.read(_MOST_BYTES)
    is_ours = not before or holds in before
    return [*checks, (is_ours, f"{option} {out}", "holds something else, and is kept. Name another file")]


def page_checks(out: Path, option: str = "--out") -> list[Check]:
    """Check that a page of HTML can be written at the path of an option, and that its name says so."""
    holds = out.suffix.lower() in ("", ".html", ".htm")
    message = f"is drawn as HTML. Name a .html file: {out.with_suffix('.html')}"
    return [(holds, f"{option} {out}", message), *place_checks(out, option, _PAGE)]


def folder_checks(out: Path, option: str = "--out") -> list[Check]:
    """Check that a folder can be made at the path of an option, or that files can be written into the one there."""
    return _checked(_against_folder, out, option)


def _checked(against: Callable[[Path], str], out: Path, option: str) -> list[Check]:
    try:
        reason = against(out)
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else ""
        reason = f"cannot be written: {words or error}. Name another place"
    return [(not reason, f"{option} {out}", reason)]


def _against_file(out: Path) -> str:
    """Return why a file cannot be written here, tried without a trace; "" if it can."""
    if out.is_dir() or isinstance(out, FolderPath):
        return "is a folder. Name a file in it"
    if str(out) == "-":
        return "is no name here. To print the file in the place of the answer, type /dev/stdout"
    if not out.parent.is_dir():
        return f"there is no folder {out.parent}. Make it first"
    if out.is_file():
        os.close(os.open(out, os.O_WRONLY))
    if out.is_file() or not out.exists():
        _try_folder(out.resolve().parent)  # where a link leads; a file is replaced by another with its name
    elif not os.access(out, os.W_OK):  # a device or a pipe, which must not be opened twice
        return "cannot be written to. Name another place"
    return ""


def _against_folder(out: Path) -> str:
    """Return why no file can lie in this folder, tried in the nearest one that exists; "" if it can."""
    if str(out) == "-":
        return "is no name here. Name a folder"
    there = next(folder for folder in (out, *out.parents) if folder.exists())
    if not there.is_dir():
        return "is a file. Name a folder" if there == out else f"{there} is a file. Name another folder"
    _try_folder(there)
    return ""


def _try_folder(folder: Path) -> None:
    with TemporaryFile(dir=folder):  # on Linux a file without a name
        pass
