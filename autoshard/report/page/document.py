"""A whole page: its head, navigation, style and script in one file that needs no network."""

from collections.abc import Sequence
from pathlib import Path

from autoshard.report.page.elements import Content, Markup, tag
from autoshard.version import __version__

_FOLDER = Path(__file__).parent


def document(
    title: str, sections: Sequence[tuple[str, str, Markup]], *, head: Content = None, refresh_s: int = 0
) -> str:
    """Return a page; each section comes with its name and its entry in the navigation."""
    style, script = (_FOLDER.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = (tag("li", tag("a", entry, href=f"#{name}")) for name, entry, _ in sections)
    meta = [tag("meta", http_equiv="refresh", content=refresh_s)] if refresh_s else []
    whole = tag(
        "html",
        head_of(title, meta, tag("style", Markup(style))),
        tag(
            "body",
            tag("a", "skip to the content", href="#content", class_="skip"),
            tag(
                "header",
                tag("nav", tag("strong", "autoshard"), tag("ul", links), theme_switch(), aria_label="sections"),
            ),
            tag("main", head, (section for _, _, section in sections), id="content"),
            tag("footer", tag("p", f"Written by autoshard {__version__}. Predicted figures are no measurements.")),
            tag("div", id="tip", role="tooltip", hidden=True),
            tag("script", Markup(script)),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{whole.text}\n"


def head_of(title: str, *parts: Content) -> Markup:
    """Return the head of a page: what browsers ask of any, and what is added for this one."""
    meta = (tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"))
    return tag("head", meta, tag("title", title), *parts)


def theme_switch() -> Markup:
    """Return the button that makes a page light or dark."""
    return tag("button", "dark / light", type="button", id="theme", data_tip="switch between light and dark")
