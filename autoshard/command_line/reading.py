"""Command lines and files of options become the arguments of a function.

jsonargparse splits the line and checks every value against the type of its parameter. This module adds recipes in the
place of plans, a model without its option, the right name of what is misspelled, and that all faults come at once.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from jsonargparse import ArgumentError

from autoshard.command_line.entries import Entries, entries_of
from autoshard.command_line.options import (
    Counts,
    Option,
    PlanOrRecipe,
    Stated,
    built,
    flat_fields,
    is_group,
    is_recipe,
    options_of,
)
from autoshard.command_line.parsing import COMMON, WORD, dest_of, names_options, parser_of
from autoshard.command_line.suggesting import suggestion
from autoshard.command_line.values import MISSING, pairs_of, value_of
from autoshard.errors import Fault, InputError, inside, nearest
from autoshard.spec.files import named_file, shipped_files
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.recipe import RECIPES, Pins

_FLAG = re.compile(r"--?[A-Za-z]")
_BELOW_ZERO = re.compile(r"-\.?[0-9]")  # as in -2T, which the parser would take for an option


def read_options(
    name: str, command: Callable[..., int], arguments: Sequence[str], examples: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of a command's parameters; where one is missing, the first of the examples shows what to type.

    A parameter whose type is a dataclass stands for its fields: each is an option. Options come from the line, from the
    file after --config, and from a recipe in the place of a plan, in this order.
    """
    options = {option.name: option for option in options_of(command)}
    line = _split(name, options, arguments)
    faults = list[Fault]()
    stated: Entries = {}
    for where, path in _option_files(options, line):
        stated |= entries_of(where, path, options, faults)
    _load_extensions(line["extend"] or (), *stated.pop("extend", ("", ())))
    for key, option in options.items():
        raw = line[dest_of(option)]
        if raw not in (None, False, []):
            typed = pairs_of(option, raw, faults) if option.repeats else raw
            in_file = stated[key][1] if option.kind == Mapping[str, str] and key in stated else None
            stated[key] = (option.label, {**in_file, **typed} if isinstance(in_file, dict) else typed)
    values = {key: value_of(option, stated.get(key), faults) for key, option in options.items()}
    if faults:
        raise InputError(_with_example(faults, examples))
    return _arguments(command, options, values, stated)


def _with_example(faults: Sequence[Fault], examples: Sequence[str]) -> list[Fault]:
    """Return faults, of which the last that says no more than that something is missing shows a whole line."""
    missing = [place for place, fault in enumerate(faults) if fault.message == MISSING]
    shown = list(faults)
    if missing and examples:
        shown[missing[-1]] = replace(faults[missing[-1]], message=f"{MISSING}. For example: {examples[0]}")
    return shown


def _split(name: str, options: Mapping[str, Option], arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the line says of each option, as text."""
    arguments = _with_numbers(options, arguments)
    more, short = f"See autoshard {name} --help", ["-h", *(["-v"] if "verbose" in options else [])]
    known = [*short, "--help", *COMMON, *(option.flag for option in options.values() if not option.is_positional)]
    flags = (argument.partition("=")[0] for argument in arguments if _FLAG.match(argument))
    faults = [
        Fault(where=flag, message=" ".join(f"unknown option. {suggestion(flag, known)} {more}".split()))
        for flag in flags
        if flag not in known  # the parser would take abbreviations, and name only the first that it does not know
    ]
    faults += _typed_twice(options, arguments)
    no_values = (flag for flag, _, value in (argument.partition("=") for argument in arguments) if value == "--")
    faults += (Fault(where=flag, message="a value is missing, not --") for flag in no_values if _FLAG.match(flag))
    if faults:
        raise InputError(faults)
    try:
        return dict(vars(parser_of(name, options).parse_args(arguments)))
    except ArgumentError as error:
        raise InputError.of("", f"{_in_our_words(str(error), arguments)}. See autoshard {name} --help") from None


def _typed_twice(options: Mapping[str, Option], arguments: Sequence[str]) -> Iterator[Fault]:
    """Yield the options with a value that a line has twice, of which the parser would keep the last."""
    valued = (option for option in options.values() if option.kind is not bool or option.may_have_word)
    single = {option.flag: option for option in valued if not option.repeats}
    flags = [argument.partition("=")[0] for argument in arguments]
    for flag in (*single, *(["--config"] if names_options(options) else [])):
        if flags.count(flag) > 1:
            joined = flag in single and single[flag].kind in (Pins, Counts)
            remedy = "Join its values by commas" if joined else "Keep one"
            yield Fault(where=flag, message=f"is typed {flags.count(flag)} times. {remedy}")


def _with_numbers(options: Mapping[str, Option], arguments: Sequence[str]) -> list[str]:
    """Return the words of a line, where a number below zero is part of the word of its option.

    An option that may have a word takes only one of its own words: in ``--prove llama3-8b`` it has none.
    """
    flags = {option.flag for option in options.values() if option.kind is not bool and not option.is_positional}
    may_have = {option.flag: option.words for option in options.values() if option.may_have_word}
    words = list[str]()
    for argument in arguments:
        if words and words[-1] in may_have:
            flag = words.pop()
            is_word = argument in may_have[flag]
            words += [f"{flag}={argument}"] if is_word else [f"{flag}=true", argument]
        elif words and words[-1] in flags and _BELOW_ZERO.match(argument):
            words[-1] += f"={argument}"
        else:
            words.append(argument)
    return words


def _in_our_words(message: str, arguments: Sequence[str] = ()) -> str:
    """Return a fault of the parser as our other faults are said; of a word too many, by what stands before it.

    >>> _in_our_words("argument --model: expected one argument"), _in_our_words("unrecognized arguments: pp=8")
    ('--model: a value is missing', 'pp=8: belongs to no option. Values of one option are joined by commas: tp=8,pp=2')
    >>> _in_our_words("unrecognized arguments: days", ["llama3-8b", "--deadline", "30", "days"])
    'days: belongs to no option. --deadline has 30 alone: write values without spaces, several with commas'
    """
    text = message.removeprefix("argument ").replace("expected one argument", "a value is missing")
    extra = text.removeprefix("unrecognized arguments: ").removeprefix("Unrecognized arguments: ")
    if extra == text:
        return text
    if "=" in extra:
        return f"{extra}: belongs to no option. Values of one option are joined by commas: tp=8,pp=2"
    values = zip(arguments, arguments[1:], arguments[2:], strict=False)
    cut = next((pair for *pair, word in values if word == extra.split()[0] and _FLAG.match(pair[0])), None)
    if cut:
        alone = f"{cut[0]} has {cut[1]} alone: write values without spaces, several with commas"
        return f"{extra}: belongs to no option. {alone}"
    one = "" if extra.startswith("-") else ". One line takes one of these; type a line for each"
    return f"{extra}: belongs to no option{one}"


def _option_files(options: Mapping[str, Option], line: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files of options that a line names, with how faults name them.

    They stand in the place of a plan or of a model, or after --config. A name of ours becomes its path in the line.
    """
    for key, option in options.items():
        if option.kind is PlanOrRecipe and line[key] is not None:
            _refuse_model(line[key])
            line[key] = str(named_file(Path(line[key]), RECIPES))
            if is_recipe(line[key]):
                yield line[key], line[key]
    word = line.get(WORD)
    if word is not None and (is_recipe(word) or (word in shipped_files(RECIPES) and word not in model_names())):
        yield word, str(named_file(Path(word), RECIPES))
    elif word is not None:
        if line["model"] is not None:
            raise InputError.of("--model", f"is typed twice: {word} and {line['model']}")
        line["model"] = word
    if names_options(options) and line["config"]:
        with inside("--config"):
            yield f"--config {line['config']}", str(named_file(Path(line["config"]), RECIPES))


def _refuse_model(typed: str) -> None:
    """Refuse the name of a model in the place of a plan or a recipe."""
    recipes = shipped_files(RECIPES)
    if typed in model_names() and typed not in recipes and not Path(typed).exists():
        first = f"is a model, not a plan or a recipe. To plan it, type: autoshard plan {typed}"
        raise InputError.of(typed, f"{first}. Or name a recipe. {nearest(typed, list(recipes), 'recipes')}")


def _arguments(
    command: Callable[..., int], options: Mapping[str, Option], values: Mapping[str, Any], entries: Entries
) -> dict[str, Any]:
    """Return the arguments of a command: values, dataclasses made of values, and the stated options of dataclasses."""
    origins = {key: entries[key][0] if key in entries else option.label for key, option in options.items()}

    def argument(name: str, kind: Any) -> object:
        if get_origin(kind) is Stated:
            group = get_args(kind)[0]
            stated = {key: values[key] for key in flat_fields(group()) if key in entries}
            return Stated(kind=group, values=stated, origins=origins)
        return built(kind, "", values, origins) if is_group(kind) else values[name]

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
