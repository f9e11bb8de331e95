"""What is made when the site is built: the pages of commands, of the keys of recipes and of plan.json, and of Python.

MkDocs calls ``on_page_markdown``; what is made stands under what is written.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docstring_parser
from mkdocs.structure.pages import Page

import autoshard
from autoshard.cli import main
from autoshard.commands import COMMANDS
from autoshard.errors import InputError, NoPlan
from autoshard.search.ask.answers import Answer, PlanResult
from autoshard.spec.recipe import QuestionOptions
from autoshard.spec.training import Training

_PACKAGE = Path(autoshard.__file__).parent
_PLANS, _ROWS = _PACKAGE / "plan" / "plan.schema.json", _PACKAGE / "calibration" / "row.schema.json"
_COLUMNS = "96"
_TYPED = "| key | type | meaning |\n| --- | --- | --- |\n"
_HEAD = "| key | meaning |\n| --- | --- |\n"


def commands() -> str:
    """Return the help of every command."""
    text = ""
    for name, summary in COMMANDS.items():
        text += f"\n## {name}\n\n{summary[:1].upper()}{summary[1:]}.\n\n```text\n{_help_of(name)}\n```\n"
    return text


def _help_of(command: str) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main([command, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    assert code == 0, f"autoshard {command} --help ended with {code}"
    return printed.getvalue().strip()


def recipe_keys() -> str:
    """Return every key of a recipe, with what it means and its default."""
    text = "## What to plan\n\n" + _HEAD + _row("nodes", "How many nodes of the cluster. Default: 1.")
    text += "".join(_row(key, meaning) for key, meaning, _ in _fields(QuestionOptions))
    text += "\n## What to train\n\n" + _HEAD
    sections: list[tuple[str, str, Any]] = []
    for key, meaning, default in _fields(Training):
        if dataclasses.is_dataclass(default):
            sections.append((key, meaning, default))
        else:
            text += _row(key, meaning + _default(meaning, default))
    for key, meaning, section in sections:
        text += f"\n### {key}\n\n{meaning}\n\n{_HEAD}"
        text += "".join(
            _row(f"{key}.{name}", means + _default(means, default)) for name, means, default in _fields(type(section))
        )
    return text


def _fields(cls: type) -> Iterator[tuple[str, str, Any]]:
    """The fields of a record: name, meaning and default."""
    meanings = {entry.arg_name: entry.description or "" for entry in docstring_parser.parse(cls.__doc__ or "").params}
    for field in dataclasses.fields(cls):
        factory = field.default_factory
        default = factory() if callable(factory) else field.default
        yield field.name, " ".join(meanings[field.name].split()), default


def _row(key: str, meaning: str) -> str:
    return f"| `{key}` | {_cell(meaning)} |\n"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def _default(meaning: str, default: Any) -> str:
    return "" if "Default:" in meaning or default in (None, {}) else f" Default: `{json.dumps(default)}`."


def plan_keys() -> str:
    """Return every key of a plan file, as its schema has them."""
    records = json.loads(_PLANS.read_text(encoding="utf-8"))["$defs"]
    parts = (
        f"### {name}\n\n{_cell(record.get('description', ''))}\n\n{_keys(record)}" for name, record in records.items()
    )
    return "## Keys of plan.json\n\n" + "\n".join(parts)


def row_keys() -> str:
    """Return every field of a measured row, as its schema has them."""
    return "## Fields\n\n" + _keys(json.loads(_ROWS.read_text(encoding="utf-8"))["$defs"]["MeasuredRow"])


def _keys(record: dict[str, Any]) -> str:
    rows = (
        (key, stated, " ".join(stated.get("description", "").split())) for key, stated in record["properties"].items()
    )
    return _TYPED + "".join(f"| `{key}` | {_type(stated)} | {_cell(meaning)} |\n" for key, stated, meaning in rows)


def _type(stated: dict[str, Any]) -> str:
    """The type that a schema states, in words."""
    if "$ref" in stated:
        name = stated["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in stated:
        return " or ".join(_type(one) for one in stated["anyOf"])
    if "enum" in stated:
        return ", ".join(f"`{json.dumps(value)}`" for value in stated["enum"])
    if stated.get("type") == "array":
        return f"list of {_type(stated['items'])}" if isinstance(stated.get("items"), dict) else "list"
    if stated.get("type") == "object":
        inner = stated.get("additionalProperties")
        return f"object of {_type(inner)}" if isinstance(inner, dict) and inner else "object"
    names = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "null": "null",
    }
    return names.get(stated.get("type", ""), "any value")


def python() -> str:
    """Return what the package offers to Python, from docstrings."""
    text = ""
    for name in sorted(set(autoshard.__all__) - {"__version__"}):
        function = getattr(autoshard, name)
        text += f"\n## autoshard.{name}\n\n{_signature(name, function)}{_docstring(function)}"
    for cls in (PlanResult, Answer, InputError, NoPlan):
        text += f"\n## {cls.__name__}\n\n{_docstring(cls)}"
        for name, member in vars(cls).items():
            if (
                not name.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, property))
                and member.__doc__
            ):
                brackets = "" if isinstance(member, property) else "()"
                text += f"\n**`{name}{brackets}`**\n\n{_docstring(member)}"
    return text


def _signature(name: str, function: Callable[..., Any]) -> str:
    parameters: list[str] = []
    all_by_position = True
    for parameter in inspect.signature(function).parameters.values():
        if all_by_position and parameter.kind is parameter.KEYWORD_ONLY:
            parameters.append("*")
        all_by_position &= parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", str(parameter))  # of types the names alone
        parameters.append(re.sub(r"<function .*>", "...", text.replace("typing.", "").replace("collections.abc.", "")))
    return "```text\n" + f"autoshard.{name}(\n" + "".join(f"    {line},\n" for line in parameters) + ")\n```\n\n"


def _docstring(thing: Any) -> str:
    parsed = docstring_parser.parse(inspect.getdoc(thing) or "")
    prose, _, examples = "\n\n".join(filter(None, (parsed.short_description, parsed.long_description))).partition(
        ">>> "
    )
    text = f"{_cell(prose).strip()}\n\n"
    if parsed.params:
        text += "| argument | meaning |\n| --- | --- |\n"
        text += "".join(
            _row(entry.arg_name, " ".join((entry.description or "").partition(">>>")[0].split()))
            for entry in parsed.params
        )
    for part in (parsed.returns, *parsed.raises):
        if part and part.description:
            text += f"\n{_cell(' '.join(part.description.split()))}\n"
    last = parsed.params[-1].description or "" if parsed.params else ""
    examples = examples or last.partition(">>> ")[2]
    return text + (f"\n```python\n>>> {examples.strip()}\n```\n" if examples else "")


MADE: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands,
    "reference/recipe-keys.md": recipe_keys,
    "reference/plan-json.md": plan_keys,
    "reference/python.md": python,
    "reference/rows.md": row_keys,
}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put what is made under what is written; a number stays on the line of its per cent."""
    made = MADE.get(page.file.src_uri)
    text = f"{markdown.rstrip()}\n\n{made()}" if made else markdown
    return re.sub(r"(?<=\d) (?=%)", "\N{NO-BREAK SPACE}", text)
