"""From a question to the best plan, with what was looked at, what was refused and why."""

from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any, Literal

import numpy as np

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.cost.calibration import Calibration, built_in
from autoshard.cost.predict import predicted
from autoshard.cost.provenance import calibration_entries, term_entries
from autoshard.cost.setting import Question
from autoshard.cost.sharded import CutBlocks
from autoshard.cost.terms import USER_TERMS, CostTerm, outer_point
from autoshard.errors import Fault, InputError, require
from autoshard.layout.cutting import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import Candidate
from autoshard.plan.certificate import NOTHING_LOOKED_AT, Certificate
from autoshard.plan.extensions import extension_entries
from autoshard.plan.plan import Plan
from autoshard.plan.rules.check import USER_RULES, rejections
from autoshard.plan.rules.columns import Columns, Engine
from autoshard.plan.rules.rule import Rejection, Rule
from autoshard.plan.tables import with_tables
from autoshard.search.exact_ranges import Effort
from autoshard.search.goals import Fastest, Goal, Smallest
from autoshard.search.judging import Ruled, judge_space
from autoshard.search.pool import Pool
from autoshard.search.progress import Progress, Watch
from autoshard.search.solutions import Solution
from autoshard.search.space import Pins, default_kernels
from autoshard.spec.cluster import Cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload
from autoshard.version import __version__

Objective = Literal["time", "memory", "dollars"]
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
    # Of the user's own, beside those of autoshard:
    terms: tuple[CostTerm, ...] = field(default_factory=lambda: tuple(USER_TERMS))
    extra_rules: tuple[Rule, ...] = field(default_factory=lambda: tuple(USER_RULES))
    effort: Effort = field(default_factory=Effort)
    objective: Objective = "time"
    memory_bytes: float | None = None  # that a rank may fill, if not all that it has
    other_lnc: tuple[Cluster, ...] = ()  # the same nodes under other logical cores, searched as well

    def __post_init__(self) -> None:
        """Refuse a cluster whose divisors nobody could enumerate, and terms that nobody could tell apart."""
        most, name = MOST_RANKS // self.cluster.ranks_per_node, self.cluster.name
        terms = [term.name for term in self.terms]
        twice = sorted({term for term in terms if terms.count(term) > 1})
        require(
            (self.cluster.num_nodes <= most, "nodes", f"a search takes at most {most} nodes of {name}"),
            (not twice, "terms", f"two of the name {', '.join(twice)}; each needs its own"),
        )

    def on(self, cluster: Cluster) -> "Request":
        """Ask about one cluster only."""
        return replace(self, cluster=cluster, other_lnc=())

    def with_lnc_of(self, lnc: int | None) -> "Request":
        """Ask about the cluster with these logical cores, if they are named and there is one."""
        clusters = {cluster.lnc: cluster for cluster in (self.cluster, *self.other_lnc)}
        return self.on(clusters.get(lnc, self.cluster))

    @property
    def goal(self) -> Goal:
        """What is minimised. On one cluster dollars are time."""
        capacity = self.cluster.rank_memory_bytes if self.memory_bytes is None else self.memory_bytes
        return Smallest(capacity=capacity) if self.objective == "memory" else Fastest(capacity=capacity)

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
        made = with_tables(self.outline(candidate, engine, blocks), used)
        if self.layouts and engine == "nxd":
            from autoshard.blocks.pinned import require_forms

            require_forms(made)
        return made

    def outline(self, candidate: Candidate, engine: Engine, blocks: CutBlocks) -> Plan:
        """Return the plan of a candidate whose blocks are these with its prediction, but without tables."""
        facts = (self.model, self.cluster, self.workload, engine)
        own = term_entries(self.terms, Columns.of(outer_point(candidate), *facts))
        origin = {"autoshard": __version__, **calibration_entries(self.constants), **own, **extension_entries()}
        origin["model"] = self.model.source
        plan = build_plan(candidate, self.model, self.cluster, self.workload, engine, provenance=origin)
        return predicted(plan, self.constants, blocks)

    def pin_faults(self, candidate: Candidate) -> tuple[Fault, ...]:
        """Say which pinned tensors a candidate cannot keep to."""
        if not self.layouts:
            return ()
        from autoshard.blocks.pinned import pin_faults  # most searches have no pins, and start sooner without

        return pin_faults(self.question(candidate), candidate, self.layouts)

    def cutting(self, candidate: Candidate, engine: Engine) -> Cutting:
        """Return the best cutting of a candidate's operations."""
        return solved_cutting(self.question(candidate), candidate, Terms.of(candidate, engine, self.layouts))

    def question(self, candidate: Candidate) -> Question:
        """Return what the cost model is asked about candidates with these kernels."""
        return Question(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            kernels=candidate.kernels or self.cluster.kernels,
            calibration=self.constants,
            terms=self.terms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer: plans that fit, fastest first; if there is none, the legal one that misses memory by least."""

    plans: tuple[Plan, ...]
    nearest_miss: Plan | None
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Solved:
    """A solution, and the question and engine that it answers."""

    solution: Solution
    request: Request
    engine: Engine

    def whole(self) -> Plan:
        """Return the plan with its tables."""
        cutting = self.solution.group.family.asked.cutting
        return self.request.plan(self.solution.candidate, self.engine, cutting)

    def outline(self) -> Plan:
        """Return the plan without tables."""
        family, candidate = self.solution.group.family, self.solution.candidate
        real = cut_atoms(candidate, self.request.model)
        blocks = CutBlocks(step=family.question.step, cutting=family.asked.cutting, atoms=real)
        return self.request.outline(candidate, self.engine, blocks)

    @property
    def order(self) -> tuple[float, ...]:
        """Where it stands: as the solutions of its engine do."""
        return self.solution.order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one engine can do: as ``Found``."""

    plans: tuple[_Solved, ...]
    nearest_miss: Plan | None
    certificate: Certificate


def on(progress: Progress) -> str:
    """Go on, whatever happens."""
    return ""


def search(request: Request, num_plans: int = 1, watch: Watch = on) -> Found:
    """Price every legal candidate of every engine and return the fastest that fit; the best one with its tables."""
    answers = _answers(request, num_plans, watch)
    ordered = sorted((found for answer in answers for found in answer.plans), key=lambda found: found.order[:3])
    misses = [answer.nearest_miss for answer in answers if answer.nearest_miss]
    full = [found.whole() for found in ordered[:1]]
    return Found(
        plans=(*full, *(found.outline() for found in ordered[1:num_plans])),
        nearest_miss=None if full else min(misses, key=_peak_bytes, default=None),
        certificate=reduce(Certificate.plus, (answer.certificate for answer in answers), NOTHING_LOOKED_AT),
    )


def _answers(request: Request, num_plans: int, watch: Watch) -> list[_Answer]:
    """Ask every engine; one that cannot run what is pinned leaves the answer to the others."""
    answers: list[_Answer] = []
    faults: list[InputError] = []
    for cluster, engine in product((request.cluster, *request.other_lnc), request.engines):
        ended = answers[-1].certificate.stopped if answers else ""
        try:
            # What was stopped stays stopped: of the other engines it is only known what they cannot be better than.
            answers.append(_search_engine(request.on(cluster), engine, num_plans, _ending(ended) if ended else watch))
        except InputError as fault:
            faults.append(fault)
    if not answers:
        raise faults[0]
    return answers


def _ending(ended: str) -> Watch:
    """Return a watch that stops at once, for a reason that is known."""

    def end(progress: Progress) -> str:
        return ended

    return end


def _unknowing(watch: Watch) -> Watch:
    """Return a watch over a search whose values are not those that are asked for."""

    def see(progress: Progress) -> str:
        return watch(replace(progress, best=np.inf, bound=np.inf))

    return see


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


def _search_engine(request: Request, engine: Engine, num_plans: int, watch: Watch) -> _Answer:
    ruled = _keeping_pins(request, judge_space(request, engine))
    if not ruled.legal:
        return _Answer(plans=(), nearest_miss=None, certificate=_certificate(request, ruled, None, ""))

    def explored(goal: Goal, count: int, seen: Watch) -> tuple[Pool, str]:
        question = request.question(ruled.space.base)
        pool = Pool(question, ruled, goal, request.effort, request.layouts)
        return pool, pool.settled(count, seen)

    pool, ended = explored(request.goal, num_plans, watch)
    miss = None
    if not pool.solutions and not ended:
        smallest, _ = explored(Smallest(capacity=np.inf), 1, _unknowing(watch))
        found = [_Solved(solution=one, request=request, engine=engine) for one in smallest.solutions[:1]]
        miss = found[0].outline() if found else None
    plans = tuple(_Solved(solution=one, request=request, engine=engine) for one in pool.solutions[:num_plans])
    return _Answer(plans=plans, nearest_miss=miss, certificate=_certificate(request, ruled, pool, ended))


def _keeping_pins(request: Request, ruled: Ruled) -> Ruled:
    """Leave out layouts that cannot keep to pinned tensors; where no legal one can, say why the first cannot."""
    if not request.layouts or not ruled.legal:
        return ruled
    layouts = np.unique(np.concatenate([one.variant.layouts for one in ruled.legal])).tolist()
    reasons = {row: request.pin_faults(ruled.space.at(row, 0)) for row in layouts}
    if all(reasons.values()):
        raise InputError(next(iter(reasons.values())))
    return ruled.only(np.array([row in reasons and not reasons[row] for row in range(ruled.space.num_layouts)]))


def _certificate(request: Request, ruled: Ruled, pool: Pool | None, ended: str) -> Certificate:
    value = min((one.value for one in pool.solutions), default=np.inf) if pool else np.inf
    return Certificate(
        num_points=ruled.num_points,
        refusals=ruled.refusals,
        num_legal=ruled.num_legal,
        num_too_large=pool.num_too_large if pool else 0,
        num_bounded=max(0, ruled.num_legal - pool.num_too_large - pool.num_solved) if pool else 0,
        num_solved=pool.num_solved if pool else 0,
        num_fitting=pool.num_fitting if pool else 0,
        num_tables=pool.num_tables if pool else 0,
        value=float(value),
        bound=float(min(value, pool.bound)) if pool else np.inf,
        ended=ended or "complete",
        objective=request.objective,
    )


def _peak_bytes(plan: Plan) -> int:
    assert plan.prediction, "a found plan has its prediction"
    return plan.prediction.peak_bytes
