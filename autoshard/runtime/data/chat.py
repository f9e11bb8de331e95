"""Conversations as one text: a chat template writes it, and marks which of it the assistant said."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoshard.errors import InputError, require

Message = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OPENS, _CLOSES = "\ue0f0", "\ue0f1"  # of a private range: no text of people holds them


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A text, and the ranges of its characters that are answers."""

    text: str
    ranges: tuple[tuple[int, int], ...]

    def answers(self) -> list[bool]:
        """Return which characters are answers."""
        found = [False] * len(self.text)
        for begin, end in self.ranges:
            found[begin:end] = [True] * (end - begin)
        return found


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template in Jinja, as models carry it, in a sandbox: it comes from strangers."""

    source: str
    special: Mapping[str, str] = field(default_factory=dict[str, str])

    def marked(self, messages: Sequence[Message]) -> Marked:
        """Write a conversation, and find the answers in it.

        A template may mark them itself, by ``{% generation %}``. Else an answer is what its message adds to all
        messages before it and the prompt for an answer, which holds for templates that never rewrite earlier turns.
        """
        whole = self._written(messages)
        ranges: list[tuple[int, int]] = []
        if "endgeneration" in self.source:
            parts = whole.replace(_CLOSES, _OPENS).split(_OPENS)
            for number in range(1, len(parts), 2):
                begin = sum(map(len, parts[:number]))
                ranges.append((begin, begin + len(parts[number])))
            return Marked(text="".join(parts), ranges=tuple(ranges))
        rewrites = (
            "writes earlier turns otherwise when later ones follow, so that answers cannot be told from the "
            "rest. Give one with --chat-template that marks them by {% generation %} ... {% endgeneration %}"
        )
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._written(messages[:number], add_generation_prompt=True)
                after = self._written(messages[: number + 1])
                require((after.startswith(before) and whole.startswith(after), "the chat template", rewrites))
                ranges.append((len(before), len(after)))
        return Marked(text=whole, ranges=tuple(ranges))

    def _written(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **self.special
            )
        except (TemplateError, TypeError) as error:
            raise InputError.of("the chat template", f"refuses a conversation: {error}") from None

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError, TemplateSyntaxError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """The tag of templates that mark what the assistant says."""

            tags = {"generation"}  # noqa: RUF012 (the library wants a set here, and changes none)

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
                opens, closes = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_OPENS, _CLOSES))
                return [opens, *body, closes]

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], keep_trailing_newline=False
        )
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise InputError.of("the chat template", f"is not Jinja: {error}") from None


def messages_of(value: object, where: str) -> Sequence[Message]:
    """Check the messages of a record."""
    if not isinstance(value, list) or not value:
        raise InputError.of(where, 'expected a list of {"role": ..., "content": ...}, and at least one')
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError.of(f"{where}[{number}]", 'expected {"role": ..., "content": ...}')
        content = message.get("content")
        if not isinstance(content, str):
            raise InputError.of(f"{where}[{number}].content", "expected text; only conversations in words can be read")
        private = _OPENS in content or _CLOSES in content
        require((not private, f"{where}[{number}].content", "holds the private characters U+E0F0 or U+E0F1"))
    return value
