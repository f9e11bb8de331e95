"""From the words of a command line, and a file of options, to the arguments of a function; all faults at once."""

import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NewType, cast, get_args, get_origin, get_type_hints

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
Weights = Mapping[str, float]  # names, each with a number
Configs = Sequence[tuple[str, Mapping[str, object]]]  # files by their names, with their options
PlanOrRecipe = NewType("PlanOrRecipe", Path)  # a recipe is a file of options as well

_POSITIONAL = (
    "plan",
    "rows",
    "source",
    "target",
    "what",
    "a",
    "b",
)  # `list models`, unlike `plan --model ...`


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A parameter of a command, or a field of a dataclass that is one: ``schedule.shape``."""

    name: str
    kind: Any
    default: object
    help: str

    @property
    def is_positional(self) -> bool:
        """Whether it is given without its name: what must be given is."""
        return self.name in _POSITIONAL and self.default is inspect.Parameter.empty

    @property
    def repeats(self) -> bool:
        """Whether it may be given several times, as NAME=VALUE."""
        return self.kind in (SaidOften, Weights)

    @property
    def flag(self) -> str:
        """How it is typed; what may be given several times is named in the singular."""
        name = self.name.removesuffix("s") if self.repeats else self.name
        return f"--{name.replace('_', '-')}"

    @property
    def dest(self) -> str:
        """How the parser knows it: of names with dots, which it takes apart, it forgets all values but the last."""
        return self.name.replace(".", "/")

    @property
    def label(self) -> str:
        """How faults name it."""
        return self.name.upper() if self.is_positional else self.flag


def read_options(name: str, command: Callable[..., int], arguments: list[str]) -> dict[str, Any] | None:
    """Return the values of a command's parameters; None after printing its help.

    A parameter whose type is a dataclass stands for its fields: each is an option. Options come from the line, from the
    file after --config, and from a recipe in the place of a plan, in this order.
    """
    from jsonargparse import ArgumentError

    options = {option.name: option for option in _options(command)}
    _refuse_halves(arguments)
    _refuse_unknown(name, arguments, [option.flag for option in options.values() if not option.is_positional])
    parser = _parser(name, command, options.values())
    try:
        given = parser.parse_args(arguments).as_dict()
    except ArgumentError as error:
        raise InputError.of("", f"{error}. See autoshard {name} --help") from None
    texts = {dest.replace("/", "."): text for dest, text in given.items()}
    if texts["help"]:
        parser.print_help()
        return None
    faults: list[Fault] = []
    files = [(f"--config {texts['config']}", texts["config"])] if texts["config"] is not None else []
    files += [(texts[key], texts[key]) for key, one in options.items() if _is_recipe(one, texts[key])]
    configs = [(where, _config(where, path, options, faults)) for where, path in files]
    values = {key: _merged(option, texts[key], configs, faults) for key, option in options.items()}
    if faults:
        raise InputError(faults)
    typed = {key for key, text in texts.items() if text not in (None, False)}
    found = {key: f"{file}: {key}" for file, config in reversed(configs) for key in config if key not in typed}
    places = {key: found.get(key, option.label) for key, option in options.items()}
    return {name: _value(kind, name, values, places) for name, kind in _kinds(command).items()}


def _is_recipe(option: Option, text: object) -> bool:
    return option.kind is PlanOrRecipe and str(text).endswith((".yaml", ".yml"))


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)  # not a dataclass's value


def _kinds(command: Callable[..., int]) -> dict[str, Any]:
    """Return the types of a command's parameters."""
    return {name: parameter.annotation for name, parameter in inspect.signature(command).parameters.items()}


def _options(source: Any, before: str = "") -> Iterator[Option]:
    """Yield a command's options, or those of a dataclass; dataclasses inside a dataclass put their name before."""
    import docstring_parser

    about = docstring_parser.parse(source.__doc__ or "")
    help_of = {entry.arg_name: " ".join((entry.description or "").split()).replace("%", "%%") for entry in about.params}
    types = get_type_hints(source)
    for name, parameter in inspect.signature(source).parameters.items():
        kind = types[name]
        if _is_group(kind):
            yield from _options(kind, f"{before}{name}." if _is_group(source) else "")
        else:
            yield Option(name=before + name, kind=kind, default=parameter.default, help=help_of[name])


def _value(kind: Any, name: str, values: Mapping[str, object], places: Mapping[str, str]) -> object:
    """Return the value of a parameter; that of a dataclass is made of those of its fields, whose faults it places."""
    if not _is_group(kind):
        return values[name]

    def built(group: Any, before: str) -> object:
        fields: dict[str, object] = {}
        for key, annotation in get_type_hints(group).items():
            fields[key] = built(annotation, f"{before}{key}.") if _is_group(annotation) else values[before + key]
        try:
            return group(**fields)
        except InputError as error:
            raise InputError(_placed(fault, before, places) for fault in error.faults) from None

    return built(kind, "")


def _placed(fault: Fault, before: str, places: Mapping[str, str]) -> Fault:
    """Say which option, or which key of which file, a fault of a dataclass is about."""
    key = before + fault.where
    name = next((name for name in places if key == name or key.startswith((f"{name}.", f"{name}["))), None)
    return Fault(where=places[name] if name else fault.where, message=fault.message)


def _merged(option: Option, text: Any, configs: Configs, faults: list[Fault]) -> object:
    """Return an option's value: from the line, else from the first file that has it, else its default."""
    if option.repeats:
        typed = tuple(Said(text=one, where=option.flag) for one in text or ())
        files = [tuple(_listed(config.get(option.name), file, option, faults)) for file, config in configs]
        if option.kind == SaidOften:  # what is typed comes last, and goes before what a file says of the same name
            return (*itertools.chain(*reversed(files)), *typed)
        return _weights(next((said for said in (typed, *files) if said), ()), faults)
    if text not in (None, False):
        return _read(option, text, option.label, faults)
    file, found = next(((file, config) for file, config in configs if option.name in config), ("", {}))
    where = f"{file}: {option.name}" if file else option.label
    return _read(option, found.get(option.name), where, faults)


def _listed(given: object, file: str, option: Option, faults: list[Fault]) -> Iterator[Said]:
    """Read what a file maps names to."""
    where = f"{file}: {option.name}"
    if given is None:
        return
    if not isinstance(given, dict):
        faults.append(Fault(where=where, message="must map names to values, one `name: value` per line"))
        return
    for name, value in cast(dict[Any, Any], given).items():
        number = isinstance(value, int | float) and option.kind == Weights and not isinstance(value, bool)
        if isinstance(value, str) or number:
            yield Said(text=f"{name}={value}", where=where)
        else:
            faults.append(Fault(where=f"{where}.{name}", message=f"must be text. Put {value!r} in quotes"))


def _weights(said: SaidOften, faults: list[Fault]) -> Weights:
    """Read NAME=NUMBER; a name alone weighs 1, and of one that is given twice the last counts."""
    found: dict[str, float] = {}
    for one in said:
        name, equals, text = one.text.rpartition("=")
        fault, number = _number(text) if equals else ("", 1.0)
        if fault:
            faults.append(Fault(where=one.where, message=f"{one.text}: {fault}"))
        else:
            found[name if equals else one.text] = float(cast(float, number))
    return found


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


def _parser(name: str, command: Callable[..., int], options: Iterable[Option]) -> "ArgumentParser":
    """Make the parser of a command: it only splits the line, so that all faults of values are found together."""
    import argparse

    import docstring_parser
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=f"autoshard {name}",
        description=docstring_parser.parse(command.__doc__ or "").short_description,
        exit_on_error=False,
        add_help=False,
        formatter_class=argparse.HelpFormatter,
    )
    for option in options:
        text, default = option.help, option.default
        if isinstance(default, tuple):
            default = ",".join(map(str, cast(tuple[object, ...], default)))
        if default not in (None, False, "", inspect.Parameter.empty) and not option.repeats:
            text = f"{text} Default: {default}."
        if option.kind is bool:
            parser.add_argument(option.flag, dest=option.dest, action="store_true", help=text)
        elif option.repeats:
            parser.add_argument(option.flag, dest=option.dest, action="append", metavar="NAME=VALUE", help=text)
        elif option.is_positional:
            parser.add_argument(option.name, metavar=option.name.upper(), nargs="?", help=text)
        else:
            parser.add_argument(option.flag, dest=option.dest, metavar=_metavar(option), help=text)
    parser.add_argument("--config", metavar="FILE", help="A YAML or JSON file with any of these options.")
    parser.add_argument("-h", "--help", action="store_true", help="Show this help.")
    return parser


def _choices(option: Option) -> list[str]:
    """Return the words that an option takes, if it takes only some; None stands for the default."""
    members = [option.kind, *get_args(option.kind)]
    return [word for member in members if get_origin(member) is Literal for word in get_args(member)]


def _metavar(option: Option) -> str:
    choices = _choices(option)
    if choices:
        return "{" + ",".join(choices) + "}"
    if option.kind in (int, int | None):
        return "N"
    if option.kind in (float, float | None):
        return "X"
    if option.kind == Counts:
        return "N[,N...]"
    words = {
        "out": "PATH",
        "fix": "KEY=VALUE,...",
        "at": "CANDIDATE",
        "fail_if_slower": "PERCENT",
        "resume": "WHERE",
        "setup": "LINE",
    }
    return words.get(option.name, "NAME_OR_PATH")


def _config(where: str, path: str, options: Mapping[str, Option], faults: list[Fault]) -> dict[str, Any]:
    """Read options from a file; what a recipe says for other commands is checked too."""
    from autoshard.spec.files import read_data
    from autoshard.spec.recipe import RECIPE_KEYS, training_faults

    try:
        data = read_data(Path(path))
    except InputError as error:
        raise InputError(Fault(where=where, message=fault.message) for fault in error.faults) from None
    if not isinstance(data, dict):
        raise InputError.of(where, "must hold options, one `name: value` per line")
    found: dict[str, Any] = {}
    elsewhere: dict[str, object] = {}

    def take(entries: dict[Any, Any], before: str) -> None:
        known = [name.removeprefix(before).partition(".")[0] for name in options if name.startswith(before)]
        for given, value in entries.items():
            key = str(given).replace("-", "_")
            name = before + key
            inside = _inside(options, name)
            if inside and isinstance(value, dict):
                take(cast(dict[Any, Any], value), f"{name}.")
            elif inside and value is not None:
                message = f"must hold keys, each on a line of its own: {', '.join(inside)}"
                faults.append(Fault(where=f"{where}: {name}", message=message))
            elif name in options or inside:
                found.update({name: value} if value is not None else {})
            elif not before and key in RECIPE_KEYS:
                elsewhere[key] = value
            else:
                names = dict.fromkeys([*known, *(() if before else RECIPE_KEYS)])
                faults.append(Fault(where=f"{where}: {name}", message=f"unknown key. {nearest(key, list(names))}"))

    take(cast(dict[Any, Any], data), "")
    faults += (Fault(where=f"{where}: {fault.where}", message=fault.message) for fault in training_faults(elsewhere))
    return found


def _inside(options: Mapping[str, Option], name: str) -> list[str]:
    """Return the keys of a section, such as schedule; none if that is an option, or no name at all."""
    rest = [one.removeprefix(f"{name}.") for one in options if one.startswith(f"{name}.")]
    return list(dict.fromkeys(one.partition(".")[0] for one in rest))


def _read(option: Option, given: object, where: str, faults: list[Fault]) -> object:
    """Read a value, from the line as text or from a file as what it holds; what is not given has its default."""
    choices, kind = _choices(option), option.kind
    text = str(given)
    if given is None:
        fault = "missing" if option.default is inspect.Parameter.empty else ""
        fault = f"{fault}; one of {', '.join(choices)}" if fault and choices else fault
        value = option.default
    elif kind is bool:
        fault, value = "" if isinstance(given, bool) else f"expected true or false, found {text!r}", given
    elif isinstance(given, dict | list | bool):
        fault, value = "expected a single value", None
    elif choices:
        fault, value = "" if text in choices else f"{text!r} is not one of them. {nearest(text, choices)}", text
    elif kind in (int, int | None, Counts):
        fault, value = _whole(text, several=kind == Counts)
    elif kind in (float, float | None):
        fault, value = _number(text)
    else:
        fault = "" if text.strip() and "\0" not in text else "must not be empty"
        value = Path(text) if kind in (Path, Path | None, PlanOrRecipe) else text
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
