"""Which files of a user's own are loaded in this process, and which of them a plan was made with."""

from collections.abc import Mapping
from pathlib import Path

from autoshard.errors import Fault, InputError

LOADED: dict[Path, str] = {}  # the whole path of each, with the hash of its text
_PREFIX = "extension."  # of their entries in a plan's provenance


def extension_entries() -> dict[str, str]:
    """Return the provenance of a plan that is made with what is loaded: names of files, and hashes of their texts."""
    return {f"{_PREFIX}{path.name}": f"sha256 {digest}" for path, digest in LOADED.items()}


def extend_words() -> list[str]:
    """Return the options with which another process loads the same files."""
    return [word for path in LOADED for word in ("--extend", str(path))]


def require_extensions(provenance: Mapping[str, object]) -> None:
    """Refuse a plan that was made with other files than are loaded; more files may be."""
    entries = extension_entries()
    faults: list[Fault] = []
    for key, wanted in provenance.items():
        name = key.removeprefix(_PREFIX)
        if not key.startswith(_PREFIX) or entries.get(key) == wanted:
            continue
        message = f"the plan was made with {name} ({wanted}). Type --extend and where that file lies"
        if key in entries:
            message = f"{name} ({entries[key]}) is not the file that the plan was made with ({wanted}). Plan again"
        faults.append(Fault(where="--extend", message=message))
    if faults:
        raise InputError(faults)
