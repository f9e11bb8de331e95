"""The parser that splits a command's line into options."""

import argparse
from collections.abc import Mapping
from typing import get_args

from jsonargparse import ArgumentParser

from autoshard.command_line.options import Option, Paths, word_option
from autoshard.command_line.values import EXPECTED

WORD = "word"  # where the parser puts a model that is typed without --model
COMMON = {
    "--config": "A YAML or JSON file with any of these options.",
    "--extend": "A Python file with Rules, cost terms or schedules of your own; may be given several times.",
}


def parser_of(name: str, options: Mapping[str, Option]) -> ArgumentParser:
    """Return the parser of a command's line."""
    parser = ArgumentParser(prog=f"autoshard {name}", exit_on_error=False, add_help=False)
    for option in options.values():
        add_option(parser, option, "")
    if word_option(options):
        parser.add_argument(WORD, nargs="?")
    if names_options(options):
        parser.add_argument("--config")
    parser.add_argument("--extend", action="append")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def names_options(options: Mapping[str, Option]) -> bool:
    """Say whether --config names a file of options; a command may have an option of this name that is another."""
    return "config" not in options


def dest_of(option: Option) -> str:
    """Return where the parser puts an option: of names with dots it forgets all values but the last."""
    return option.name.replace(".", "/")


def add_option(parser: "argparse._ActionsContainer", option: Option, text: str) -> None:
    """Add an option to a parser, or to a group of its help."""
    if option.kind is bool and not option.may_have_word:
        short = ("-v",) if option.name == "verbose" else ()
        parser.add_argument(*short, option.flag, dest=dest_of(option), action="store_true", help=text)
    elif option.may_have_word:
        more = {"nargs": "?", "const": True, "metavar": metavar_of(option)}
        parser.add_argument(option.flag, dest=dest_of(option), help=text, **more)
    elif option.repeats:
        parser.add_argument(option.flag, dest=dest_of(option), action="append", metavar="NAME=VALUE", help=text)
    elif option.is_positional:
        many = "*" if option.kind == Paths else "?"
        parser.add_argument(option.name, metavar=option.label, nargs=many, help=text)
    else:
        parser.add_argument(option.flag, dest=dest_of(option), metavar=metavar_of(option), help=text)


def metavar_of(option: Option) -> str:
    """Return how the help names the value of an option."""
    if option.repeats:
        return "NAME=VALUE"
    if option.may_have_word:
        return "|".join(option.words)
    words = (*option.words, "N") if int in get_args(option.kind) and option.words else option.words
    return "{" + ",".join(words) + "}" if words else EXPECTED.get(option.kind, ("TEXT",))[0]
