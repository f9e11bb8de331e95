"""Faults of a question in the words of Python: those of the command line name its options."""

import re
from collections.abc import Generator
from contextlib import contextmanager

from autoshard.errors import Fault, InputError

_PIN = re.compile(r"--(fix|at) ([a-z_]+)=([^\s,]+)$")
_OPTION = re.compile(r"--([a-z][a-z-]*)")


def in_python(where: str) -> str:
    """Return how a script writes what the command line calls an option.

    >>> in_python("--fix tp=7"), in_python("--seq-len"), in_python("--pin up"), in_python("model")
    ("fix={'tp': 7}", 'seq_len', 'pin up', 'model')
    """
    pin = _PIN.fullmatch(where)
    if pin:
        value = pin[3] if pin[3].isdecimal() else repr(pin[3])
        return f"{pin[1]}={{{pin[2]!r}: {value}}}"
    return _OPTION.sub(lambda option: option[1].replace("-", "_"), where)


@contextmanager
def python_words() -> Generator[None]:
    """Raise an InputError again with the words of Python in the place of options."""
    try:
        yield
    except InputError as error:
        raise InputError(Fault(where=in_python(fault.where), message=fault.message) for fault in error.faults) from None
