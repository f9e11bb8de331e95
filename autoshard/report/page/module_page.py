"""The page of a torch module without a card."""

from autoshard.report.module_sheets import module_sheets
from autoshard.report.page.document import document
from autoshard.report.page.elements import facts, sheet_section, tag
from autoshard.report.sheet import Node, plain


def module_page(figures: Node) -> str:
    """Return the page of a module's plan, drawn from its JSON."""
    head, *sheets = module_sheets(figures)
    sections = [(sheet.name, plain(sheet.title).partition(" and ")[0], sheet_section(sheet)) for sheet in sheets]
    return document(plain(head.title), sections, head=[tag("h1", head.title), facts(head.facts)])
