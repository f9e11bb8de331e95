"""The plans with which a question is answered: the fastest, a simple one, the vendor's, and the next best layouts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from autoshard.cost.doubt import ratio_of
from autoshard.errors import InputError, NoPlan
from autoshard.plan.candidate import pins_text
from autoshard.plan.codec import save
from autoshard.plan.explanation import Answer, Certificate, Ratio
from autoshard.plan.found import SearchRecord
from autoshard.plan.plan import Plan, Prediction
from autoshard.search.ask.choice.doubt import known_schedules, short_percent
from autoshard.search.ask.planner import SearchResult
from autoshard.search.ask.vendor.answer import step_s, vendor_answer
from autoshard.search.bound.request import Request
from autoshard.spec.cluster import LOCAL
from autoshard.units import counted, format_at_most, format_bytes, format_change, format_count, format_seconds

FASTEST, SMALLEST, SIMPLE, VENDOR, FSDP, OTHER = "fastest", "smallest", "simple", "vendor", "fsdp", "other"
NAMES = (FASTEST, SMALLEST, SIMPLE, VENDOR, FSDP, OTHER)
MOST_PLANS = 100  # every plan that is shown is predicted in full, a few milliseconds each
NUMBERS = tuple(map(str, range(1, MOST_PLANS + 1)))  # of runners-up


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanResult:
    """The answers to a question, the best plan first, and what was proven about them.

    ``plan`` is that of the answer of this ``name``; ``no_vendor`` says why there is no vendor's, ``defaults`` where
    length and batch are from if the question left them open.
    """

    answers: tuple[Answer, ...]
    certificate: Certificate
    no_vendor: str = ""
    name: str = SIMPLE  # of the answer that is ``plan``
    defaults: str = field(default="", compare=False)
    remarks: tuple[str, ...] = ()  # on what the choice rests

    @property
    def plan(self) -> Plan:
        """The plan of the answer that was asked for."""
        return self.named(self.name).plan

    @property
    def prediction(self) -> Prediction:
        """What the cost model says of ``plan``: ``step_time_s``, ``peak_bytes``, ``tokens_per_s``, ``mfu`` and more."""
        return self.named(self.name).prediction

    @property
    def runners_up(self) -> tuple[Plan, ...]:
        """The best plans of the next best layouts, best first."""
        return tuple(answer.plan for answer in self.answers if answer.name.isdecimal())

    def named(self, name: str | int) -> Answer:
        """Return an answer by its name, or a runner-up by its number; ``1`` is the first."""
        name = str(name)
        by_name = {"1": self.answers[0], **{answer.name: answer for answer in self.answers}}
        if name not in by_name:
            what = f" ({self.no_vendor})" if name == VENDOR and self.no_vendor else ""
            raise InputError.of(name, f"there is no such answer{what}. There are {', '.join(list(by_name)[1:])}")
        return by_name[name]

    def runnable(self, name: str | int) -> Answer:
        """Return an answer by its name, unless it has a reason against running it."""
        answer = self.named(name)
        if answer.against:
            raise NoPlan(f"the {name}'s layout {answer.plan.candidate} may not be run: {'; '.join(answer.against)}")
        return answer

    def save(self, path: str | Path, choose: str | int | None = None, *, force: bool = False) -> Path:
        """Write a plan file, of ``plan`` or of another answer; without ``force`` what somebody has edited is kept."""
        out, answer = Path(path), self.runnable(self.name if choose is None else choose)
        save(answer.plan, out, force=force, remedy="Say force=True to replace it")
        return out

    def summary(self) -> str:
        """Return the question, the answers in a line each, and what was proven, as text."""
        plan = self.plan
        cluster, workload = plan.cluster, plan.workload
        place = counted(cluster.num_ranks, "rank") if cluster.name == LOCAL else f"{cluster.num_nodes} x {cluster.name}"
        size = f"{counted(workload.seq_len, 'token')}, {counted(workload.global_batch, 'sequence')}"
        lines = [
            f"{plan.model.name} on {place}, {size} a step",
            *([self.defaults] if self.defaults else []),
            *(
                "  ".join(cells)
                for cells in zip(*map(_padded, zip(*map(_cells, self.answers), strict=True)), strict=True)
            ),
        ]
        why = f"{self.name}: {self.named(self.name).why}"
        return "\n".join([*(line.rstrip() for line in lines), why, *self.remarks])

    def __repr__(self) -> str:
        count, figures = counted(len(self.answers), "answer"), " ".join(_cells(self.named(self.name))[1:])
        return f"<PlanResult: {self.name} of {count}, {figures}>"

    def __getattr__(self, name: str) -> object:
        """Name the place of a plan's attribute: until 0.1 ``autoshard.plan`` returned the plan itself."""
        where = f". It is an attribute of the plan: result.plan.{name}" if hasattr(Plan, name) else ""
        raise AttributeError(f"a PlanResult has no {name!r}{where}")

    def _repr_html_(self) -> str:
        rows = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(answer))}</tr>" for answer in self.answers]
        return f"<table>{''.join(rows)}</table><p>{escape(self.certificate.statement)}</p>"


def num_searched(choose: str | None, top: int) -> int:
    """Return how many of the best layouts a search looks for, where one is chosen by its number."""
    return max(top, int(choose) if choose in NUMBERS else 1)


def _promise(certificate: Certificate) -> str:
    """Say how far from the best an answer may be."""
    if not certificate.bound:
        return "how far it is from the best is not known"
    gap = certificate.gap
    return f"nothing is more than {format_at_most(gap)} better" if gap > 1e-9 else "proven best"


def answers_of(request: Request, result: SearchResult, name: str | None = None) -> PlanResult:
    """Return the answers to a question from a search result with a plan; ``plan`` is the simple plan unless named."""
    best, *alternatives = result.plans
    is_time = request.objective != "memory"
    first = Answer(
        name=FASTEST if is_time else SMALLEST,
        plan=best,
        why=_promise(result.certificate),
        slower=0.0,
    )
    vendor = (result.vendor or vendor_answer(request)) if is_time else "memory is minimised"
    answers = [first, _simple(first, result)] if is_time else [first]
    answers += [replace(vendor, slower=step_s(vendor.plan) / step_s(best) - 1)] if isinstance(vendor, Answer) else []
    for label, looked_at in ((FSDP, result.fsdp), (OTHER, result.other)):
        if looked_at:
            plan, why = looked_at
            answers += [Answer(name=label, plan=plan, why=why, slower=step_s(plan) / step_s(best) - 1)]
    answers += [
        Answer(
            name=str(number), plan=plan, why="the best plan of another layout", slower=step_s(plan) / step_s(best) - 1
        )
        for number, plan in enumerate(alternatives, 2)
    ]
    answers = [answers[0], *(replace(answer, ratio=_ratio_to(best, answer.plan)) for answer in answers[1:])]
    record = replace(
        SearchRecord.of_search(result.certificate, tuple(answers), result.layouts),
        fix=pins_text(request.pins),
        pins=tuple(f"{pin.tensor}={pin.layout}" for pin in request.layouts),
    )
    return PlanResult(
        answers=tuple(replace(answer, plan=record.kept_in(answer.plan)) for answer in answers),
        certificate=result.certificate,
        no_vendor="" if isinstance(vendor, Answer) else vendor,
        name=name or (SIMPLE if is_time else first.name),
        defaults=request.defaults,
        remarks=(*_unmeasured(request, result), *filter(None, [result.hinge])),
    )


def _ratio_to(best: Plan, plan: Plan) -> Ratio | None:
    """Return how long a plan takes as a multiple of what the best takes; None of the best itself."""
    return None if plan.candidate == best.candidate else ratio_of(plan, best)


def _unmeasured(request: Request, result: SearchResult) -> list[str]:
    """Say why a schedule is chosen that nobody has measured here, and what a less known schedule would gain."""
    fastest, chosen = result.plans[0], result.preferred
    tiers, where = known_schedules(request.constants), request.cluster.name
    if not result.simple_within or {"schedule", "vp"} & request.pins.keys():
        return []
    unknown_to = [sum(plan.schedule.builder not in tier for tier in tiers) for plan in (fastest, chosen)]
    places = ("", f" on {where}", " on any platform")  # where nobody has measured a schedule that so many tiers lack
    said = list[str]()
    if unknown_to[1]:
        who = f"nobody has measured {chosen.schedule.builder}{places[unknown_to[1]]}"
        why = f"all that are better known are more than {short_percent(result.simple_within)} slower"
        said.append(f"{who}; it is chosen because {why}")
    if unknown_to[0] > unknown_to[1]:
        gain = f"{fastest.schedule.builder} would be {1 - step_s(fastest) / step_s(chosen):.1%} faster"
        said.append(f"{gain}, which nobody has measured{places[unknown_to[0]]}")
    return said


def _simple(fastest: Answer, result: SearchResult) -> Answer:
    """Return the simple plan as an answer; the fastest in its place where there is none."""
    if result.simple is None:
        within = short_percent(result.simple_within)
        why = result.simple_ended or f"nothing with one or two kinds of recompute is within {within} of the fastest"
        return Answer(name=SIMPLE, plan=fastest.plan, why=f"the fastest: {why}", slower=0.0)
    slower = step_s(result.simple) / step_s(fastest.plan) - 1
    return Answer(name=SIMPLE, plan=result.simple, why=result.simple_why, slower=slower)


def _cells(answer: Answer) -> tuple[str, ...]:
    plan, prediction = answer.plan, answer.plan.prediction
    assert prediction, "a plan of the search has its prediction"
    return (
        answer.name,
        format_seconds(prediction.step_time_s),
        _slower(answer),
        format_count(prediction.tokens_per_s, "tokens/s"),
        f"{format_bytes(prediction.peak_bytes)} of {format_bytes(prediction.capacity_bytes)}",
        str(plan.candidate) + (f" (may not run: {'; '.join(answer.against)})" if answer.against else ""),
    )


def _slower(answer: Answer) -> str:
    """Say how much slower than the fastest an answer is, what holds 80% of that, and how sure it is."""
    if answer.ratio is None:
        return format_change(answer.slower)
    low, high = (format_change(end - 1, 0) for end in (answer.ratio.low, answer.ratio.high))
    return f"{format_change(answer.slower)} ({low} to {high}; slower with {1 - answer.ratio.faster:.0%})"


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]
