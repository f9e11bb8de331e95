"""Setups that people know, planned with the defaults that a user gets, beside the layouts that vendors document."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost.doubt import ratio_of
from autoshard.plan.explanation import Answer, Ratio
from autoshard.plan.plan import Plan
from autoshard.report.words import chance_words, prediction_of, signed_words
from autoshard.search.ask.answers import VENDOR, PlanResult
from autoshard.search.ask.api import plan
from autoshard.spec.repeats import split_outside_brackets
from autoshard.units import format_at_most
from benchmarks.measure import counted_off, yardstick_s
from benchmarks.pages import ROOT, head, line, with_table
from benchmarks.plan_difference import sentence
from benchmarks.result import Extra, Result

PAGE = ROOT / "docs" / "understand" / "setups.md"
NAME = "setups"
MOST_CPU_S = 360.0  # of all searches together: what a laptop takes for them
_RULE = re.compile(r"\[([a-z0-9-]+)\]$")  # at the end of what a Rule says
_LONG = 20  # characters of a layout's lists, from which on they are shortened
_TEXTS = ("setup", "machine", "chosen plan", "vendor's layout", "chosen against the vendor's")
_COLUMNS = (
    _TEXTS[0], _TEXTS[1], "length", "batch", _TEXTS[2], "seconds", "MFU", _TEXTS[3], "its seconds", _TEXTS[4], "gap",
    "CPU s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on a machine; length and batch are those that a user gets who names none, but where they are stated."""

    model: str
    cluster: str
    nodes: int
    seq_len: int | None = None

    @property
    def name(self) -> str:
        """Name the setup in one word."""
        length = f"-{self.seq_len}" if self.seq_len else ""
        return f"{self.model}-{self.cluster}-x{self.nodes}{length}"


SETUPS = (
    Setup(model="llama3-8b", cluster="a100-80", nodes=1),
    Setup(model="llama3-70b", cluster="a100-80", nodes=8),
    Setup(model="gpt3-175b", cluster="a100-80", nodes=8),
    Setup(model="gpt3-175b", cluster="a100-80", nodes=128),
    Setup(model="mixtral-8x7b", cluster="a100-80", nodes=4),
    Setup(model="llama3-8b", cluster="h100-80", nodes=1),
    Setup(model="llama3.1-8b", cluster="h100-96", nodes=16),
    Setup(model="llama3.1-8b", cluster="h100-96", nodes=1, seq_len=131072),
    Setup(model="llama3.1-8b", cluster="h100-80", nodes=32, seq_len=1048576),
    Setup(model="llama3-70b", cluster="h100-80", nodes=8),
    Setup(model="llama3.1-70b", cluster="h100-96", nodes=32),
    Setup(model="llama3.1-70b", cluster="h100-80", nodes=64, seq_len=32768),
    Setup(model="llama3.1-405b", cluster="h100-80", nodes=128),
    Setup(model="llama3.1-405b", cluster="h100-96", nodes=64, seq_len=131072),
    Setup(model="mixtral-8x7b", cluster="h100-80", nodes=8),
    Setup(model="mixtral-8x22b", cluster="h100-80", nodes=16),
    Setup(model="llama3-8b", cluster="b200", nodes=1),
    Setup(model="llama3-70b", cluster="b200", nodes=8),
    Setup(model="llama3.1-405b", cluster="b200", nodes=16),
    Setup(model="llama3-8b", cluster="trn1.32xlarge", nodes=4),
    Setup(model="llama3-70b", cluster="trn1.32xlarge", nodes=16),
    Setup(model="llama3.1-405b", cluster="trn1.32xlarge", nodes=64),
    Setup(model="llama3-8b", cluster="trn2.48xlarge", nodes=1),
    Setup(model="llama3-70b", cluster="trn2.48xlarge", nodes=8),
    Setup(model="llama3.1-405b", cluster="trn2.48xlarge", nodes=512),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A setup with the answers to it, and what the search took."""

    setup: Setup
    result: PlanResult
    cpu_s: float

    @property
    def chosen(self) -> Plan:
        """The plan that is written unless somebody asks for another."""
        return self.result.plan

    @property
    def vendor(self) -> Answer | None:
        """The documented layout nearest to the setup."""
        return next((one for one in self.result.answers if one.name == VENDOR), None)

    @property
    def ratio(self) -> Ratio | None:
        """How long the chosen plan takes as a multiple of the vendor's."""
        vendor = self.vendor
        return ratio_of(self.chosen, vendor.plan) if vendor and vendor.plan.candidate != self.chosen.candidate else None

    @property
    def sentence(self) -> str:
        """Why the two differ, where they differ by more than 5%."""
        words = sentence(self.chosen, self.vendor.plan) if self.vendor else ""
        against = _against(self.vendor) if self.vendor else ""
        return f"{words} The vendor's may not run here: {against}." if words and against else words


def run(write: bool = False) -> Result:
    """Plan all setups; write the table and the sentences of the page if asked to."""
    found = planned(SETUPS)
    if write:
        PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    return judge(found)


def planned(setups: Sequence[Setup]) -> tuple[Planned, ...]:
    """Plan some setups as a user does who states nothing else."""
    return tuple(_planned(setup) for setup in counted_off(setups, "setup"))


def _planned(setup: Setup) -> Planned:
    start_s = time.process_time()
    result = plan(setup.model, setup.cluster, nodes=setup.nodes, seq_len=setup.seq_len)
    return Planned(setup=setup, result=result, cpu_s=time.process_time() - start_s)


def judge(found: Sequence[Planned]) -> Result:
    """Hold the processor time of all searches against the bar; no vendor's layout that may run is a better answer."""
    cpu_s = sum(one.cpu_s for one in found)
    allowed = [one for one in found if one.vendor and not one.vendor.against]
    overlooked = [one.setup.name for one in allowed if one.vendor and one.vendor.slower < -1e-3]
    extras: dict[str, Extra] = {"overlooked": ", ".join(overlooked) or None, "yardstick_s": yardstick_s()}
    for one in found:
        extras |= {f"{one.setup.name}.{key}": value for key, value in _extras(one).items()}
    return Result(
        name=NAME, value=round(cpu_s, 1), unit=f"CPU s for {len(found)} setups", bar=MOST_CPU_S,
        holds=cpu_s <= MOST_CPU_S and not overlooked, extras=extras,
    )  # fmt: skip


def _extras(one: Planned) -> dict[str, Extra]:
    prediction, vendor = prediction_of(one.chosen), one.vendor
    theirs = prediction_of(vendor.plan) if vendor else None
    return {
        "layout": str(one.chosen.candidate),
        "step_time_s": prediction.step_time_s,
        "mfu": prediction.mfu,
        "vendor_layout": str(vendor.plan.candidate) if vendor else None,
        "vendor_step_time_s": theirs.step_time_s if theirs else None,
        "vendor_against": "; ".join(vendor.against) or None if vendor else None,
        "ratio": one.ratio.value if one.ratio else None,
        "faster": one.ratio.faster if one.ratio else None,
        "gap": one.result.certificate.gap,
        "cpu_s": round(one.cpu_s, 1),
        "why": one.sentence or None,
    }


def page_text(text: str, found: Sequence[Planned]) -> str:
    """Return the page with its table and its sentences written anew."""
    table = "\n".join([*head(_COLUMNS, _TEXTS), *(line(cells(one)) for one in found)])
    notes = [f"- **{_place(one.setup)}**: {one.sentence}" for one in found if one.sentence]
    return with_table(text, NAME, "\n".join([table, "", *notes]), NAME)


def cells(one: Planned) -> list[str]:
    """Return the line of a setup; the last cell is what the search took, which no two runs have in common."""
    prediction, workload, vendor = prediction_of(one.chosen), one.chosen.workload, one.vendor
    interval = f"[{prediction.low_s:.3g} to {prediction.high_s:.3g}]"
    return [
        one.setup.model,
        f"{one.setup.nodes} x {one.setup.cluster}",
        f"{workload.seq_len:,}",
        f"{workload.global_batch:,}",
        f"`{short(one.chosen)}`",
        f"{prediction.step_time_s:.3g} s {interval}",
        f"{prediction.mfu:.0%}",
        _vendor_words(one.setup, vendor) if vendor else "-",
        f"{prediction_of(vendor.plan).step_time_s:.3g} s" if vendor else "-",
        _ratio_words(one),
        format_at_most(one.result.certificate.gap),
        f"{one.cpu_s:.1f}",
    ]


def _place(setup: Setup) -> str:
    length = f", {setup.seq_len:,} tokens" if setup.seq_len else ""
    return f"{setup.model} on {setup.nodes} x {setup.cluster}{length}"


def _vendor_words(setup: Setup, vendor: Answer) -> str:
    """Return who documents a layout, for what if not for this setup, and why it may not run here."""
    name, _, documented = vendor.why.partition(", for ")
    elsewhere = "" if f" on {setup.nodes} x " in documented else f", for {documented}"
    against = f"; may not run: {_against(vendor)}" if vendor.against else ""
    return f"[{name}]({vendor.source.partition(' ')[0]}){elsewhere}: `{short(vendor.plan)}`{against}"


def _against(vendor: Answer) -> str:
    """Return why a layout may not run here: the names of Rules, or the memory that it lacks."""
    rules = [(words, _RULE.search(words)) for words in vendor.against]
    return "; ".join(f"Rule {rule[1]}" if rule else words.partition(";")[0] for words, rule in rules)


def _ratio_words(one: Planned) -> str:
    """Return how much less or more the chosen plan takes, what holds 80% of it, and the chance that it is faster."""
    if one.vendor is None:
        return "-"
    if one.ratio is None:
        return "the same"
    low, value, high = (signed_words(end - 1) for end in (one.ratio.low, one.ratio.value, one.ratio.high))
    return f"{value} ({low} to {high}), chance to be faster: {chance_words(one.ratio.faster)}"


def short(made: Plan) -> str:
    """Show a layout without what is the default, and long lists of operations and stages cut off."""
    parts: list[str] = []
    for part in split_outside_brackets(str(made.candidate), ","):
        key, _, value = part.partition("=")
        if key in ("tp", "pp", "cp", "ep", "dp") and value == "1":
            continue
        parts.append(f"{key}={value[:_LONG]}..." if len(value) > _LONG else part)
    return ",".join(parts) or "one rank"
