"""Python files of a user's own, which ``--extend`` loads: what they define holds in this process, on every floor.

``EXTENSIONS`` is the one registry of a process, and the exception from the rule that values are handed down. It is
filled before a command begins, and read where autoshard lists its own parts of a kind: Rules, schedules, cost terms,
and the function that writes the MLP down. Texts of plans, schedules and graphs are read on floors that know no request.
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autoshard.errors import Fault, InputError, file_faults, require

Part = TypeVar("Part")
_PREFIX = "extension."  # of the entries of files in a plan's provenance
_RUN = "autoshard_module_"  # what begins the names of files with a function that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """The loaded files: the hash of the text of each by its whole path, and what they define by name."""

    files: dict[Path, str]
    parts: dict[str, object]

    def of(self, kind: type[Part], taken_names: Iterable[str] = ()) -> Mapping[str, Part]:
        """Return the parts of a class by name, none of which may be a name that autoshard has given."""
        if not self.parts:
            return {}
        parts = {name: part for name, part in self.parts.items() if isinstance(part, kind)}
        twice = ", ".join(sorted(parts.keys() & set(taken_names))) if parts else ""
        require((not twice, f"--extend {', '.join(path.name for path in self.files)}", f"{twice}: {_TAKEN}"))
        return parts

    def entries(self) -> dict[str, str]:
        """Return the provenance of a plan that is made with the files: their names, and hashes of their texts."""
        return {f"{_PREFIX}{path.name}": f"sha256 {digest}" for path, digest in self.files.items()}

    def options(self) -> list[str]:
        """Return the options with which another process loads the same files."""
        return [word for path in self.files for word in ("--extend", str(path))]


EXTENSIONS = Extensions(files={}, parts={})
_TAKEN = "this name is taken. Choose another"


def load_extension(path: Path) -> None:
    """Run a file, and register what it defines without a leading underscore; a file that is loaded is not run again."""
    where, whole = f"--extend {path}", path.resolve()
    with file_faults(where, "read"):
        text = whole.read_bytes()
    digest = hashlib.sha256(text).hexdigest()[:16]
    if EXTENSIONS.files.get(whole) == digest:
        return
    names = [file.name for file in EXTENSIONS.files]
    require((whole.name not in names, where, "a file of this name is loaded already"))
    module = run_file(whole, f"autoshard_extension_{whole.stem}", where)
    parts = {name: part for name, part in vars(module).items() if not name.startswith("_")}
    twice = [name for name, part in parts.items() if EXTENSIONS.parts.get(name, part) is not part]
    require((not twice, where, f"{', '.join(twice)}: {_TAKEN}"))
    EXTENSIONS.parts.update(parts)
    EXTENSIONS.files[whole] = digest


def require_extensions(provenance: Mapping[str, object]) -> None:
    """Refuse a plan that was made with other files than are loaded; more files may be."""
    entries, faults = EXTENSIONS.entries(), list[Fault]()
    for key, digest in provenance.items():
        name = key.removeprefix(_PREFIX)
        if not key.startswith(_PREFIX) or entries.get(key) == digest:
            continue
        message = f"the plan was made with {name} ({digest}). Type --extend and where that file lies"
        if key in entries:
            message = f"{name} ({entries[key]}) is not the file that the plan was made with ({digest}). Plan again"
        faults.append(Fault(where="--extend", message=message))
    if faults:
        raise InputError(faults)


def user_function(where: str, option: str) -> Callable[[], Any]:
    """Return a function of a user's: ``FILE.py:FUNCTION``, or ``package.module:FUNCTION`` of what Python can import."""
    name, _, function = where.rpartition(":")
    forms = "Write FILE.py:FUNCTION or package.module:FUNCTION"
    require((bool(name and function), option, f"{where} names no function. {forms}"))
    if name.endswith(".py"):
        path = Path(name)
        require((path.is_file(), option, f"there is no file {name}{'' if path.is_absolute() else f' in {Path.cwd()}'}"))
        _search_first(path.resolve().parent)
        module = run_file(path.resolve(), f"{_RUN}{path.stem}", f"{option} {path}")
    else:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise InputError.of(option, f"{name} cannot be imported: {error}") from None
        finally:
            sys.path.pop(0)
    require((callable(getattr(module, function, None)), option, f"{name} has no function {function}"))
    return getattr(module, function)


def is_imported(where: str) -> bool:
    """Say whether a text names a function of what Python can import, and no file.

    >>> [is_imported(text) for text in ("package.module:make", "my_models.py:make", "hf://user/set", "sets/web")]
    [True, False, False, False]
    """
    return re.fullmatch(r"\w+(\.\w+)*:\w+", where) is not None and not where.rpartition(":")[0].endswith(".py")


def from_folder(where: str, folder: Path) -> str:
    """Return a function with the whole path of its file, which leads from a folder; what is imported has none."""
    return where if is_imported(where) else str(folder / where)


def _search_first(folder: Path) -> None:
    """Let a file import those beside it, as `python FILE.py` does, and not those of one name beside another file."""
    places = {name: _folder_of(module) for name, module in [*sys.modules.items()] if "." not in name}
    run_folders = {place for name, place in places.items() if name.startswith(_RUN)} - {folder, None}
    for name in [*sys.modules]:
        top = name.partition(".")[0]
        if places.get(top) in run_folders and ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
            del sys.modules[name]
    sys.path[:] = [str(folder), *(place for place in sys.path if place != str(folder))]


def _folder_of(module: types.ModuleType) -> Path | None:
    """Return the folder from which a module or a package is imported."""
    path = Path(getattr(module, "__file__", None) or "")
    return (path.parent.parent if path.name == "__init__.py" else path.parent) if path.name else None


def run_file(path: Path, name: str, where: str) -> types.ModuleType:
    """Run a user's Python file as a module of this name; what goes wrong in it is told with its line.

    Its text is compiled each time: bytecode on the disk is taken for that of a text of the same size and second.
    """
    require((path.suffix == ".py", where, "must be a Python file, like my_module.py"))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        line = _line_in(path, error) or getattr(error, "lineno", None)
        said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError.of(where, f"line {line}: {said}") from None
    return module


def fault_of(error: Exception) -> Fault | None:
    """Return the fault of a loaded file whose function raised an error when it was called; None if none has."""
    lines = [(path.name, line) for path in EXTENSIONS.files if (line := _line_in(path, error))]
    said = f"{type(error).__name__}: {error}"
    return Fault(where=f"--extend {lines[0][0]}", message=f"line {lines[0][1]}: {said}") if lines else None


def called(name: str, function: Callable[..., Part], *arguments: object) -> Part:
    """Call a function of a loaded file; refuse one that takes other arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InputError.of(f"--extend {name}", f"is called with {len(arguments)} arguments: {error}") from None
    return function(*arguments)


def _line_in(path: Path, error: BaseException) -> int | None:
    """Return the last line of a file through which an error came."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None
