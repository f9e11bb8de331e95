"""The layouts of AWS's recipes for pre-training beside our own answers to the same questions, both as predicted."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.cost.doubt import ratio_of
from autoshard.plan.plan import Plan, Prediction
from autoshard.report.words import chance_words, signed_words
from autoshard.search.ask.planner import search
from autoshard.search.bound.request import plan_at, rejections_of
from benchmarks.aws_recipes import AwsRecipe, load_aws_recipes
from benchmarks.measure import yardstick_s
from benchmarks.pages import ROOT, head, line, with_table
from benchmarks.result import Extra, Result

PAGE = ROOT / "benchmarks" / "README.md"
NAME = "reference_layouts"
LEAST_GAIN = -0.001  # the recipe's layout can be chosen as well; what is worse by more was overlooked
_SAME = 1e-9  # as the search takes step times to be equal
_TEXTS = ("recipe", "model", "attention", "machine", "AWS's layout", "our layout", "brought by", "against AWS's")
_COLUMNS = (*_TEXTS[:5], "predicted", "memory", _TEXTS[5], "ours", "its memory", "gain", *_TEXTS[6:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One recipe: the plan of its layout, our own, and what keeps a search from choosing the former."""

    recipe: AwsRecipe
    theirs: Plan
    ours: Plan
    against: tuple[str, ...] = ()  # ids of Rules, and memory

    @property
    def gain(self) -> float:
        """The share of the recipe's step time that our choice saves."""
        return 1 - _predicted(self.ours).step_time_s / _predicted(self.theirs).step_time_s

    @property
    def term(self) -> tuple[str, float]:
        """The part of the step time that differs most in the direction of the gain, and the seconds that it saves."""
        before, after = _predicted(self.theirs).time_parts, _predicted(self.ours).time_parts
        saved = {name: before.get(name, 0.0) - after.get(name, 0.0) for name in sorted({*before, *after})}
        return max(saved.items(), key=lambda entry: entry[1] if self.gain >= 0 else -entry[1])


def run(write: bool = False) -> Result:
    """Compare all recipes for pre-training; write the table of the page if asked to."""
    start_s = time.process_time()
    found = compared(load_aws_recipes())
    cpu_s = time.process_time() - start_s
    if write:
        write_page(found)
    return judge(found, cpu_s)


def compared(recipes: Sequence[AwsRecipe]) -> tuple[Comparison, ...]:
    """Plan every recipe for pre-training as it stands, and search for what else would answer its question."""
    return tuple(_compared(recipe) for recipe in recipes if recipe.work == "pretraining")


def judge(found: Sequence[Comparison], cpu_s: float) -> Result:
    """Take the least gain over the layouts that a search may choose."""
    least = min(entry.gain for entry in found if not entry.against)
    return Result(
        name=NAME,
        value=round(least, 4),
        unit="predicted gain, least",
        bar=LEAST_GAIN,
        holds=least >= LEAST_GAIN,
        extras={
            **{key: value for entry in found for key, value in _extras(entry).items()},
            "cpu_s": round(cpu_s, 3),
            "yardstick_s": yardstick_s(),
        },
    )


def page_text(text: str, found: Sequence[Comparison]) -> str:
    """Return a page with its table written anew."""
    table = "\n".join([*head(_COLUMNS, _TEXTS), *(line(_cells(entry)) for entry in found)])
    return with_table(text, NAME, table, NAME)


def write_page(found: Sequence[Comparison], page: Path = PAGE) -> None:
    """Write the table of a page."""
    page.write_text(page_text(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def _compared(recipe: AwsRecipe) -> Comparison:
    request, candidate = recipe.request(), recipe.candidate()
    theirs, found = plan_at(request, candidate, even_refused=True), search(request)
    assert found.plans, f"{recipe.name}: nothing fits"
    against = [rejection.rule_id for rejection in rejections_of(request, candidate, theirs.engine)]
    full = _predicted(theirs).peak_bytes > request.cluster.rank_memory_bytes
    reasons = (*against, *(["memory"] if full else []))
    return Comparison(recipe=recipe, theirs=theirs, ours=found.plans[0], against=reasons)


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction, "a plan of the planner has its prediction"
    return plan.prediction


def _cells(entry: Comparison) -> list[str]:
    recipe = entry.recipe
    return [
        recipe.name,
        ", ".join([recipe.model, *(f"{name} {value}" for name, value in recipe.differs.items())]),
        recipe.attention,
        f"{recipe.nodes} x {recipe.cluster}",
        f"`{_layout(entry.theirs)}`",
        *_time_and_memory(entry.theirs),
        f"`{_layout(entry.ours)}`",
        *_time_and_memory(entry.ours),
        _gain(entry),
        _brought_by(entry),
        ", ".join(entry.against) or "-",
    ]


def _gain(entry: Comparison) -> str:
    """Return the gain, what holds 80% of it, and how sure it is that our layout is the faster one."""
    if entry.ours.candidate == entry.theirs.candidate:
        return f"{entry.gain:+.1%}"
    ratio = ratio_of(entry.ours, entry.theirs)
    low, high = (signed_words(1 - end) for end in (ratio.high, ratio.low))
    return f"{entry.gain:+.1%} ({low} to {high}), {chance_words(ratio.faster)}"


def _layout(plan: Plan) -> str:
    """Show a candidate without what both of a line have in common."""
    return str(dataclasses.replace(plan.candidate, kernels=None, lnc=None))


def _time_and_memory(plan: Plan) -> tuple[str, str]:
    prediction = _predicted(plan)
    return f"{prediction.step_time_s:.3g} s", f"{prediction.peak_bytes / prediction.capacity_bytes:.0%}"


def _brought_by(entry: Comparison) -> str:
    name, seconds = entry.term
    return "-" if abs(entry.gain) <= _SAME else f"{name}, {seconds:+.3g} s"


def _extras(entry: Comparison) -> dict[str, Extra]:
    """Return the numbers of one recipe, each under its name."""
    name, seconds = entry.term
    values: dict[str, Extra] = {
        "layout": _layout(entry.theirs),
        "step_time_s": _predicted(entry.theirs).step_time_s,
        "our_layout": _layout(entry.ours),
        "our_step_time_s": _predicted(entry.ours).step_time_s,
        "gain": round(entry.gain, 4),
        "term": name,
        "term_saves_s": round(seconds, 4),
        "against": ", ".join(entry.against) or None,
    }
    stem = entry.recipe.name.removesuffix("_config.yaml")
    return {f"{stem}.{key}": value for key, value in values.items()}
