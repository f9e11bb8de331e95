"""HTML and SVG as values: elements, tables, and figures that name their place in the JSON answer."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Union

_EMPTY = ("br", "meta", "input", "rect", "path", "line", "circle", "use")  # elements that hold nothing
_URL = re.compile(r"https?://[^\s\"'<>()]+[^\s\"'<>().,;:]")


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is HTML already."""

    text: str


Content = Union[Markup, str, None, Iterable["Content"]]  # noqa: UP007 (a string has no |)


def tag(name: str, /, *content: Content, **attributes: object) -> Markup:
    """Return an element; ``class_`` is the attribute class, ``data_tip`` is data-tip, and None leaves one out.

    >>> tag("td", "a < b", class_="number", data_tip=None).text
    '<td class="number">a &lt; b</td>'
    """
    texts = [f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"' for key, value in attributes.items()
             if value is not None and value is not False]  # fmt: skip
    inner = "".join(_texts(content))
    if name in _EMPTY and not inner:
        return Markup(f"<{name}{''.join(texts)}/>")
    return Markup(f"<{name}{''.join(texts)}>{inner}</{name}>")


def _attribute(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is True else escape(str(value))


def _texts(content: Iterable[Content]) -> Iterator[str]:
    for one in content:
        if isinstance(one, Markup):
            yield one.text
        elif isinstance(one, str):
            yield escape(one, quote=False)
        elif one is not None:
            yield from _texts(one)


def linked(text: str) -> list[Content]:
    """Return a text whose addresses can be clicked.

    >>> tag("p", linked("rows of https://example.org/a, and more")).text
    '<p>rows of <a href="https://example.org/a">https://example.org/a</a>, and more</p>'
    """
    parts: list[Content] = []
    end = 0
    for match in _URL.finditer(text):
        parts += [text[end : match.start()], tag("a", match[0], href=match[0])]
        end = match.end()
    return [*parts, text[end:]]


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a JSON answer with its path, from which a page takes every figure that it prints."""

    value: Any
    path: str = ""

    def __getitem__(self, key: str | int) -> "Node":
        return Node(self.value[key], f"{self.path}.{key}" if self.path else str(key))

    def __iter__(self) -> Iterator["Node"]:
        return (self[key] for key in range(len(self.value)))

    def entries(self) -> Iterator[tuple[str, "Node"]]:
        """Yield the entries of an object."""
        return ((key, self[key]) for key in self.value)

    def __bool__(self) -> bool:
        return bool(self.value) or isinstance(self.value, int | float)

    def figure(self, text: Callable[[Any], str]) -> Markup:
        """Print a number as people read it, with its exact value and its path beside it; a dash where it is null."""
        if self.value is None:
            return Markup("-")
        return tag("data", text(self.value), value=repr(self.value), data_path=self.path)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Content]],
    caption: str = "",
    *,
    class_: str = "",
    total: bool = False,
) -> Markup:
    """Return a table; a column ``>name`` has numbers, which stand to the right; the last row may be a ``total``."""
    numbers = [column.startswith(">") for column in columns]
    head = [
        tag("th", column.lstrip(">"), scope="col", class_="number" if number else None)
        for column, number in zip(columns, numbers, strict=True)
    ]
    lines: list[Markup] = []
    for row in rows:
        first, *cells = [
            tag("th" if not place else "td", cell, scope=None if place else "row", class_="number" if number else None)
            for place, (cell, number) in enumerate(zip(row, numbers, strict=True))
        ]
        lines.append(tag("tr", first, cells))
    if total:
        lines[-1] = Markup(lines[-1].text.replace("<tr>", '<tr class="total">', 1))
    body = tag(
        "table", tag("caption", caption) if caption else None, tag("thead", tag("tr", head)), tag("tbody", lines),
        class_=class_ or None,
    )  # fmt: skip
    return tag("div", body, class_="scroll", tabindex=0, role="region", aria_label=caption or "table")


def section(name: str, title: str, *content: Content, about: Content = None) -> Markup:
    """Return a section of a page, which its navigation names."""
    return tag(
        "section",
        tag("h2", title, id=name),
        tag("p", about, class_="about") if about else None,
        content,
        aria_labelledby=name,
    )


def facts(pairs: Iterable[tuple[str, Content]]) -> Markup:
    """Return large figures with their names."""
    return tag("dl", (tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def details(summary: str, *content: Content) -> Markup:
    """Return a part that opens when its summary is clicked."""
    return tag("details", tag("summary", summary), content)


def figure_of(caption: Content, *content: Content) -> Markup:
    """Return a drawing with its caption."""
    return tag("figure", tag("figcaption", caption), content)
