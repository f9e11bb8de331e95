"""A whole space under its Rules: layouts first, by those that need no more; then forms of cp; then run variants."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.certificate import Refusal
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.plan.rules.rule import Rule
from autoshard.schedule.waves import Ints
from autoshard.search.request import Request
from autoshard.search.space import Space, whole_space
from autoshard.search.variants import CP_FORM, VARIANT_KEYS, RunVariant, cp_forms, num_variants, variants

Truths = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LegalSpace:
    """A space under its Rules: how many outer points it has, who refuses how many, and what is left of each variant."""

    space: Space
    num_points: int
    refusals: tuple[Refusal, ...]
    hopeless: frozenset[str]  # Rules that refuse all that they were asked about
    variants: tuple[RunVariant, ...]

    @property
    def num_legal(self) -> int:
        """Outer points that no Rule refuses."""
        return sum(len(one.layouts) for one in self.variants)

    def with_layouts(self, layouts: Truths) -> "LegalSpace":
        """Return what is left where only some layouts may be used."""
        some = (one.only(np.flatnonzero(layouts[one.layouts])) for one in self.variants)
        return replace(self, variants=tuple(one for one in some if len(one.layouts)))


def legal_space(request: Request, engine: Engine) -> LegalSpace:
    """Enumerate all points of an engine and ask every Rule about all of them."""
    model, pins = request.model, request.pins
    space = whole_space(model, request.cluster, request.workload, engine, pins)
    counts = num_variants(space, model, pins)
    num_forms = sum(np.bincount(one.layouts, minlength=len(counts)) for one in cp_forms(space, pins))
    early, middle, late = _in_turn(request)
    tally = _Tally(request)
    allowed = tally.allowed(space, early, counts * num_forms)
    alive = np.flatnonzero(allowed.any(axis=1))
    space, allowed, own = space.only(alive), allowed[alive], counts[alive]
    forms: list[RunVariant] = []
    for form in cp_forms(space, pins):
        kept = np.flatnonzero(tally.allowed(form.space, middle, own[form.layouts]).any(axis=1))
        if len(kept):
            forms.append(form.only(kept))
    legal: list[RunVariant] = []
    for variant in variants(forms, model, pins):
        ones = np.ones(len(variant.layouts), dtype=np.int64)
        left = allowed[variant.layouts] & tally.allowed(variant.space, late, ones)
        kept = np.flatnonzero(left.any(axis=1))
        if len(kept):
            legal.append(replace(variant, allowed=left.T).only(kept))
    return LegalSpace(
        space=space,
        num_points=int((counts * num_forms).sum()),
        refusals=tally.refusals(),
        hopeless=tally.hopeless,
        variants=tuple(legal),
    )


def _in_turn(request: Request) -> tuple[Sequence[Rule], Sequence[Rule], Sequence[Rule]]:
    """Part the Rules: those about layouts, those that need to know the form of cp as well, and all others."""
    # Recompute that is pinned stage by stage depends on how many stages there are.
    chosen = {*VARIANT_KEYS, *({"recompute"} & request.pins.keys())}
    early, middle, late = list[Rule](), list[Rule](), list[Rule]()
    for rule in all_rules():
        keys = _keys(rule)
        (late if keys & chosen - {*CP_FORM} else middle if keys & chosen else early).append(rule)
    # A Rule that may answer differently for the rows of a variant is asked last.
    return (
        early,
        middle,
        (*sorted(late, key=lambda rule: not _keys(rule) <= {"zero", "schedule"}), *request.extra_rules),
    )


def _keys(rule: Rule) -> set[str]:
    return set(rule.subject.replace(" ", "").split(","))


class _Tally:
    """What every Rule has refused so far, with its words about the candidate that had least else against it."""

    def __init__(self, request: Request) -> None:
        self._facts = (request.model, request.cluster, request.workload)
        self._own_rules = request.extra_rules
        self._counts: dict[str, int] = {}
        self._examples: dict[str, tuple[int, str]] = {}
        self._hopeful: set[str] = set()

    def allowed(self, space: Space, rules: Sequence[Rule], counts: Ints) -> Truths:
        """Ask Rules about a space, a row of which stands for so many points; return what all allow: [row, recompute].

        Once a Rule has refused every row, no other is asked.
        """
        columns = [space.columns(*self._facts, 0)]
        answers: list[tuple[Rule, Truths]] = []
        for rule in rules:
            if rule.applies(columns[0]):
                mine = rule in self._own_rules
                whole = rule.allows(columns[0])
                # A Rule of autoshard names all keys that it judges; one of the user's is asked about everything.
                kinds = len(space.recomputes) if mine or "recompute" in rule.subject else 1
                allowed = np.empty((space.num_layouts, kinds), dtype=bool)
                allowed[:, :1] = np.reshape(whole, (-1, 1))
                answers.append((rule, allowed))
                if np.ndim(whole) == 0 and not whole and not mine:
                    break
                columns += [space.columns(*self._facts, kind) for kind in range(len(columns), kinds)]
                for kind in range(1, kinds):
                    allowed[:, kind] = rule.allows(columns[kind])
        if space.num_layouts:
            self._count(space, answers, counts)
        found = np.ones((space.num_layouts, len(space.recomputes)), dtype=bool)
        for _, allowed in answers:
            found &= allowed
        return found

    def _count(self, space: Space, answers: Sequence[tuple[Rule, Truths]], counts: Ints) -> None:
        against = np.zeros((space.num_layouts, len(space.recomputes)), dtype=np.uint8)
        for _, allowed in answers:
            against += ~allowed
        for rule, allowed in answers:
            if allowed.any():
                self._hopeful.add(rule.id)
            if allowed.all():
                continue
            self._counts[rule.id] = self._counts.get(rule.id, 0) + int(counts[~allowed.all(axis=1)].sum())
            mildest = int(np.where(allowed, len(answers) + 1, against).argmin())
            reasons = int(against.reshape(-1)[mildest])
            if rule.id not in self._examples or reasons < self._examples[rule.id][0]:
                candidate = space.candidate(*divmod(mildest, len(space.recomputes)))
                self._examples[rule.id] = (reasons, rule.message(Columns.of(candidate, *self._facts, space.engine)))

    @property
    def hopeless(self) -> frozenset[str]:
        """Rules that refused some point and allowed nothing so far."""
        return frozenset({rule_id for rule_id, count in self._counts.items() if count} - self._hopeful)

    def refusals(self) -> tuple[Refusal, ...]:
        """Return what was refused, by Rule."""
        return tuple(
            Refusal(rule_id=rule_id, num_points=count, example=self._examples[rule_id][1])
            for rule_id, count in self._counts.items()
            if count
        )
