"""What a user asks: which model, where, for which work; and the plan of any candidate of that."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration, calibration_entries
from autoshard.cost.predict import predicted
from autoshard.cost.setting import Question
from autoshard.cost.sharded import CutBlocks
from autoshard.cost.terms import CostTerm, term_entries, user_terms
from autoshard.errors import Fault, InputError, require
from autoshard.extensions import EXTENSIONS
from autoshard.layout.layout import Cutting
from autoshard.layout.pin import Pin
from autoshard.plan.build import build_plan, cut_atoms
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.rules.check import rejections, user_rules
from autoshard.plan.rules.columns import Engine
from autoshard.plan.rules.rule import Rejection, Rule
from autoshard.plan.tables import with_tables
from autoshard.search.bound.space import Pins, default_kernels
from autoshard.search.fill.stage_filling import Effort, Goal
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.recipe import HEADROOM, headroom_check
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
    terms: tuple[CostTerm, ...] = field(default_factory=user_terms)
    extra_rules: tuple[Rule, ...] = field(default_factory=user_rules)
    effort: Effort = field(default_factory=Effort)
    objective: Objective = "time"
    headroom: float = HEADROOM  # share of a rank's memory that plans leave free
    memory_bytes: float | None = None  # that a rank may fill, whatever it has and the headroom is
    other_lnc: tuple[Cluster, ...] = ()  # the same nodes under other logical cores, searched as well
    defaults: str = field(default="", compare=False)  # where length and batch are from, if the user left them open

    def __post_init__(self) -> None:
        """Refuse a cluster whose divisors nobody could enumerate, and terms that nobody could tell apart."""
        most, name = MOST_RANKS // self.cluster.ranks_per_node, self.cluster.name
        terms = [term.name for term in self.terms]
        twice = sorted({term for term in terms if terms.count(term) > 1})
        require(
            (self.cluster.num_nodes <= most, "nodes", f"a search takes at most {most} nodes of {name}"),
            headroom_check(self.headroom),
            (not twice, "terms", f"two of the name {', '.join(twice)}; each needs its own"),
        )

    def with_lnc_of(self, lnc: int | None) -> "Request":
        """Ask about the cluster with these logical cores, if they are named and there is one."""
        clusters = {cluster.lnc: cluster for cluster in (self.cluster, *self.other_lnc)}
        return replace(self, cluster=clusters.get(lnc, self.cluster), other_lnc=())

    def goal(self, kernels: str) -> Goal:
        """Return what is minimised. On one cluster dollars are time."""
        objective = "memory" if self.objective == "memory" else "time"
        return Goal(objective=objective, capacity=self.capacity_bytes(kernels), effort=self.effort)

    def capacity_bytes(self, kernels: str) -> float:
        """Return what a plan with some kernels may fill of a rank's memory."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return load_kernels(kernels).capacity_bytes(self.cluster.rank_memory_bytes, self.headroom)

    @property
    def constants(self) -> Calibration:
        """The calibration that is used: one's own, or that of the cluster and its kernels."""
        return self.constants_with(cast(str, self.pins.get("kernels", self.cluster.kernels)))

    def constants_with(self, kernels: str) -> Calibration:
        """Return the calibration for some kernels, where it is not one's own."""
        return self.calibration or built_in(self.cluster.name, kernels, chip=self.cluster.chip.name)

    def plan(
        self, candidate: Candidate, engine: Engine, cutting: Cutting | None = None, *, tables: bool = True
    ) -> Plan:
        """Return the plan of a candidate with its prediction and tables, if wanted: of its best cutting, or of another.

        Its provenance names no time and no path.
        """
        faults = self.pin_faults(candidate)
        if faults:
            raise InputError(faults)
        used = cutting or self.cutting(candidate, engine)
        facts = (self.model, self.cluster, self.workload, engine)
        user_terms = term_entries(self.terms, candidate, *facts)
        constants = self.question(candidate).calibration
        origin = {"autoshard": __version__, **calibration_entries(constants), **user_terms, **EXTENSIONS.entries()}
        origin["model"] = self.model.source
        atoms = cut_atoms(candidate, self.model)
        blocks = CutBlocks(step=self.question(candidate).step, cutting=used, atoms=atoms)
        bare = replace(build_plan(candidate, *facts, provenance=origin), headroom=self.headroom)
        plan = predicted(bare, constants, blocks)
        if not tables:
            return plan
        plan = with_tables(plan, used)
        if self.layouts:
            from autoshard.blocks.pinned import require_alike, require_forms

            require_alike(plan)
            if engine == "nxd":
                require_forms(plan)
        return plan

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
        kernels = candidate.kernels or self.cluster.kernels
        return Question(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            kernels=kernels,
            calibration=self.constants_with(kernels),
            terms=self.terms,
        )


def plan_at(request: Request, candidate: Candidate, *, even_refused: bool = False) -> Plan:
    """Return the plan of exactly one candidate; if the Rules refuse it, raise InputError unless ``even_refused``."""
    complete, engine = resolved(request, candidate)
    if not even_refused:
        require(*((False, "candidate", str(reason)) for reason in rejections_of(request, complete, engine)))
    return request.plan(complete, engine)


def resolved(request: Request, candidate: Candidate) -> tuple[Candidate, Engine]:
    """Return the first engine that may run a candidate, or else the first, and the candidate with its kernels."""
    choices: list[tuple[Candidate, Engine]] = []
    for engine in request.engines:
        kernels = candidate.kernels or default_kernels(request.cluster, engine)
        choices.append((replace(candidate, kernels=None if kernels == request.cluster.kernels else kernels), engine))
    return next((choice for choice in choices if not rejections_of(request, *choice)), choices[0])


def rejections_of(request: Request, candidate: Candidate, engine: Engine) -> tuple[Rejection, ...]:
    """Return every reason of the Rules against a candidate."""
    facts = (request.model, request.cluster, request.workload)
    return rejections(candidate, *facts, engine, extra_rules=request.extra_rules)
