"""The page of ``autoshard explore``: panes of controls, filled with sections of the page of a plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoshard.plan.diff import Diff
from autoshard.plan.explanation import Answer
from autoshard.report.brief import answers_beside, shown_answers
from autoshard.report.page.document import head_of, theme_switch
from autoshard.report.page.elements import Content, Markup, details, notes, sheet_section, tag
from autoshard.report.page.plan_page import difference_section, plan_head, plan_sections
from autoshard.report.page.shown import ShownPlan
from autoshard.report.plan_sheets import total_words
from autoshard.report.sheet import Cell, Node, Sheet, Words
from autoshard.search.ask.answers import NAMES, SIMPLE, PlanResult
from autoshard.spec.cluster_catalogue import ALIASES, cluster_names
from autoshard.spec.model_catalogue import model_names
from autoshard.spec.recipe import DEFAULT_CLUSTER
from autoshard.version import __version__

PANES = ("a", "b")
_DRAWN = ("timeline", "memory", "pareto", "time")
_FOLDED = ("others", "refused", "basis")
_FOLDER = Path(__file__).parent
_FIELDS = {  # control -> its label, what it may hold, and what it means
    "model": ("model", "", "a card of autoshard list models, or the config.json of the line that opened the page"),
    "cluster": ("cluster", "", "a name of autoshard list clusters, or the file of the line that opened the page"),
    "nodes": ("nodes", "1", "how many nodes the cluster has"),
    "seq_len": ("sequence length", "as documented", "tokens in a sequence, e.g. 8192 or 32k"),
    "global_batch": ("batch", "as documented", "sequences in an optimizer step, or their tokens: 4M"),
    "choose": ("answer", "", "which answer is shown"),
    "fix": ("pins", "none", "keys of the layout that are pinned, e.g. tp=8,pp=4"),
    "tokens": ("training tokens", "none", "tokens that the whole training reads, e.g. 2T: days and dollars"),
    "more": ("more options", "none", "further options of autoshard plan, e.g. --precision bf16-sr --headroom 0.05"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An answer to the question of a pane, beside the other answers."""

    plan: ShownPlan
    answers: PlanResult
    answer: Answer
    total_tokens: float | None = None


def answer_fragment(shown: Shown, data: Node) -> Markup:
    """Return what fills a pane: the plan in figures, the answers, and the sections of its page."""
    plan, answers = shown.plan.plan, shown.answers
    certificate, lines = answers.certificate.about(plan), list[Cell]()
    if certificate.stopped:
        words = f"The search was not finished ({certificate.stopped}): this is the best plan so far, not a proven one."
        lines.append(Words(words, "bad"))
    about = list[Cell]()
    if shown.total_tokens:
        about.append(("all tokens: ", total_words(plan, shown.total_tokens)))
    if answers.defaults:
        about.append(Words(f"assumed {answers.defaults}", "soft"))
    about += [Words(remark, "soft") for remark in answers.remarks]
    beside = shown_answers(answers.answers, shown.answer.name)
    tables = [answers_beside(plan, beside, shown.answer.name)] if len(beside) > 1 else []
    parts: list[Content] = [notes(lines), plan_head(shown.plan, data["plans"][0]), notes(about)]
    if tables:
        parts.append(sheet_section(Sheet(name="answers", title="Answers", tables=tables)))
    parts += [section for _, _, section in plan_sections([shown.plan], data, _DRAWN)]
    folded = [section for _, _, section in plan_sections([shown.plan], data, _FOLDED)]
    return tag("div", parts, details("Runners-up, what was refused, and what the figures rest on", folded))


def difference_fragment(difference: Diff, data: Node) -> Markup:
    """Return how the plan of the second pane differs from that of the first."""
    return difference_section(difference, data, ("the first answer", "the second answer"), folded=True)


def explorer_file(name: str) -> str:
    """Return the text of a style or a script of the page."""
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")


def explorer_page(initial: Mapping[str, str], line: str) -> str:
    """Return the page without an answer; ``line`` is what the options of a pane follow on a command line."""
    compare = tag("button", "compare two", type="button", id="compare", aria_pressed="false")
    switches = tag("span", compare, theme_switch(), class_="switches")
    styles = [tag("link", rel="stylesheet", href=name) for name in ("page.css", "explorer.css")]
    whole = tag(
        "html",
        head_of("autoshard explore", tag("link", rel="icon", href="data:,"), styles),
        tag(
            "body",
            tag("a", "skip to the answer", href="#a-result", class_="skip"),
            tag("header", tag("nav", tag("strong", "autoshard explore"), switches, aria_label="page")),
            tag("main", tag("div", id="difference", role="region", aria_label="the second answer against the first"),
                tag("div", [_pane(pane, initial) for pane in PANES], id="panes"), id="content", data_line=line),
            tag("footer", tag("p", f"autoshard {__version__}. Predicted figures are no measurements.")),
            tag("div", id="tip", role="tooltip", hidden=True),
            [tag("script", src=name) for name in ("page.js", "explorer.js")],
        ),
        lang="en",
    )  # fmt: skip
    return f"<!doctype html>\n{whole.text}\n"


def _pane(pane: str, initial: Mapping[str, str]) -> Markup:
    """Return a pane: its controls, the line that gives the same, the state of its search, and room for the answer."""
    number = PANES.index(pane)
    name = ("First question", "Second question")[number]
    links = (
        tag("a", text, href=f"{pane}/{file}", target="_blank", class_="file", hidden=True)
        for text, file in (("plan.json", "plan.json"), ("whole page", "report.html"))
    )
    command = tag("code", class_="command", tabindex=0, role="group", aria_label="the command that gives the same")
    copy = tag("button", "copy", type="button", class_="copy", aria_label=f"copy the command of the {name.lower()}")
    return tag(
        "div",
        tag("form", list(_controls(pane, initial)), aria_label=f"controls of the {name.lower()}", autocomplete="off"),
        tag("div", command, copy, links, class_="line"),
        tag("p", class_="status", role="status"),
        tag("div", tag("h1", name), id=f"{pane}-result", class_="result", role="region", tabindex=-1,
            aria_label=f"answer to the {name.lower()}"),
        class_="pane", id=pane, hidden=number > 0,
    )  # fmt: skip


def _controls(pane: str, initial: Mapping[str, str]) -> Iterator[Markup]:
    for name, (label, empty, tip) in _FIELDS.items():
        value, id_ = initial[name], f"{pane}-{name}"
        if name in ("model", "cluster", "choose"):
            chosen = value or (DEFAULT_CLUSTER if name == "cluster" else "")
            control = tag("select", _options(name, chosen), name=name, id=id_)
        else:
            more = {"type": "number", "min": 1, "inputmode": "numeric"} if name == "nodes" else {"type": "text"}
            control = tag("input", name=name, id=id_, value=value, placeholder=empty, spellcheck="false",
                          data_tip=tip, **more)  # fmt: skip
        yield tag("div", tag("label", label, for_=id_, data_tip=tip), control, class_=f"control {name}")


def _options(name: str, chosen: str) -> Iterator[Markup]:
    """Yield the names that a control takes, with the one of the line that opened the page if it is no such name."""
    usual = ("", *(answer for answer in NAMES if answer != SIMPLE))
    names = {"model": model_names, "cluster": cluster_names, "choose": lambda: usual}[name]()
    titles = {value: alias for alias, value in ALIASES.items()} if name == "cluster" else {"": SIMPLE}
    value = ALIASES.get(chosen, chosen) if name == "cluster" else chosen
    for entry in dict.fromkeys([*names, value]):
        yield tag("option", titles.get(entry, entry), value=entry, selected=entry == value)
