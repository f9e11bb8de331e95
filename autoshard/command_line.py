"""Command lines and files of options become the arguments of a function.

jsonargparse splits the line, prints the help, and checks every value against the type of its parameter. This module
adds recipes in the place of plans, the nearest known name of what is misspelled, and that all faults come at once.
"""

import argparse
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from autoshard.errors import Fault, Faults, InputError, inside, nearest
from autoshard.spec.files import named_file
from autoshard.spec.recipe import RECIPES, Pins

Counts = tuple[int, ...]  # one whole number, or several with commas between them
Paths = tuple[Path, ...]  # one path or more, typed one after the other
PlanOrRecipe = NewType("PlanOrRecipe", Path)  # a recipe (.yaml) is a file of options as well
Given = dict[str, tuple[str, Any]]  # option -> how faults name the place where it is given, and what stands there
Group = TypeVar("Group")  # a dataclass whose fields are options

# `list models`, not `list --what models`
_POSITIONAL = ("plan", "plans", "rows", "file", "folder", "source", "target", "what", "shell", "a", "b")
_REQUIRED = inspect.Parameter.empty
_EXPECTED: dict[Any, tuple[str, str]] = {  # type -> how the help and how a fault names it
    bool: ("", "true or false"),
    int: ("N", "a whole number"),
    float: ("X", "a number like 0.001 or 1e-3"),
    Counts: ("N[,N...]", "a whole number, or several like 4,8,16"),
    Path: ("PATH", "a path"),
    Paths: ("PATH", "paths"),
    Pins: ("KEY=VALUE[,...]", "text"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A parameter of a command, or a field of a dataclass that is one: ``schedule.shape``."""

    name: str
    kind: Any  # its type, without None
    default: object
    words: tuple[str, ...]  # the only ones that it takes, if there are only some
    repeats: bool  # given as NAME=VALUE any number of times; named in the singular
    flag: str  # how it is typed
    label: str  # how faults name it: PLAN where it is given without its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated(Generic[Group]):
    """The options of a dataclass that the user has stated; the command decides where the rest comes from."""

    kind: type[Group]
    values: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)  # by option: schedule.shape
    origins: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # how faults name each option

    def over(self, base: Group) -> Group:
        """Return the dataclass: the stated values over those of ``base``; refuse values that do not fit together."""
        return cast(Group, _built(self.kind, "", {**flat_fields(base), **self.values}, self.origins))


def flat_fields(value: object, before: str = "") -> dict[str, object]:
    """Return the fields of a dataclass by the names of their options.

    >>> from autoshard.spec.training import Training
    >>> flat_fields(Training(steps=7))["steps"], flat_fields(Training())["schedule.shape"]
    (7, 'constant')
    """
    fields: dict[str, object] = {}
    for key, kind in get_type_hints(type(value)).items():
        part = getattr(value, key)
        fields |= flat_fields(part, f"{before}{key}.") if _is_group(kind) else {before + key: part}
    return fields


def is_recipe(path: object) -> bool:
    """Say whether a file is a recipe, which is planned first, and not a plan."""
    return str(path).endswith((".yaml", ".yml"))


def read_options(name: str, command: Callable[..., int], arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a command's parameters; None after printing its help.

    A parameter whose type is a dataclass stands for its fields: each is an option. Options come from the line, from the
    file after --config, and from a recipe in the place of a plan, in this order.
    """
    options = {option.name: option for option in options_of(command)}
    known = ["--help", "--config", "--extend", *(one.flag for one in options.values() if one.label == one.flag)]
    flags = (argument.partition("=")[0] for argument in arguments if argument.startswith("--") and argument != "--")
    faults = [
        Fault(where=flag, message=f"unknown option. {nearest(flag, known)} See autoshard {name} --help")
        for flag in flags
        if flag not in known  # the parser would take abbreviations, and name only the first that it does not know
    ]
    if faults:
        raise InputError(faults)
    parser = _parser(name, command, list(options.values()), with_help={"-h", "--help"} & set(arguments) != set())
    try:
        line = dict(vars(parser.parse_args(arguments)))
    except ArgumentError as error:
        raise InputError.of("", f"{error}. See autoshard {name} --help") from None
    if line["help"]:
        parser.print_help()
        return None
    given: Given = {}
    asked = [key for key, one in options.items() if one.kind is PlanOrRecipe and line[key] is not None]
    line |= {key: str(named_file(Path(line[key]), RECIPES)) for key in asked}
    sources = [(line[key], line[key]) for key in asked if is_recipe(line[key])]
    if line["config"]:
        with inside("--config"):
            sources.append((f"--config {line['config']}", str(named_file(Path(line["config"]), RECIPES))))
    for where, path in sources:
        given |= _entries(where, path, options, faults)
    _load_extensions(line["extend"] or (), *given.pop("extend", ("", ())))
    for key, option in options.items():
        raw = line[key.replace(".", "/")]
        if raw not in (None, False, []):
            typed = _pairs(option, raw, faults) if option.repeats else raw
            in_file = given[key][1] if option.kind == Mapping[str, str] and key in given else None
            given[key] = (option.label, {**in_file, **typed} if isinstance(in_file, dict) else typed)
    values = {key: _value(option, given.get(key), faults) for key, option in options.items()}
    if faults:
        raise InputError(faults)
    return _arguments(command, options, values, given)


def _arguments(
    command: Callable[..., int], options: Mapping[str, Option], values: Mapping[str, Any], given: Given
) -> dict[str, Any]:
    """Return the arguments of a command: values, dataclasses made of values, and the stated options of dataclasses."""
    origins = {key: given[key][0] if key in given else option.label for key, option in options.items()}

    def argument(name: str, kind: Any) -> object:
        if get_origin(kind) is Stated:
            group = get_args(kind)[0]
            stated = {key: values[key] for key in flat_fields(group()) if key in given}
            return Stated(kind=group, values=stated, origins=origins)
        return _built(kind, "", values, origins) if _is_group(kind) else values[name]

    kinds = ((name, parameter.annotation) for name, parameter in inspect.signature(command).parameters.items())
    return {name: argument(name, kind) for name, kind in kinds}


def _load_extensions(typed: Sequence[str], file: str, listed: object) -> None:
    """Load the user's Python files: those typed, and those that a file of options names, relative to it if need be."""
    names = [str(name) for name in (cast(Sequence[object], listed) if isinstance(listed, list | tuple) else [listed])]
    beside = ((Path(file).parent / name, Path(name)) for name in names)
    paths = [*map(Path, typed), *(near if near.is_file() else path for near, path in beside)]
    if paths:
        from autoshard.extensions import load_extension

        for path in paths:
            load_extension(path)


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _group_of(kind: Any) -> Any:
    """Return the dataclass whose fields stand for a parameter; None where the parameter is an option itself."""
    inner = get_args(kind)[0] if get_origin(kind) is Stated else kind
    return inner if _is_group(inner) else None


def options_of(source: Any, before: str = "") -> Iterator[Option]:
    """Yield a command's options, or those of a dataclass; dataclasses inside a dataclass put their name before."""
    types = get_type_hints(source)
    for name, parameter in inspect.signature(source).parameters.items():
        kind, default = types[name], parameter.default
        if group := _group_of(kind):
            yield from options_of(group, f"{before}{name}." if _is_group(source) else "")
            continue
        if NoneType in get_args(kind):
            kind = Union[tuple(member for member in get_args(kind) if member is not NoneType)]  # noqa: UP007 (as many as there are)
        literals = (member for member in (kind, *get_args(kind)) if get_origin(member) is Literal)
        repeats = get_origin(kind) is Mapping
        flag = f"--{before}{name.removesuffix('s') if repeats else name}".replace("_", "-")
        yield Option(
            name=before + name, kind=kind, default=default, repeats=repeats, flag=flag,
            words=tuple(word for literal in literals for word in get_args(literal)),
            label=name.upper() if name in _POSITIONAL and default is _REQUIRED else flag,
        )  # fmt: skip


def _parser(name: str, command: Callable[..., int], options: Sequence[Option], *, with_help: bool) -> ArgumentParser:
    """Return the parser that splits the line of a command and prints its help, which is read only when asked for."""
    summary, about = _documentation(command) if with_help else ("", {})
    parser = ArgumentParser(
        prog=f"autoshard {name}", description=summary, exit_on_error=False, add_help=False,
        formatter_class=argparse.HelpFormatter,
    )  # fmt: skip
    for option in options:
        text, default = about.get(option.name, ""), option.default
        if default not in (None, False, "", (), _REQUIRED) and not option.repeats:
            text = f"{text} Default: {default}."
        dest = option.name.replace(".", "/")  # of names with dots the parser forgets all values but the last
        words = (*option.words, "N") if int in get_args(option.kind) else option.words
        metavar = "{" + ",".join(words) + "}" if option.words else _EXPECTED.get(option.kind, ("TEXT",))[0]
        if option.kind is bool:
            parser.add_argument(option.flag, dest=dest, action="store_true", help=text)
        elif option.repeats:
            parser.add_argument(option.flag, dest=dest, action="append", metavar="NAME=VALUE", help=text)
        elif option.label != option.flag:
            many = "*" if option.kind == Paths else "?"
            parser.add_argument(option.name, metavar=option.label, nargs=many, help=text)
        else:
            parser.add_argument(option.flag, dest=dest, metavar=metavar, help=text)
    parser.add_argument("--config", metavar="FILE", help="A YAML or JSON file with any of these options.")
    extend = "A Python file with Rules, cost terms or schedules of your own; may be given several times."
    parser.add_argument("--extend", action="append", metavar="FILE", help=extend)
    parser.add_argument("-h", "--help", action="store_true", help="Show this help.")
    return parser


def _documentation(source: Any, before: str = "") -> tuple[str, dict[str, str]]:
    """Return the summary of a command, and what its docstring and those of its dataclasses say of each option."""
    import docstring_parser

    parsed = docstring_parser.parse(source.__doc__ or "")
    about = {
        before + parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in parsed.params
    }
    about = {name: text.replace("%", "%%") for name, text in about.items()}
    for name, kind in get_type_hints(source).items():
        if group := _group_of(kind):
            about |= _documentation(group, f"{before}{name}." if _is_group(source) else "")[1]
    return parsed.short_description or "", about


def _entries(where: str, path: str, options: Mapping[str, Option], faults: list[Fault]) -> Given:
    """Return the entries of a file by option; keys of a recipe that belong to other commands are checked too."""
    from autoshard.spec.files import read_data
    from autoshard.spec.recipe import RECIPE_KEYS, TRAINING_KEYS
    from autoshard.spec.record import decode
    from autoshard.spec.training import Training

    try:
        data = read_data(Path(path))
    except InputError as error:
        raise InputError(Fault(where=where, message=fault.message) for fault in error.faults) from None
    if not isinstance(data, dict):
        raise InputError.of(where, "must hold options, one `name: value` per line")
    entries: Given = {}
    elsewhere: dict[str, object] = {}
    for name, value in _flat(cast(dict[Any, Any], data), options, ""):
        section, _, key = name.rpartition(".")
        inside = _keys(options, f"{name}.")
        if name == "extend":
            entries[name] = (path, value or ())
        elif name in options or (inside and value is None):
            entries |= {} if value is None else {name: (f"{where}: {name}", value)}
        elif inside:
            message = f"must hold keys, each on a line of its own: {', '.join(inside)}"
            faults.append(Fault(where=f"{where}: {name}", message=message))
        elif name in RECIPE_KEYS:
            elsewhere[name] = value
        else:
            names = _keys(options, f"{section}.") if section else [*_keys(options, ""), *RECIPE_KEYS]
            message = f"unknown key. {nearest(key, list(dict.fromkeys(names)))}"
            faults.append(Fault(where=f"{where}: {name}", message=message))
    of_training = Faults()
    with of_training.of():
        decode(Training, {key: elsewhere[key] for key in TRAINING_KEYS if elsewhere.get(key) is not None})
    faults += (Fault(where=f"{where}: {fault.where}", message=fault.message) for fault in of_training)
    return entries


def _flat(section: Mapping[Any, Any], options: Mapping[str, Option], before: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a file with the names of options: those of sections have dots."""
    for key, value in section.items():
        name = before + str(key).replace("-", "_")
        if isinstance(value, dict) and _keys(options, f"{name}."):
            yield from _flat(cast(dict[Any, Any], value), options, f"{name}.")
        else:
            yield name, value


def _keys(options: Mapping[str, Option], before: str) -> list[str]:
    """Return the keys of a section, such as ``schedule.``."""
    inside = (name.removeprefix(before).partition(".")[0] for name in options if name.startswith(before))
    return list(dict.fromkeys(inside))


def _pairs(option: Option, texts: Sequence[str], faults: list[Fault]) -> dict[str, str]:
    """Split NAME=VALUE; a name alone weighs 1 where values are weights."""
    pairs: dict[str, str] = {}
    for text in texts:
        weighs = option.kind == Mapping[str, float]
        name, equals, value = text.rpartition("=") if weighs else text.partition("=")
        name, value = (name, value) if equals else (text, "1" if weighs else "")
        if name in pairs:
            faults.append(Fault(where=f"{option.flag} {name}", message="is given twice; keep one"))
        pairs[name.strip()] = value
    return pairs


def _value(option: Option, stated: tuple[str, Any] | None, faults: list[Fault]) -> object:
    """Return the value of an option in its type, or its default; what is wrong with it joins the faults."""
    if stated is None:
        if option.default is _REQUIRED:
            choices = f"; one of {', '.join(option.words)}" if option.words else ""
            faults.append(Fault(where=option.label, message=f"missing{choices}"))
        return {} if option.repeats else option.default
    (where, raw), kind = stated, option.kind
    if isinstance(raw, int | float) and not isinstance(raw, bool) and kind not in (int, float):
        raw = str(raw)
    if isinstance(raw, str) and (not raw.strip() or "\0" in raw):
        faults.append(Fault(where=where, message="must not be empty"))
        return None
    reader = ArgumentParser(exit_on_error=False)
    reader.add_argument("--value", type=getattr(kind, "__supertype__", kind))
    try:
        listed = f"[{raw}]" if kind == Counts and isinstance(raw, str) else raw
        value = reader.parse_object({"value": listed}, defaults=False).value
    except ArgumentError:
        value = None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        faults.append(Fault(where=where, message=_mismatch(option, raw)))
    return value


def _mismatch(option: Option, raw: object) -> str:
    """Say what an option expects instead of what was given."""
    if option.repeats:
        values = "numbers" if option.kind == Mapping[str, float] else "text in quotes"
        return f"must map names to {values}, one `name: value` per line"
    if isinstance(raw, dict | list | bool) and option.kind is not bool:
        return "expected a single value"
    if option.words and option.kind not in _EXPECTED:
        number = " A whole number is fine too." if int in get_args(option.kind) else ""
        return f"{str(raw)!r} is not one of them. {nearest(str(raw), option.words)}{number}"
    return f"expected {_EXPECTED.get(option.kind, ('', 'text'))[1]}, found {str(raw)!r}"


def _built(group: Any, before: str, values: Mapping[str, object], origins: Mapping[str, str]) -> object:
    """Return the dataclass that the values of its fields make; its faults name the option or the key of a file."""
    fields: dict[str, object] = {}
    for key, kind in get_type_hints(group).items():
        name = before + key
        fields[key] = _built(kind, f"{name}.", values, origins) if _is_group(kind) else values[name]
    try:
        return group(**fields)
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
