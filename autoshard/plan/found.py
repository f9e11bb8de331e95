"""What a search says of a plan that it found: what else there was, and what was refused; in the plan's provenance."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.errors import require
from autoshard.plan.explanation import Answer, Certificate, Ratio, Refusal
from autoshard.plan.plan import SEARCH, Plan, rounded
from autoshard.spec.files import parsed_json
from autoshard.spec.record import decode, encode, option

_WHERE = f"provenance.{SEARCH}"
_MOST_LAYOUTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """One of the plans with which a question was answered, as an ``Answer`` is, without the whole plan."""

    name: str
    candidate: str
    step_time_s: float
    time_parts: Mapping[str, float]
    tokens_per_s: float
    peak_bytes: int
    usd_per_step: float | None
    why: str
    slower: float
    gap: float  # how much better a plan that was not searched could be, as a share of what is minimised
    against: tuple[str, ...]  # why it may not run
    source: str  # of a vendor's layout
    ratio: Ratio | None = None  # of its step to that of the fastest

    @classmethod
    def of(cls, answer: Answer, certificate: Certificate) -> "FoundPlan":
        """Return the record of an answer, without its plan."""
        prediction, dollars = answer.plan.prediction, answer.plan.dollars
        assert prediction, "an answer has its prediction"
        return cls(
            name=answer.name,
            candidate=str(answer.plan.candidate),
            step_time_s=prediction.step_time_s,
            time_parts=prediction.time_parts,
            tokens_per_s=prediction.tokens_per_s,
            peak_bytes=prediction.peak_bytes,
            usd_per_step=dollars and dollars.usd_per_step,
            why=answer.why,
            slower=rounded(answer.slower),
            gap=rounded(certificate.about(answer.plan).gap),
            against=answer.against,
            source=answer.source,
            ratio=answer.ratio,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedLayout:
    """The best plan of one layout that the search solved: its step, and the memory of its fullest rank."""

    candidate: str
    step_time_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """What a search has proven, the plans that answer its question, the layouts it solved, and what Rules refused.

    ``fix`` and ``pins`` are what the question fixed, as ``--fix`` and ``--pin`` take it: keys of the layout, and the
    layouts of tensors.
    """

    statement: str
    accounting: str
    num_points: int
    num_legal: int
    answers: tuple[FoundPlan, ...]
    layouts: tuple[SolvedLayout, ...]
    refusals: tuple[Refusal, ...]
    fix: str = option("")
    pins: tuple[str, ...] = option(())

    def __post_init__(self) -> None:
        require((bool(self.answers), "answers", "must hold the plan itself, at least"))

    @classmethod
    def of_search(
        cls, certificate: Certificate, answers: tuple[Answer, ...], layouts: tuple[SolvedLayout, ...]
    ) -> "SearchRecord":
        """Return the record of a search; of the layouts those are kept that need least memory for their time."""
        return cls(
            statement=certificate.statement,
            accounting=certificate.accounting,
            num_points=certificate.num_points,
            num_legal=certificate.num_legal,
            answers=tuple(FoundPlan.of(answer, certificate) for answer in answers),
            layouts=_worth_drawing(layouts),
            refusals=certificate.refusals,
        )

    def names_of(self, plan: Plan) -> tuple[str, ...]:
        """Return the names of the answers whose layout a plan has."""
        return tuple(answer.name for answer in self.answers if answer.candidate == str(plan.candidate))

    def kept_in(self, plan: Plan) -> Plan:
        """Return the plan with this record; its prediction stays that of the plan, which is the same without it."""
        text = json.dumps(encode(self), separators=(",", ":"))
        return replace(plan, provenance={**plan.provenance, SEARCH: text})


def search_record(plan: Plan) -> SearchRecord | None:
    """Return the record that a plan carries; None where it was not found by a search."""
    text = plan.provenance.get(SEARCH)
    return decode(SearchRecord, parsed_json(text, _WHERE), _WHERE) if text else None


def _worth_drawing(layouts: tuple[SolvedLayout, ...]) -> tuple[SolvedLayout, ...]:
    """Return the layouts that no layout beats in both time and memory, then the fastest of the dominated layouts."""
    by_time = sorted(layouts, key=lambda layout: (layout.step_time_s, layout.peak_bytes))
    undominated, least = list[SolvedLayout](), float("inf")
    for layout in by_time:
        if layout.peak_bytes < least:
            undominated.append(layout)
            least = layout.peak_bytes
    dominated = (layout for layout in by_time if layout not in undominated)
    drawn = [*undominated, *dominated][:_MOST_LAYOUTS]
    return tuple(sorted(drawn, key=lambda layout: (layout.step_time_s, layout.peak_bytes)))
