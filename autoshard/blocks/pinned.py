"""Pinned layouts in a search: which candidates can keep to them, and what they fix of the operations."""

from collections.abc import Iterator, Mapping
from functools import cache

from autoshard.cost.setting import Question
from autoshard.errors import Fault, InputError
from autoshard.layout.layout import show_atoms, whole_axes
from autoshard.layout.pin import BOUNDARY, Pin, PinConstraints, pin_constraints
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate, boundary_cuts
from autoshard.plan.lowering import ATOMS, StepGraph
from autoshard.plan.nxd.forms import plan_forms
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs


def pin_faults(question: Question, candidate: Candidate, pins: tuple[Pin, ...]) -> tuple[Fault, ...]:
    """Return the pins that a candidate cannot keep: dims smaller than their parts, another layout between blocks."""
    if not pins:
        return ()
    mesh = mesh_of(candidate, question.model, question.cluster)
    atoms = {atom: mesh.size(atom) for atom in ATOMS}
    sizes = question.step.sizes(candidate.mbs * candidate.dp)
    found = [fault.under(str(pin)) for pin in pins for fault in pin.layout.faults(atoms, sizes)]
    found += [fault for pin in pins for fault in _order_faults(pin, atoms)]
    return tuple(dict.fromkeys((*found, *_boundary_faults(question.step, candidate, atoms, pins))))


def _order_faults(pin: Pin, atoms: Mapping[str, int]) -> Iterator[Fault]:
    """Yield the dims whose atoms stand in another order than tables can have."""
    for dim, cut in pin.layout.dims:
        real = [atom for atom in cut if atoms.get(atom, 1) > 1]  # unknown ones are another fault
        right = sorted(real, key=ATOMS.index)
        if real != right:
            message = f"several atoms cut a dim in the mesh's order. Write {dim}/{show_atoms(whole_axes(right, atoms))}"
            yield Fault(where=str(pin), message=message)


def _boundary_faults(
    step: StepGraph, candidate: Candidate, atoms: Mapping[str, int], pins: tuple[Pin, ...]
) -> list[Fault]:
    """Return the pins of another layout between blocks."""
    sp = candidate.sequence_parallel
    between = boundary_cuts(candidate.boundary, sequence_parallel=sp)
    found: list[Fault] = []
    for dim, cut in constraints(step, pins).cuts.get(BOUNDARY, {}).items():
        mine = [atom for atom in cut.atoms if atoms[atom] > 1]
        fixed = [atom for atom in between.get(dim, ()) if atoms[atom] > 1]
        if mine != fixed:
            how = f"{dim}/{show_atoms(whole_axes(fixed, atoms))}" if fixed else f"{dim} whole"
            other = "another boundary" if candidate.boundary else f"--fix sp={str(not sp).lower()}"
            message = f"between blocks lies {how}. Pin it so, leave the pin out, or try {other}"
            found.append(Fault(where=str(cut.pin), message=message))
    return found


@cache
def constraints(step: StepGraph, pins: tuple[Pin, ...]) -> PinConstraints:
    """Return what pins fix of the blocks of a step; one InputError holds every fault and every conflict."""
    return pin_constraints(step.graph, pins)


def require_forms(plan: Plan) -> None:
    """Refuse a pinned table with an entry whose collectives no layer of NxD executes."""
    _, faults = plan_forms(plan, plan_programs(plan))
    if faults:
        raise InputError(Fault(where=one.where, message=f"with what is pinned, {one.message}") for one in faults)
