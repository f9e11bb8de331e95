"""From a question to the best plan, with what was looked at, what was refused and why."""

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np

from autoshard import __version__
from autoshard.cost.calibration import Calibration, built_in
from autoshard.cost.predict import predicted
from autoshard.cost.setting import Question
from autoshard.cost.sharded import CutBlocks
from autoshard.cost.worth import carried
from autoshard.errors import Fault, InputError, require
from autoshard.layout.cutting import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import Candidate
from autoshard.plan.certificate import NOTHING_LOOKED_AT, Certificate, Refusal
from autoshard.plan.plan import Plan
from autoshard.plan.rules.check import all_rules, rejections
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.plan.rules.rule import Rejection, Rule
from autoshard.plan.tables import with_tables
from autoshard.search.cutting import Terms, solved_cutting
from autoshard.search.pool import Pool, fastest
from autoshard.search.space import Pins, Space, default_kernels, whole_space
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

MOST_RANKS = 2**22  # far beyond any machine, and few enough to list all of their divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asks: which model, where, for which work; and which engines may run it.

    ``pins`` fixes keys of the candidate, ``layouts`` tensors.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    engines: tuple[Engine, ...]
    pins: Pins = field(default_factory=dict[str, Any])
    layouts: tuple[Pin, ...] = ()
    calibration: Calibration | None = None
    extra_rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a cluster whose divisors nobody could enumerate."""
        most, name = MOST_RANKS // self.cluster.ranks_per_node, self.cluster.name
        require((self.cluster.num_nodes <= most, "nodes", f"a search takes at most {most} nodes of {name}"))

    @property
    def constants(self) -> Calibration:
        """The calibration that is used: one's own, or that of the cluster."""
        return self.calibration or built_in(self.cluster.name)

    def plan(self, candidate: Candidate, engine: Engine, cutting: Cutting | None = None) -> Plan:
        """Return the plan of a candidate with its prediction and its tables: those of its best cutting, or of another.

        Its provenance names no time and no path.
        """
        faults = self.pin_faults(candidate)
        if faults:
            raise InputError(faults)
        used = cutting or self.cutting(candidate, engine)
        real = cut_atoms(candidate, self.model)
        blocks = CutBlocks(step=self.question(candidate).step, cutting=used, atoms=real)
        return with_tables(self.outline(candidate, engine, blocks), used)

    def outline(self, candidate: Candidate, engine: Engine, blocks: CutBlocks) -> Plan:
        """Return the plan of a candidate whose blocks are these with its prediction, but without tables."""
        origin = {"autoshard": __version__, **carried(self.constants), "model": self.model.source}
        plan = build_plan(candidate, self.model, self.cluster, self.workload, engine, provenance=origin)
        return predicted(plan, self.constants, blocks)

    def pin_faults(self, candidate: Candidate) -> tuple[Fault, ...]:
        """Say which pinned tensors a candidate cannot keep to."""
        if not self.layouts:
            return ()
        from autoshard.search.pinned import pin_faults  # most searches have no pins, and start sooner without

        return pin_faults(self.question(candidate), candidate, self.layouts)

    def cutting(self, candidate: Candidate, engine: Engine) -> Cutting:
        """Return the best cutting of a candidate's operations."""
        terms = Terms(engine=engine, sequence_parallel=candidate.sequence_parallel, pins=self.layouts)
        return solved_cutting(self.question(candidate), candidate, terms)

    def question(self, candidate: Candidate) -> Question:
        """Return what the cost model is asked about candidates with these kernels."""
        return Question(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            kernels=candidate.kernels or self.cluster.kernels,
            calibration=self.constants,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer: plans that fit, fastest first; if there is none, the legal one that misses memory by least."""

    plans: tuple[Plan, ...]
    nearest_miss: Plan | None
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """A space and what the Rules that apply say about it: truth values by Rule, layout and kind of recompute."""

    space: Space
    rules: tuple[Rule, ...]
    allowed: Any

    @property
    def legal(self) -> Any:
        """Which candidates every Rule allows, by layout and kind of recompute."""
        return self.allowed.all(axis=0)

    def refusals(self, request: Request) -> tuple[Refusal, ...]:
        """Count what each Rule refuses, with its words about the candidate that has least else against it."""
        against = (~self.allowed).sum(axis=0).reshape(-1)
        found: list[Refusal] = []
        for rule, allowed in zip(self.rules, self.allowed, strict=True):
            refused = np.flatnonzero(~allowed)
            if len(refused):
                mildest = _candidate(self.space, int(refused[np.argmin(against[refused])]))
                columns = Columns.of(mildest, request.model, request.cluster, request.workload, self.space.engine)
                num_layouts = int((~allowed).any(axis=1).sum())
                found.append(Refusal(rule_id=rule.id, num_layouts=num_layouts, example=rule.message(columns)))
        return tuple(found)


def judge_space(request: Request, engine: Engine) -> Ruled:
    """Enumerate all layouts for an engine and ask every Rule about all of them."""
    space = whole_space(request.model, request.cluster, request.workload, engine, request.pins)
    kinds = [
        space.columns(request.model, request.cluster, request.workload, kind) for kind in range(len(space.recomputes))
    ]
    rules = tuple(rule for rule in (*all_rules(), *request.extra_rules) if rule.applies(kinds[0]))
    allowed = np.empty((len(rules), space.num_layouts, len(kinds)), dtype=bool)
    for number, rule in enumerate(rules):
        # A Rule of autoshard names all keys that it judges; one of the user's is asked about every candidate.
        varies = "recompute" in rule.subject or rule in request.extra_rules
        for kind, columns in enumerate(kinds):
            allowed[number, :, kind] = rule.allows(columns) if varies or kind == 0 else allowed[number, :, 0]
    return Ruled(space=space, rules=rules, allowed=allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outlined:
    """A plan without tables, and the cutting that it was priced with."""

    plan: Plan
    cutting: Cutting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one engine can do: as ``Found``."""

    plans: tuple[_Outlined, ...]
    nearest_miss: Plan | None
    certificate: Certificate


def search(request: Request, num_plans: int = 1) -> Found:
    """Price every legal candidate of every engine and return the fastest that fit; the best one with its tables."""
    answers = _answers(request, num_plans)
    ordered = sorted(
        (found for answer in answers for found in answer.plans), key=lambda found: _step_time_s(found.plan)
    )
    misses = [answer.nearest_miss for answer in answers if answer.nearest_miss]
    full = [with_tables(found.plan, found.cutting) for found in ordered[:1]]
    return Found(
        plans=(*full, *(found.plan for found in ordered[1:num_plans])),
        nearest_miss=None if full else min(misses, key=_peak_bytes, default=None),
        certificate=reduce(Certificate.plus, (answer.certificate for answer in answers), NOTHING_LOOKED_AT),
    )


def _answers(request: Request, num_plans: int) -> list[_Answer]:
    """Ask every engine; one that cannot run what is pinned leaves the answer to the others."""
    answers: list[_Answer] = []
    faults: list[InputError] = []
    for engine in request.engines:
        try:
            answers.append(_search_engine(request, engine, num_plans))
        except InputError as fault:
            faults.append(fault)
    if not answers:
        raise faults[0]
    return answers


def plan_at(request: Request, candidate: Candidate) -> Plan:
    """Return the plan of exactly one candidate, legal or not, as long as it has a shape."""
    return request.plan(*resolved(request, candidate))


def resolved(request: Request, candidate: Candidate) -> tuple[Candidate, Engine]:
    """Return the first engine that may run a candidate, or else the first, and the candidate with its kernels."""
    choices: list[tuple[Candidate, Engine]] = [
        (_with_kernels(request, candidate, engine), engine) for engine in request.engines
    ]
    legal = (choice for choice in choices if not rejections_of(request, *choice))
    return next(legal, choices[0])


def rejections_of(request: Request, candidate: Candidate, engine: Engine) -> tuple[Rejection, ...]:
    """Return every reason of the Rules against a candidate."""
    facts = (request.model, request.cluster, request.workload)
    return rejections(candidate, *facts, engine, extra_rules=request.extra_rules)


def _with_kernels(request: Request, candidate: Candidate, engine: Engine) -> Candidate:
    kernels = candidate.kernels or default_kernels(request.cluster, engine)
    return replace(candidate, kernels=None if kernels == request.cluster.kernels else kernels)


def _search_engine(request: Request, engine: Engine, num_plans: int) -> _Answer:
    ruled = judge_space(request, engine)
    some = ruled.legal.any(axis=1) & _keeps_pins(request, ruled)
    space, legal = ruled.space.keep(some), ruled.legal[some]
    if not space.num_layouts:
        return _Answer(plans=(), nearest_miss=None, certificate=_certificate(request, ruled, legal, 0, 0))
    priced = Pool(request.question(space.base), space, legal, request.layouts).settled(num_plans)
    legal = priced.legal
    fits = legal & (priced.peak_bytes <= request.cluster.rank_memory_bytes)

    def outlined(row: int, recompute: int) -> _Outlined:
        blocks = priced.blocks(row, recompute)
        return _Outlined(plan=request.outline(space.at(row, recompute), engine, blocks), cutting=blocks.cutting)

    smallest = divmod(int(np.argmin(np.where(legal, priced.peak_bytes, np.inf))), len(space.recomputes))
    return _Answer(
        plans=tuple(outlined(*place) for place in fastest(space, priced.time_s, priced.peak_bytes, fits, num_plans)),
        nearest_miss=None if fits.any() else outlined(*smallest).plan,
        certificate=_certificate(request, ruled, legal, int(fits.sum()), len(priced.solved)),
    )


def _keeps_pins(request: Request, ruled: Ruled) -> Any:
    """Say which layouts can keep to pinned tensors; where no legal one can, say why the first cannot."""
    legal, space = ruled.legal.any(axis=1), ruled.space
    if not request.layouts:
        return np.ones_like(legal)
    reasons = {int(row): request.pin_faults(space.at(int(row), 0)) for row in np.flatnonzero(legal)}
    if reasons and all(reasons.values()):
        raise InputError(next(iter(reasons.values())))
    return np.array([row in reasons and not reasons[row] for row in range(space.num_layouts)], dtype=bool)


def _certificate(request: Request, ruled: Ruled, legal: Any, num_fitting: int, num_tables: int) -> Certificate:
    return Certificate(
        num_layouts=ruled.space.num_layouts,
        refusals=ruled.refusals(request),
        num_legal_layouts=len(legal),
        num_candidates=int(legal.sum()),
        num_fitting=num_fitting,
        num_tables=num_tables,
    )


def _candidate(space: Space, flat: int) -> Candidate:
    return space.at(*divmod(flat, len(space.recomputes)))


def _step_time_s(plan: Plan) -> float:
    assert plan.prediction, "a found plan has its prediction"
    return plan.prediction.step_time_s


def _peak_bytes(plan: Plan) -> int:
    assert plan.prediction, "a found plan has its prediction"
    return plan.prediction.peak_bytes
