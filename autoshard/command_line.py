"""From the words of a command line, and a file of options, to the arguments of a function; all faults at once."""

import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from autoshard.errors import Fault, InputError, nearest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One value of an option that may be given several times, as NAME=VALUE, and where it was given."""

    text: str
    where: str


SaidOften = tuple[Said, ...]
Counts = tuple[int, ...]  # one whole number, or several with commas between them


def read_options(name: str, command: Callable[..., int], arguments: list[str]) -> dict[str, Any] | None:
    """Return the values of a command's parameters; None after printing its help.

    A parameter whose type is a dataclass stands for its fields: each is an option.
    """
    from jsonargparse import ArgumentError

    parameters = _options(command)
    _refuse_halves(arguments)
    _refuse_unknown(name, arguments, [_flag(parameter) for parameter in parameters.values()])
    parser = _parser(name, command)
    try:
        texts = parser.parse_args(arguments).as_dict()
    except ArgumentError as error:
        raise InputError.of("", f"{error}. See autoshard {name} --help") from None
    if texts["help"]:
        parser.print_help()
        return None
    faults: list[Fault] = []
    config, path = {}, texts["config"]
    if path is not None:
        config = _config(path, list(parameters), faults)
    values: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if parameter.annotation is SaidOften:
            values[key] = (
                *_listed(config.get(key), f"--config {path}: {key}", faults),
                *_repeated(texts[key], parameter),
            )
            continue
        given = texts[key] not in (None, False)
        where = _label(parameter) if given or key not in config else f"--config {path}: {key}"
        values[key] = _read(parameter, texts[key] if given else config.get(key), where, faults)
    if faults:
        raise InputError(faults)
    return {name: _value(name, kind, values) for name, kind in _kinds(command).items()}


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)  # not a dataclass's value


def _value(name: str, kind: Any, values: dict[str, Any]) -> object:
    """Return the value of a parameter; that of a group is made of those of its fields."""
    if not _is_group(kind):
        return values[name]
    return kind(**{key: values[key] for key in inspect.signature(kind).parameters})


def _kinds(command: Callable[..., int]) -> dict[str, Any]:
    """Return the types of a command's parameters."""
    return {name: parameter.annotation for name, parameter in inspect.signature(command).parameters.items()}


def _options(command: Callable[..., int]) -> dict[str, inspect.Parameter]:
    """Return a command's parameters by name, those of its groups among them."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind: Any = parameter.annotation
        found |= dict(inspect.signature(kind).parameters) if _is_group(kind) else {name: parameter}
    return found


def _flag(parameter: inspect.Parameter) -> str:
    """Return the option of a parameter; what may be given several times is named in the singular there."""
    name = parameter.name.removesuffix("s") if parameter.annotation is SaidOften else parameter.name
    return f"--{name.replace('_', '-')}"


def _listed(given: object, where: str, faults: list[Fault]) -> Iterator[Said]:
    """Read what a file maps names to."""
    if given is None:
        return
    if not isinstance(given, dict):
        faults.append(Fault(where=where, message="must map names to values, one `name: value` per line"))
        return
    for name, value in cast(dict[Any, Any], given).items():
        if isinstance(value, str):
            yield Said(text=f"{name}={value}", where=where)
        else:
            faults.append(Fault(where=f"{where}.{name}", message=f"must be text. Put {value!r} in quotes"))


def _repeated(texts: list[str] | None, parameter: inspect.Parameter) -> Iterator[Said]:
    yield from (Said(text=text, where=_flag(parameter)) for text in texts or ())


def _is_positional(parameter: inspect.Parameter) -> bool:
    """Tell ``autoshard list models`` from ``autoshard plan --model ...``, which has too many options for an order."""
    return parameter.name in ("plan", "rows", "what", "a", "b")


def _label(parameter: inspect.Parameter) -> str:
    return parameter.name.upper() if _is_positional(parameter) else _flag(parameter)


def _refuse_halves(arguments: list[str]) -> None:
    """Refuse halves of characters, which no terminal sends and no file's name has."""
    for argument in arguments:
        try:
            os.fsencode(argument)
        except UnicodeEncodeError:
            raise InputError.of(ascii(argument), "holds half of a character. Type whole ones") from None


def _refuse_unknown(command: str, arguments: list[str], flags: list[str]) -> None:
    """Refuse options that do not exist, abbreviated ones too: what is short for one today may be for two tomorrow."""
    known = ["--help", "--config", *flags]
    given = (argument.partition("=")[0] for argument in arguments if argument.startswith("--") and argument != "--")
    unknown = [
        Fault(where=flag, message=f"unknown option. {nearest(flag, known)} See autoshard {command} --help")
        for flag in given
        if flag not in known
    ]
    if unknown:
        raise InputError(unknown)


def _parser(name: str, command: Callable[..., int]) -> "ArgumentParser":
    """Make the parser of a command: it only splits the line, so that all faults of values are found together."""
    import argparse

    import docstring_parser
    from jsonargparse import ArgumentParser

    about = docstring_parser.parse(command.__doc__ or "")
    parser = ArgumentParser(
        prog=f"autoshard {name}",
        description=about.short_description,
        exit_on_error=False,
        add_help=False,
        formatter_class=argparse.HelpFormatter,
    )
    groups = [docstring_parser.parse(kind.__doc__ or "") for kind in _kinds(command).values() if _is_group(kind)]
    told = (entry for one in (about, *groups) for entry in one.params)
    help_of = {entry.arg_name: " ".join((entry.description or "").split()).replace("%", "%%") for entry in told}
    for parameter in _options(command).values():
        text, default = help_of[parameter.name], parameter.default
        if default not in (None, False, (), inspect.Parameter.empty):
            shown = ",".join(map(str, default)) if parameter.annotation is Counts else default
            text = f"{text} Default: {shown}."
        if parameter.annotation is bool:
            parser.add_argument(_flag(parameter), action="store_true", help=text)
        elif parameter.annotation is SaidOften:
            parser.add_argument(_flag(parameter), dest=parameter.name, action="append", metavar="NAME=VALUE", help=text)
        elif _is_positional(parameter):
            parser.add_argument(parameter.name, metavar=parameter.name.upper(), nargs="?", help=text)
        else:
            parser.add_argument(_flag(parameter), metavar=_metavar(parameter), help=text)
    parser.add_argument("--config", metavar="FILE", help="A YAML or JSON file with any of these options.")
    parser.add_argument("-h", "--help", action="store_true", help="Show this help.")
    return parser


def _choices(parameter: inspect.Parameter) -> list[str]:
    """Return the words that an option takes, if it takes only some; None stands for the default."""
    members = [parameter.annotation, *get_args(parameter.annotation)]
    return [word for member in members if get_origin(member) is Literal for word in get_args(member)]


def _metavar(parameter: inspect.Parameter) -> str:
    choices = _choices(parameter)
    if choices:
        return "{" + ",".join(choices) + "}"
    if parameter.annotation in (int, int | None):
        return "N"
    if parameter.annotation is float:
        return "X"
    if parameter.annotation is Counts:
        return "N[,N...]"
    words = {"out": "PATH", "fix": "KEY=VALUE,...", "at": "CANDIDATE", "fail_if_slower": "PERCENT"}
    return words.get(parameter.name, "NAME_OR_PATH")


def _config(path: str, known: list[str], faults: list[Fault]) -> dict[str, Any]:
    """Read options from a file; what stands on the command line wins over it."""
    from autoshard.spec.files import read_data

    try:
        data = read_data(Path(path))
    except InputError as error:
        raise InputError(Fault(where=f"--config {path}", message=fault.message) for fault in error.faults) from None
    if not isinstance(data, dict):
        raise InputError.of(f"--config {path}", "must hold options, one `name: value` per line")
    options = {str(key).replace("-", "_"): value for key, value in cast(dict[Any, Any], data).items()}
    unknown = [key for key in options if key not in known]
    faults += [Fault(where=f"--config {path}: {key}", message=f"unknown key. {nearest(key, known)}") for key in unknown]
    return {key: value for key, value in options.items() if key in known and value is not None}


def _read(parameter: inspect.Parameter, given: object, where: str, faults: list[Fault]) -> object:
    """Read a value, from the line as text or from a file as what it holds; what is not given has its default."""
    choices, kind = _choices(parameter), parameter.annotation
    text = str(given)
    if given is None:
        fault = "missing" if parameter.default is inspect.Parameter.empty else ""
        fault = f"{fault}; one of {', '.join(choices)}" if fault and choices else fault
        value = parameter.default
    elif kind is bool:
        fault, value = "" if isinstance(given, bool) else f"expected true or false, found {text!r}", given
    elif isinstance(given, dict | list | bool):
        fault, value = "expected a single value", None
    elif choices:
        fault, value = "" if text in choices else f"{text!r} is not one of them. {nearest(text, choices)}", text
    elif kind in (int, int | None, Counts):
        fault, value = _whole(text, several=kind is Counts)
    elif kind is float:
        fault, value = _number(text)
    else:
        fault = "" if text.strip() and "\0" not in text else "must not be empty"
        value = Path(text) if kind in (Path, Path | None) else text
    if fault:
        faults.append(Fault(where=where, message=fault))
    return value


def _whole(text: str, *, several: bool) -> tuple[str, object]:
    """Read a whole number, or several; return what is wrong with it, and the value."""
    if several and re.fullmatch(r"[-+]?[0-9]{1,100}(,[0-9]{1,9})*", text):
        return "", tuple(map(int, text.split(",")))
    if several or not re.fullmatch(r"[-+]?[0-9]{1,100}", text):
        more = ", or several like 4,8,16" if several else ""
        return f"expected a whole number{more}, found {text!r}", None
    return "", int(text)


def _number(text: str) -> tuple[str, object]:
    """Read a number; return what is wrong with it, and the value."""
    if re.fullmatch(r"[-+]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][-+]?[0-9]{1,2})?", text):
        return "", float(text)
    return f"expected a number like 0.001 or 1e-3, found {text!r}", None
