"""Every exception of autoshard, on one screen.

AutoshardError
    InputError      something the user wrote cannot be used; exit code 2
    NoPlan          the question is fine, but no plan answers it; exit code 1
    CheckFailed     a plan or a file did not pass a check; exit code 1
    RunFailed       a run started and did not end well; exit code 3
        NotFinite   its loss or gradient is no number any more; starting it again would not help
    Stopped         a signal ended a run; exit code 128 and the number of the signal

A candidate that may not run is not an exception: it is a Rejection, a value (see ``autoshard.plan.rules``).
"""

import math
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong: where it stands, and what to do about it."""

    where: str
    message: str

    def __str__(self) -> str:
        """Print as one line."""
        return f"{self.where}: {self.message}" if self.where else self.message

    def under(self, parent: str | Path) -> "Fault":
        """Return the same fault seen from the file or the value that contains it, or from the option that gave it."""
        whole = str(parent)
        if not whole or not self.where:
            return Fault(where=whole or self.where, message=self.message)
        is_file, of_list = isinstance(parent, Path), self.where.startswith("[")
        joint = ": " if is_file else " " if whole.startswith("--") else "" if of_list else "."
        return Fault(where=f"{whole}{joint}{self.where}", message=self.message)


class AutoshardError(Exception):
    """Base of all errors that autoshard raises on purpose."""

    exit_code = 2


class InputError(AutoshardError):
    """What the user wrote cannot be used; holds every fault that was found, not only the first."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = tuple(faults)
        assert self.faults, "an InputError without a fault explains nothing"
        super().__init__("\n".join(str(fault) for fault in self.faults))

    @classmethod
    def of(cls, where: str, message: str) -> "InputError":
        """Make an error of a single fault."""
        return cls([Fault(where=where, message=message)])

    def __reduce__(self) -> tuple[type["InputError"], tuple[tuple[Fault, ...]]]:
        """Travel between processes with all faults."""
        return InputError, (self.faults,)

    def under(self, parent: str | Path) -> "InputError":
        """Return the same error seen from what contains the faulty value."""
        return InputError(fault.under(parent) for fault in self.faults)


@contextmanager
def inside(parent: str | Path) -> Generator[None, None, None]:
    """Let the faults of a block name the file, the value or the option that they lie in."""
    try:
        yield
    except InputError as error:
        raise error.under(parent) from None


@contextmanager
def file_faults(where: str, done: str = "written") -> Generator[None, None, None]:
    """Turn what the file system refuses in a block into a fault of the path or the option that names a file."""
    try:
        yield
    except FileNotFoundError as error:
        missing = Path(str(error.filename))
        reason = no_such_file(missing) if done == "read" else f"cannot be {done}: there is no folder {missing.parent}"
        raise InputError.of(where, reason) from None
    except (OSError, ValueError) as error:  # the latter: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError.of(where, f"cannot be {done}: {reason or error}") from None


def no_such_file(path: Path, remedy: str = "") -> str:
    """Say that there is no file at a path: which file beside it has a like name, or what else to do."""
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    stems = [entry.stem for entry in siblings if entry.suffix == path.suffix]
    near = [f"{stem}{path.suffix}" for stem in close_names(path.stem, stems)]
    meant = f"Did you mean {' or '.join(near)}?" if near else remedy
    return f"there is no such file. {meant}" if meant else "there is no such file"


class Faults(list[Fault]):
    """The faults of parts that are read one after the other, to be reported at once.

    >>> found = Faults()
    >>> for name in ("nodes", "ranks"):
    ...     with found.of(name):
    ...         raise InputError.of("", "must be positive")
    >>> found.refuse()
    Traceback (most recent call last):
    autoshard.errors.InputError: nodes: must be positive
    ranks: must be positive
    """

    @contextmanager
    def of(self, parent: str | Path = "") -> Generator[None, None, None]:
        """Keep the faults of a block, seen from what contains it; the rest of the block is left out."""
        try:
            yield
        except InputError as error:
            self.extend(error.under(parent).faults)

    def refuse(self) -> None:
        """Raise one InputError of all faults, if there are any; of equal ones only the first."""
        if self:
            raise InputError(dict.fromkeys(self))


class NoPlan(AutoshardError):
    """The question is well formed, but no plan answers it."""

    exit_code = 1


class CheckFailed(AutoshardError):
    """A check said no."""

    exit_code = 1


class RunFailed(AutoshardError):
    """A run started and did not end well."""

    exit_code = 3


class NotFinite(RunFailed):
    """A run met numbers that are not finite."""


class Stopped(AutoshardError):
    """A signal ended a run."""

    def __init__(self, name: str, number: int, unsaved: str = "") -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {name}{f', and the last state was not saved: {unsaved}' if unsaved else ''}")


_LEAST_PART = 3  # letters of a name that tell it
_ALIKE = 0.6  # likeness from which on a name may be meant
_ALIKE_IN_ORDER = 0.8  # likewise with the words of both in order
_WORD = re.compile(r"[-_. ]")  # between words of a name
Check = tuple[bool, str, str]  # whether it holds, where, and what to say if it does not


def in_range(value: object, *names: str, low: float = 0, high: float = math.inf, positive: bool = False) -> list[Check]:
    """Make the checks (for ``require``) that attributes of a value lie in a range; one that is None need not.

    >>> in_range(3 + 4j, "real", "imag", low=4)
    [(False, 'real', 'must be at least 4, not 3.0'), (True, 'imag', 'must be at most inf, not 4.0')]
    """
    checks: list[Check] = []
    for name in names:
        number = getattr(value, name)
        if number is not None:
            above = "positive" if positive and number <= 0 else f"at least {low}"
            limit = above if number < low or above == "positive" else f"at most {high}"
            holds = low <= number <= high and (number > 0 or not positive)
            checks.append((holds, name, f"must be {limit}, not {number}"))
    return checks


def require(*checks: Check) -> None:
    """Raise one InputError that names every check which does not hold.

    This is how values refuse to exist with impossible numbers.

    >>> require((1 > 0, "nodes", "must be positive"))
    >>> require((False, "nodes", "must be positive, not 0"))
    Traceback (most recent call last):
    autoshard.errors.InputError: nodes: must be positive, not 0
    """
    faults = [Fault(where=where, message=message) for holds, where, message in checks if not holds]
    if faults:
        raise InputError(faults)


def nearest(name: str, known: Sequence[str], listed: str = "") -> str:
    """Say which known names look like a name, or contain it, as the end of a sentence; nothing if it is known.

    Where none does, all are named; those that ``autoshard list`` prints, as ``listed``, are counted.

    >>> nearest("lama3-8b", ["llama3-8b", "gpt2-xl"]), nearest("70B", ["llama3-70b", "gpt2-xl"])
    ('Did you mean llama3-8b?', 'Did you mean llama3-70b?')
    >>> nearest("zzz", ["b", "a"]), nearest("zzz", ["b", "a"], "models")
    ('Known: a, b.', 'autoshard list models prints all 2.')
    """
    if name in known:
        return ""
    if close := close_names(name, known):
        return f"Did you mean {' or '.join(close)}?"
    if listed:
        return f"autoshard list {listed} prints all {len(known)}."
    return f"Known: {', '.join(sorted(known)) or 'none'}."


def close_names(name: str, known: Sequence[str]) -> list[str]:
    """Return at most three known names that differ from a name by capitals, look like it, or contain it.

    Words may stand in another order.

    >>> close_names("TP", ["tp", "pp", "cp"]), close_names("x", ["max"])
    (['tp'], [])
    >>> close_names("lama_tiny", ["llama2-7b", "tiny-llama"]), close_names("nodes_max", ["max-nodes", "nodes"])
    (['tiny-llama'], ['max-nodes', 'nodes'])
    """
    by_lower = {entry.lower(): entry for entry in reversed(known)}
    lower = name.lower()
    if lower in by_lower:
        return [by_lower[lower]]
    likeness = {entry: _likeness(lower, entry) for entry in by_lower}
    ranked = sorted(((alike, entry) for entry, alike in likeness.items() if alike >= _ALIKE), reverse=True)
    close = [entry for _, entry in ranked]
    if not close and len(lower) >= _LEAST_PART:
        close = [entry for entry in by_lower if lower in entry]
    return [by_lower[entry] for entry in close[:3]]


def _likeness(name: str, entry: str) -> float:
    """Return how alike two names are, from 0 to 1, as they stand or with their words in order."""
    theirs, ours = (" ".join(sorted(_WORD.split(text))) for text in (name, entry))
    as_they_stand, in_order = (SequenceMatcher(None, *pair).ratio() for pair in ((entry, name), (ours, theirs)))
    return max(as_they_stand, in_order if in_order >= _ALIKE_IN_ORDER else 0.0)
