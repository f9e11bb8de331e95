"""The best cuts of a whole model at one point of the outer search, under the Rules of its axes and engine."""

from collections.abc import Mapping

from autoshard.cost.rings import Number, Ring, mesh_ring
from autoshard.cost.setting import Question
from autoshard.graph.decoder import dim_sizes
from autoshard.layout.collective import Collective
from autoshard.layout.cutting import Cutting
from autoshard.layout.layout import Cuts
from autoshard.layout.legal import cut_operations, together
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import ATOMS
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Engine
from autoshard.plan.rules.strategy import StrategyRule, strategy_rules
from autoshard.plan.tables import residual_cuts
from autoshard.search.operators import solve
from autoshard.search.problem import OperatorProblem, Seconds, op_places
from autoshard.spec.mesh import Mesh

KINDS = ("embed", "layer", "head")


def solved_cutting(question: Question, candidate: Candidate, engine: Engine, *, sequence_parallel: bool) -> Cutting:
    """Return the cheapest cutting of a candidate's blocks; it says as well what dp, cp and ep would cut there.

    With tp 1 it may be asked for either way of ``sequence_parallel``.
    """
    rules = strategy_rules(engine, sequence_parallel=sequence_parallel)
    boundary = residual_cuts(sequence_parallel)
    problems = {kind: operator_problem(question, candidate, kind, rules, boundary) for kind in KINDS}
    cuts = {kind: solve(problem).cuts for kind, problem in problems.items()}
    return Cutting.of({kind: _completed(problem, cuts[kind]) for kind, problem in problems.items()}, boundary)


def _completed(problem: OperatorProblem, cuts: Mapping[str, Cuts]) -> Mapping[str, Cuts]:
    """Put atoms that are of size 1 here where the Rules allow them only one place, in the order of the mesh."""
    found: dict[str, Cuts] = {}
    for op in cut_operations(problem.block):
        mine = {dim: list(cut) for dim, cut in cuts[op.name].items()}
        for atom in problem.atoms.keys() - set(problem.real_atoms):
            places = op_places(problem.block, op, atom, problem.rules)
            if len(places) == 1 and places[0]:
                mine.setdefault(places[0], []).append(atom)
        ordered = {dim: tuple(sorted(atoms, key=ATOMS.index)) for dim, atoms in mine.items()}
        tied = {dim: together(ordered, others) for dim, others in op.kind.tied_dims()}
        found[op.name] = {**ordered, **tied}
    return found


def operator_problem(
    question: Question, candidate: Candidate, kind: str, rules: tuple[StrategyRule, ...], boundary: Cuts
) -> OperatorProblem:
    """Return what the solver is asked about one block of a candidate."""
    mesh = mesh_of(candidate, question.model, question.cluster)
    atoms = {atom: mesh.size(atom) for atom in ATOMS}
    real = {atom for atom, size in atoms.items() if size > 1}
    return OperatorProblem(
        block=question.step.block(kind, Recompute()),
        sizes=dim_sizes(question.model, question.workload, candidate.mbs * candidate.dp),
        atoms=atoms,
        boundary={dim: tuple(atom for atom in cut if atom in real) for dim, cut in boundary.items()},
        rates=question.rates,
        seconds=_seconds(question, mesh),
        num_micro_batches=max(1, question.workload.global_batch // (candidate.dp * candidate.mbs)),
        keeps_gathered=question.step.platform.keeps_gathered,
        rules=rules,
    )


def _seconds(question: Question, mesh: Mesh) -> Seconds:
    """Price collectives on the links of a mesh."""
    rings: dict[tuple[str, ...], Ring] = {}

    def seconds(collective: Collective, message_bytes: float) -> Number:
        atoms = tuple(sorted(collective.atoms, key=ATOMS.index))
        if atoms not in rings:
            rings[atoms] = mesh_ring(question.cluster, mesh, atoms, question.calibration.link_efficiency)
        return rings[atoms].time_s(collective, message_bytes)

    return seconds
