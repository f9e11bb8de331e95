"""Faults of a question in the words of Python: those of the command line name its options."""

import re
from collections.abc import Generator
from contextlib import contextmanager

from autoshard.errors import Fault, InputError

_PAIR = r"[a-z_]+=[^\s,=\[\]]+"
_PINS = re.compile(rf"--(fix|at|why-not) ({_PAIR}(?:,{_PAIR})*)$")
_LAYOUT = re.compile(r"--pin (\S+)$")
_OPTION = re.compile(r"--([a-z][a-z.-]*)")


def in_python(where: str) -> str:
    """Return how a script writes what the command line calls an option.

    >>> in_python("--fix tp=7"), in_python("--why-not ep=2,dp=1"), in_python("--seq-len"), in_python("model")
    ("fix={'tp': 7}", "why_not={'ep': 2, 'dp': 1}", 'seq_len', 'model')
    >>> in_python("--pin up"), in_python("--data.set")
    ("layouts={'up': ...}", 'data__set')
    """
    if layout := _LAYOUT.fullmatch(where):
        return f"layouts={{{layout[1]!r}: ...}}"
    if pins := _PINS.fullmatch(where):
        pairs = (pair.partition("=")[::2] for pair in pins[2].split(","))
        items = (f"{key!r}: {value if value.isdecimal() else repr(value)}" for key, value in pairs)
        return f"{pins[1].replace('-', '_')}={{{', '.join(items)}}}"
    return _OPTION.sub(lambda option: option[1].replace("-", "_").replace(".", "__"), where)


@contextmanager
def python_words() -> Generator[None]:
    """Raise an InputError again with the words of Python in the place of options."""
    try:
        yield
    except InputError as error:
        raise InputError(Fault(where=in_python(fault.where), message=fault.message) for fault in error.faults) from None
