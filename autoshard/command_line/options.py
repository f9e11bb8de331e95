"""Options: the parameters of a command, and the fields of the dataclasses among them."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from autoshard.errors import Fault, InputError
from autoshard.spec.files import YAML_SUFFIXES

Counts = tuple[int, ...]  # one whole number, or several with commas between them
Paths = tuple[Path, ...]  # one path or more, typed one after the other
PlanOrRecipe = NewType("PlanOrRecipe", Path)  # a recipe (.yaml) is a file of options as well
Configuration = NewType("Configuration", str)  # of another program: a file, or FILE.py:FUNCTION
Group = TypeVar("Group")  # a dataclass whose fields are options

DEFAULT_PLAN = PlanOrRecipe(Path("plan.json"))  # what `autoshard plan` writes, and what is read where no plan is typed
REQUIRED = inspect.Parameter.empty
# `list models`, not `list --what models`
_POSITIONAL = ("plan", "plans", "rows", "file", "folder", "source", "target", "what", "shell", "a", "b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A parameter of a command, or a field of a dataclass that is one: ``schedule.shape``."""

    name: str
    kind: Any  # its type, without None
    default: object
    words: tuple[str, ...]  # the only ones that it takes, if there are only some
    repeats: bool  # given as NAME=VALUE any number of times; named in the singular
    flag: str  # how it is typed
    label: str  # how faults name it: PLAN where it is typed without its name

    @property
    def may_have_word(self) -> bool:
        """Say whether it is typed alone, or with one of its words behind it."""
        return bool(self.words) and bool in (self.kind, *get_args(self.kind))

    @property
    def is_positional(self) -> bool:
        """Say whether it is typed without its name."""
        return self.label != self.flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated(Generic[Group]):
    """The options of a dataclass that the user has stated; the command decides where the rest comes from."""

    kind: type[Group]
    values: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)  # by option: schedule.shape
    origins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # how faults name each option

    def over(self, base: Group) -> Group:
        """Return the dataclass: the stated values over those of ``base``; refuse values that do not fit together."""
        return built(self.kind, "", {**flat_fields(base), **self.values}, self.origins)


def flat_fields(value: object, before: str = "") -> dict[str, object]:
    """Return the fields of a dataclass by the names of their options.

    >>> from autoshard.spec.training import Training
    >>> flat_fields(Training(steps=7))["steps"], flat_fields(Training())["schedule.shape"]
    (7, 'constant')
    """
    values: dict[str, object] = {}
    for key, kind in get_type_hints(type(value)).items():
        part = getattr(value, key)
        values |= flat_fields(part, f"{before}{key}.") if is_group(kind) else {before + key: part}
    return values


def is_recipe(path: object) -> bool:
    """Say whether a file is a recipe, which is planned first, and not a plan."""
    return str(path).endswith(YAML_SUFFIXES)


def is_group(kind: Any) -> bool:
    """Say whether a type is a dataclass, whose fields are options."""
    return isinstance(kind, type) and is_dataclass(kind)


def group_of(kind: Any) -> Any:
    """Return the dataclass whose fields stand for a parameter; None where the parameter is an option itself."""
    inner = get_args(kind)[0] if get_origin(kind) is Stated else kind
    return inner if is_group(inner) else None


def options_of(source: Any, before: str = "", *, stated: bool = False) -> Iterator[Option]:
    """Yield a command's options, or those of a dataclass; dataclasses inside a dataclass put their name before.

    Of what is ``stated`` over other values, a switch can be turned off too: those values may have it on.
    """
    types = get_type_hints(source)
    for name, parameter in inspect.signature(source).parameters.items():
        kind, default = types[name], parameter.default
        if group := group_of(kind):
            over = stated or get_origin(kind) is Stated
            yield from options_of(group, f"{before}{name}." if is_group(source) else "", stated=over)
            continue
        if NoneType in get_args(kind):
            kind = Union[tuple(member for member in get_args(kind) if member is not NoneType)]  # noqa: UP007 (as many as there are)
        literals = (member for member in (kind, *get_args(kind)) if get_origin(member) is Literal)
        repeats = get_origin(kind) is Mapping
        flag = f"--{before}{name.removesuffix('s') if repeats else name}".replace("_", "-")
        words = tuple(word for literal in literals for word in get_args(literal))
        words = ("true", "false") if kind is bool and stated else words
        yield Option(
            name=before + name, kind=kind, default=default, repeats=repeats, flag=flag, words=words,
            label=name.upper() if name in _POSITIONAL and default is not None else flag,
        )  # fmt: skip


def word_option(options: Mapping[str, Option]) -> Option | None:
    """Return the option that may be typed as the first word of a command that takes no other: a model."""
    return None if any(option.is_positional for option in options.values()) else options.get("model")


def built(group: type[Group], before: str, values: Mapping[str, object], origins: Mapping[str, str]) -> Group:
    """Return the dataclass that the values of its fields make; its faults name the option or the key of a file."""
    parts: dict[str, Any] = {}
    for key, kind in get_type_hints(group).items():
        name = before + key
        parts[key] = built(kind, f"{name}.", values, origins) if is_group(kind) else values[name]
    try:
        return cast(Group, group(**parts))
    except InputError as error:
        faults: list[Fault] = []
        for fault in error.faults:
            key = before + fault.where
            name = next(
                (origin for origin in origins if key == origin or key.startswith((f"{origin}.", f"{origin}["))), None
            )
            rest = Fault(where=key.removeprefix(name or "").removeprefix("."), message=fault.message)
            faults.append(rest.under(origins[name]) if name else fault)
        raise InputError(faults) from None
