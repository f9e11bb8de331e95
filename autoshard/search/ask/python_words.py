"""Faults of a question in the words of Python: those of the command line name its options."""

import re
from collections.abc import Generator
from contextlib import contextmanager

from autoshard.errors import Fault, InputError, NoPlan
from autoshard.spec.repeats import split_outside_brackets

_PAIR = r"[a-z_]+=[^\s,=\[\]]+"
_FIXED = r"[a-z_]+=[^\s,=\[\]]+(?:\[[^\s\]]*\][^\s,=]*)?"
_PINS = re.compile(rf"--(fix|at|why-not) ({_PAIR}(?:,{_PAIR})*)$")
_LAYOUT = re.compile(r"--pin (\S+)$")
_OPTION = re.compile(r"--([a-z][a-z.-]*)")
# In what a sentence advises: a command stays as it is, options of a question become arguments.
_NUMBER, _WORD = r"[0-9](?:[0-9.]*[0-9])?", r"[\w.-]*\w"
_ADVISED = re.compile(
    rf"autoshard [a-z]+ [^\n]*|--fix ({_FIXED}(?:,{_FIXED})*)"
    rf"|--(seq-len|global-batch|nodes|headroom|lnc|engine|cluster|precision|model)(?: ({_NUMBER}\b|{_WORD}))?"
)
_WRITTEN = {"engine": "search=Search(engine={!r})", "lnc": "fix={{'lnc': {}}}"}
_NAME = re.compile(r"nxd|torch|any|.*[0-9].*")  # and not a word of the sentence
_NAMED = ("engine", "cluster", "model", "precision")  # options whose values are names


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
        return f"{pins[1].replace('-', '_')}={_items(pins[2])}"
    return _OPTION.sub(lambda option: option[1].replace("-", "_").replace(".", "__"), where)


def _items(pins: str) -> str:
    pairs = (pair.partition("=")[::2] for pair in split_outside_brackets(pins, ","))
    return f"{{{', '.join(f'{key!r}: {value if value.isdecimal() else repr(value)}' for key, value in pairs)}}}"


def advice_in_python(text: str) -> str:
    """Return a sentence with arguments of Python in the place of options; commands in it stay.

    >>> advice_in_python("Use --seq-len 4096, or --engine torch"), advice_in_python("try --fix tp=8,pp=2")
    ("Use seq_len=4096, or search=Search(engine='torch')", "try fix={'tp': 8, 'pp': 2}")
    >>> advice_in_python("--fix recompute=selective[a,b],tp=8, so without pp=2"), advice_in_python("Use --lnc 1, or")
    ("fix={'recompute': 'selective[a,b]', 'tp': 8}, so without pp=2", "Use fix={'lnc': 1}, or")
    >>> advice_in_python("Type --model with the file"), advice_in_python("Use --cluster trn2.48xlarge, or GPUs")
    ('Type model with the file', "Use cluster='trn2.48xlarge', or GPUs")
    >>> advice_in_python("Use another --seq-len"), advice_in_python("Type autoshard plan --nodes 2")
    ('Use another seq_len', 'Type autoshard plan --nodes 2')
    """
    return _ADVISED.sub(_argument, text)


def _argument(advised: re.Match[str]) -> str:
    pins, option, value = advised.groups()
    if pins:
        return f"fix={_items(pins)}"
    if not option:
        return advised[0]
    name = option.replace("-", "_")
    is_name = option in _NAMED and value and not value[0].isdigit() and _NAME.fullmatch(value)
    if value is None or not (is_name or value[0].isdigit()):
        return f"{name} {value}" if value else name
    return (
        _WRITTEN[option].format(value) if option in _WRITTEN else f"{name}={value!r}" if is_name else f"{name}={value}"
    )


@contextmanager
def python_words() -> Generator[None]:
    """Raise an InputError or a NoPlan again with the words of Python in the place of options."""
    try:
        yield
    except InputError as error:
        faults = [(in_python(fault.where), advice_in_python(fault.message)) for fault in error.faults]
        raise InputError(Fault(where=where, message=message) for where, message in faults) from None
    except NoPlan as error:
        raise NoPlan(advice_in_python(str(error))) from None
