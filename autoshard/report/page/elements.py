"""HTML and SVG as values: elements, and sheets whose figures name their place in the JSON answer."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Union

from autoshard.report.sheet import Bar, Cell, Fact, Figure, Kind, Part, Sheet, Table, Words, plain

_EMPTY = ("br", "meta", "input", "rect", "path", "line", "circle", "use", "link")  # elements that hold nothing
_MANY = 12  # columns of a table, from which on its letters are smaller
_NAMES: Mapping[Kind, str] = {"strong": "b", "code": "code", "sent": "em"}  # of elements; others are plain text
_URL = re.compile(r"https?://[^\s\"'<>()]+[^\s\"'<>().,;:]")


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is HTML already."""

    text: str


Content = Union[Markup, Cell, None, Iterable["Content"]]  # noqa: UP007 (a string has no |)


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
    for part in content:
        match part:
            case Markup(text):
                yield text
            case str():
                yield escape(part, quote=False)
            case Figure(text, value, path):
                yield tag("data", text, value=repr(value), data_path=path).text
            case Words(text, kind, tip):
                yield tag(_NAMES.get(kind, "span"), text, data_tip=tip or None).text
            case Bar(share, _, parts):
                yield stacked_bar(parts or [Part(size=min(share, 1.0), kind="share", tip=f"{share:.0%}")], 1.0).text
            case None:
                pass
            case _:
                yield from _texts(part)


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


def table(drawn: Table) -> Markup:
    """Return a table; on a small screen it scrolls by itself."""
    columns = range(len(drawn.columns))
    classes = ["number" if drawn.is_number(place) else "keep" if drawn.is_whole(place) else None for place in columns]
    head = [tag("th", drawn.named(number), scope="col", class_=classes[number]) for number in columns]
    lines: list[Markup] = []
    for place, row in enumerate(drawn.rows):
        first, *cells = [
            tag("td" if number else "th", _linked(row[number]), scope=None if number else "row", class_=classes[number])
            for number in columns
        ]
        is_sum = drawn.total and place == len(drawn.rows) - 1
        lines.append(tag("tr", first, cells, class_="total" if is_sum else None))
    body = tag(
        "table", tag("caption", drawn.title) if drawn.title else None, tag("thead", tag("tr", head)),
        tag("tbody", lines), class_="many" if len(drawn.columns) > _MANY else None,
    )  # fmt: skip
    return tag("div", body, class_="scroll", tabindex=0, role="region", aria_label=drawn.title or "table")


def stacked_bar(parts: Sequence[Part], whole: float) -> Markup:
    """Return parts side by side as shares of ``whole``."""
    drawn, start = list[Markup](), 0.0
    for part in parts:
        width = 1000 * part.size / whole
        if width >= 0.5:
            place = {"x": round(start, 1), "width": round(width, 1)}
            drawn.append(tag("rect", y=0, height=20, class_=part.kind, data_tip=part.tip, **place))
        start += width
    return tag("svg", drawn, viewBox="0 0 1000 20", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def sheet_section(sheet: Sheet, *drawings: Content) -> Markup:
    """Return a sheet as a section, with drawings before its tables."""
    content = [*drawings, facts(sheet.facts) if sheet.facts else None, map(table, sheet.tables), notes(sheet.notes)]
    return section(sheet.name, plain(sheet.title), *content, about=sheet.about)


def sheet_head(sheet: Sheet) -> list[Content]:
    """Return a sheet as the head of a page: its first fact is the sentence that leads, the others are figures."""
    lead, *figures = sheet.facts
    is_bad = isinstance(lead.name, Words) and lead.name.kind == "bad"
    return [
        tag("h1", sheet.title, tag("small", sheet.about)),
        tag("p", tag("strong", plain(lead.name)), ": ", plain(lead.value), class_="warnings" if is_bad else "lead"),
        facts(figures) if figures else None,
        notes(sheet.notes),
    ]


def notes(lines: Sequence[Cell]) -> list[Markup]:
    """Return notes as a list of warnings and as paragraphs, whose addresses can be clicked."""
    warned = [line for line in lines if isinstance(line, Words) and line.kind in ("warning", "bad")]
    warnings = [tag("ul", (tag("li", line.text) for line in warned), class_="warnings")] if warned else []
    soft = [isinstance(line, Words) and line.kind == "soft" for line in lines]
    said = zip(lines, soft, strict=True)
    return [
        *warnings,
        *(tag("p", _linked(line), class_="about" if small else None) for line, small in said if line not in warned),
    ]


def _linked(cell: Cell) -> Content:
    """Return a cell whose addresses can be clicked, if it is a plain text."""
    soft = isinstance(cell, Words) and cell.kind == "soft" and not cell.tip
    return linked(plain(cell)) if soft or isinstance(cell, str) else cell


def section(name: str, title: str, *content: Content, about: Content = None) -> Markup:
    """Return a section of a page, which its navigation names."""
    return tag(
        "section",
        tag("h2", title, id=name),
        tag("p", about, class_="about") if about else None,
        content,
        aria_labelledby=name,
    )


def facts(shown: Iterable[Fact]) -> Markup:
    """Return large figures with their names."""
    return tag(
        "dl",
        (
            tag("div", tag("dt", plain(fact.name)), tag("dd", fact.value, _small(fact.beside) if fact.beside else None))
            for fact in shown
        ),
        class_="facts",
    )


def _small(beside: Cell) -> Markup:
    """Return what stands under a figure, where in a line it follows a comma."""
    first, *more = beside if isinstance(beside, tuple) else (beside,)
    return tag("small", first.lstrip(", ") if isinstance(first, str) else first, more)


def details(summary: str, *content: Content, open: bool = False) -> Markup:
    """Return a part that opens when its summary is clicked."""
    return tag("details", tag("summary", summary), content, open=open)


def figure_of(caption: Content, *content: Content) -> Markup:
    """Return a drawing with its caption."""
    return tag("figure", tag("figcaption", caption), content)
