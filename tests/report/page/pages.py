"""Pages of real plans, made once, and read back as the elements that a browser would make of them."""

import functools
import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from autoshard.blocks.explain import explain
from autoshard.cost.timeline import rank_times, timeline_of
from autoshard.plan.diff import diff
from autoshard.plan.found import search_record
from autoshard.plan.plan import Plan
from autoshard.report.page.plan_page import plan_page
from autoshard.report.page.shown import ShownPlan, page_json
from autoshard.report.sheet import Node
from autoshard.search.ask.answers import answers_of
from autoshard.search.ask.choice.doubt import DOUBT
from autoshard.search.ask.planner import search
from tests.search.brute_force import ask

# Some keys are pinned, so that a search is short.
QUESTIONS = {
    "dense": ask("llama3-8b", "trn1.32xlarge", 2, global_batch=256, pins="tp=8,mbs=1,cp=1"),
    "experts": ask("mixtral-8x7b", "a100-80", 4, global_batch=64, seq_len=4096, pins="tp=4,pp=4,mbs=1,schedule=1f1b"),
    "long": ask("llama3-8b", "trn1.32xlarge", 4, global_batch=64, seq_len=32768, pins="tp=8,mbs=1"),
    "small": ask("tiny-llama", ranks=2, global_batch=8, pins="mbs=2"),
}
_VOID = ("meta", "input", "br")


@functools.cache
def plan_named(name: str, answer: str = "simple") -> Plan:
    """Return an answer to one of the questions, as a plan file holds it."""
    request = QUESTIONS[name]
    return answers_of(request, search(request, 3, simple_within=DOUBT)).named(answer).plan


def shown(name: str, plan: Plan) -> ShownPlan:
    """Return what a page draws of a plan."""
    drawn, times, why = timeline_of(plan), rank_times(plan), explain(plan)
    return ShownPlan(
        name=name, plan=plan, timeline=drawn, times=times, explanation=why, record=search_record(plan)
    )  # fmt: skip


def page_of(*plans: Plan, run: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the page of plans and the JSON of its figures, as a file would hold it."""
    all_shown = [shown(f"plan{number}", plan) for number, plan in enumerate(plans)]
    against = [diff(plans[0], other) for other in plans[1:]]
    data = page_json(all_shown, against, run)
    return plan_page(all_shown, Node(data), against), json.loads(json.dumps(data))


@functools.cache
def page_named(name: str) -> str:
    """Return the page of a question's simple plan."""
    return page_of(plan_named(name))[0]


def written_page(name: str, folder: Path) -> Path:
    """Write the page of a question's simple plan, and return its path."""
    path = folder / f"{name}.html"
    path.write_text(page_named(name), encoding="utf-8")
    return path


@dataclass
class Element:
    """An element with its attributes, its own text, and what lies in it."""

    name: str
    attributes: dict[str, str]
    text: str = ""
    inside: list["Element"] = field(default_factory=list)

    def every(self, name: str) -> list["Element"]:
        """Return all elements of a name below this one."""
        return [one for part in self.inside for one in (*([part] if part.name == name else []), *part.every(name))]

    @property
    def whole_text(self) -> str:
        """The text of this element and of those in it."""
        return self.text + "".join(part.whole_text for part in self.inside)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        one = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(one)
        if tag not in _VOID:
            self.open.append(one)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].inside.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag, f"{tag} closes another element"

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def read(text: str) -> Element:
    """Parse a page; every element must be closed."""
    reader = _Reader()
    reader.feed(text)
    assert len(reader.open) == 1, f"{reader.open[-1].name} is not closed"
    return reader.open[0]
