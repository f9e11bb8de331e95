"""The help of a command: its everyday options first, the rest by what they are about, and examples."""

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import docstring_parser

from autoshard.command_line.options import REQUIRED, Option, Paths, group_of, is_group, options_of, word_option
from autoshard.command_line.parsing import COMMON, add_option, metavar_of

_READS = "what it reads"
_WIDTH = 79
_FEW = 12  # options that need no groups


def help_of(name: str, command: Callable[..., int], everyday: Sequence[str] = (), examples: Sequence[str] = ()) -> str:
    """Return the help of a command; the usage of one with many options names the everyday ones only."""
    options = {option.name: option for option in options_of(command)}
    everyday = everyday if len(options) > _FEW else tuple(options)
    summary, about = _documentation(command)
    parser = argparse.ArgumentParser(
        prog=f"autoshard {name}", usage=_usage(name, options, everyday),
        description=textwrap.fill(summary, _WIDTH), add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n  ".join(("examples:", *examples)) if examples else None,
    )  # fmt: skip
    sections = {key: _READS for key, option in options.items() if option.is_positional}
    sections |= {key: "options" for key in everyday if key not in sections}
    sections |= {key: title for key, title in _titles(command) if key not in sections}
    titles = dict.fromkeys([_READS, *sections.values()])
    groups = {title: parser.add_argument_group(title) for title in titles}
    if word_option(options):
        text = "As --model; or a recipe: a .yaml file, or a name of `autoshard list recipes`."
        groups[_READS].add_argument("word", nargs="?", metavar="MODEL", help=text)
    for key in sections:
        option = options[key]
        add_option(groups[sections[key]], option, _about(option, about))
    last = parser.add_argument_group("of every command")
    for flag, text in COMMON.items():
        if flag in {option.flag for option in options.values()}:
            continue
        last.add_argument(flag, metavar="FILE", help=text)
    last.add_argument("-h", "--help", action="store_true", help="Show this help.")
    return parser.format_help()


def _about(option: Option, about: Mapping[str, str]) -> str:
    text, default = about.get(option.name, ""), option.default
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    shown = f"{default:g}" if isinstance(default, float) else str(default).lower() if default is True else shown
    stated = default not in (None, "", (), REQUIRED) and default is not False and not option.repeats
    stated = stated and "Default:" not in text
    return f"{text} Default: {shown}." if stated else text


def _usage(name: str, options: Mapping[str, Option], everyday: Sequence[str]) -> str:
    """Return the line of a command with its everyday options.

    The parser of the standard library would name all of them.
    """
    words = ["[MODEL]"] if word_option(options) else []
    for option in options.values():
        if option.is_positional:
            many = f"{option.label} ..." if option.kind == Paths else option.label
            words.append(many if option.default is REQUIRED else f"[{many}]")
    for key in everyday:
        option = options[key]
        if not option.is_positional and option is not word_option(options):
            value = f" {metavar_of(option)}" if option.kind is not bool else ""
            words.append(f"{option.flag}{value}" if option.default is REQUIRED else f"[{option.flag}{value}]")
    words += ["[more options]"] if len(everyday) < len(options) else []
    start, lines = f"autoshard {name}", [""]
    for word in words:
        if len(f"usage: {start}{lines[-1]} {word}") > _WIDTH:
            lines.append("")
        lines[-1] += f" {word}"
    return f"\n{' ' * len(f'usage: {start}')}".join([f"{start}{lines[0]}", *lines[1:]]).replace("%", "%%")


def _titles(command: Callable[..., int]) -> Iterator[tuple[str, str]]:
    """Yield every option with the title of its group: the parameter or the section whose dataclass it stands in."""
    kinds = get_type_hints(command)
    for name in inspect.signature(command).parameters:
        group = group_of(kinds[name])
        if group is None:
            yield name, "more options"
            continue
        for key, part in get_type_hints(group).items():
            if is_group(part):
                yield from ((f"{key}.{inner}", f"{key} options") for inner in get_type_hints(part))
            else:
                yield key, f"{_words_of(group)} options"


def _words_of(group: type) -> str:
    """Return the name of a dataclass as words.

    >>> from autoshard.spec.recipe import QuestionOptions
    >>> _words_of(QuestionOptions)
    'question'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", group.__name__.removesuffix("Options")).lower()


def _documentation(source: Any, before: str = "") -> tuple[str, dict[str, str]]:
    """Return the summary of a command, and what is said of each of its options."""
    parsed = docstring_parser.parse(source.__doc__ or "")
    about = {
        before + parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in parsed.params
    }
    about = {name: text.replace("%", "%%") for name, text in about.items()}
    for name, kind in get_type_hints(source).items():
        if group := group_of(kind):
            about |= _documentation(group, f"{before}{name}." if is_group(source) else "")[1]
    return parsed.short_description or "", about
