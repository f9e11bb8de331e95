"""The keys of a candidate's text form: how the value of each is read."""

import re
from collections.abc import Callable, Mapping

from autoshard.errors import InputError, nearest
from autoshard.plan.recompute import parse_stages
from autoshard.plan.run_length import expand, split_outside_brackets
from autoshard.schedule.schedule import schedule_names
from autoshard.spec.placement import Placement

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def split_pairs(text: str) -> list[str]:
    """Cut the text into its ``key=value`` pairs; commas inside brackets stay.

    >>> split_pairs("tp=8, recompute=selective[attend,act]")
    ['tp=8', 'recompute=selective[attend,act]']
    """
    if not text.strip():
        return []
    return [pair.strip() for pair in split_outside_brackets(text, ",")]


def read_pair(pair: str) -> tuple[str, object]:
    """Read one ``key=value`` pair."""
    key, equals, raw = (part.strip() for part in pair.partition("="))
    if not equals:
        raise InputError.of("", "write key=value, for example tp=8")
    if key not in READERS:
        raise InputError.of("", f"unknown key {key!r}. {nearest(key, list(READERS))}")
    return key, READERS[key](raw)


def _count(raw: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", raw) or int(raw) < 1:
        raise InputError.of("", f"{raw!r} is not a whole number of at least 1")
    return int(raw)


def _choice(*choices: object) -> Callable[[str], object]:
    by_text = {str(choice).lower() if isinstance(choice, bool) else str(choice): choice for choice in choices}

    def read(raw: str) -> object:
        if raw not in by_text:
            raise InputError.of("", f"{raw!r} is not one of {', '.join(by_text)}")
        return by_text[raw]

    return read


def _schedule(raw: str) -> str:
    if raw not in schedule_names():
        raise InputError.of("", f"{raw!r} is not a schedule. {nearest(raw, schedule_names())}")
    return raw


def _layers(raw: str) -> tuple[int, ...]:
    return tuple(_count(item) for item in expand(raw))


def _word(raw: str) -> str:
    if not _WORD.fullmatch(raw):
        raise InputError.of("", f"{raw!r} is not a name")
    return raw


def _bracketed(raw: str) -> str:
    if not raw or raw.count("[") != raw.count("]"):
        raise InputError.of("", f"{raw!r} is empty or has unequal brackets")
    return re.sub(r"\s+", " ", raw)


READERS: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "dp", "vp", "mbs"), _count),
    "sp": _choice(True, False),
    "zero": _choice(0, 1, 3),
    "schedule": _schedule,
    "recompute": parse_stages,
    "stages": _layers,
    "place": Placement.parse,
    "kernels": _word,
    "cp_kind": _choice("ring", "all_to_all"),
    "cp_order": _choice("contiguous", "zigzag"),
    "boundary": _bracketed,
    "lnc": _count,
}
