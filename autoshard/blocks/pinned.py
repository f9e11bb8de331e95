"""Pinned layouts in a search: which candidates can keep to them, and what they fix of the operations."""

from functools import cache

from autoshard.cost.setting import Question
from autoshard.errors import Fault, InputError, require
from autoshard.layout.layout import show_atoms, whole_axes
from autoshard.layout.pin import BOUNDARY, Pin, PinConstraints, pin_constraints
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate, boundary_cuts
from autoshard.plan.lowering import ATOMS, StepGraph
from autoshard.plan.nxd.forms import plan_forms
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs, step_graph_of, table_setting
from autoshard.plan.verify import tied_misfits


def pin_faults(question: Question, candidate: Candidate, pins: tuple[Pin, ...]) -> tuple[Fault, ...]:
    """Return the pins that a candidate cannot keep: dims smaller than their parts, another layout between blocks.

    Tables have the atoms of a dim in the mesh's order.
    """
    mesh = mesh_of(candidate, question.model, question.cluster)
    atoms = {atom: mesh.size(atom) for atom in ATOMS}
    sizes = question.step.sizes(candidate.mbs * candidate.dp)
    faults = [fault.under(str(pin)) for pin in pins for fault in pin.layout.faults(atoms, sizes)]
    for pin, (dim, cut) in ((stated, place) for stated in pins for place in stated.layout.dims):
        real = [atom for atom in cut if atoms.get(atom, 1) > 1]  # unknown ones are another fault
        right = sorted(real, key=ATOMS.index)
        if real != right:
            message = f"several atoms cut a dim in the mesh's order. Write {dim}/{show_atoms(whole_axes(right, atoms))}"
            faults.append(Fault(where=str(pin), message=message))
    sp = candidate.sequence_parallel
    between = boundary_cuts(candidate.boundary, sequence_parallel=sp)
    for dim, cut in constraints(question.step, pins).cuts.get(BOUNDARY, {}).items() if pins else ():
        fixed = [atom for atom in between.get(dim, ()) if atoms[atom] > 1]
        if fixed != [atom for atom in cut.atoms if atoms[atom] > 1]:
            how = f"{dim}/{show_atoms(whole_axes(fixed, atoms))}" if fixed else f"{dim} whole"
            remedy = "another boundary" if candidate.boundary else f"--fix sp={str(not sp).lower()}"
            message = f"between blocks lies {how}. Pin it so, leave the pin out, or try {remedy}"
            faults.append(Fault(where=str(cut.pin), message=message))
    return tuple(dict.fromkeys(faults))


@cache
def constraints(step: StepGraph, pins: tuple[Pin, ...]) -> PinConstraints:
    """Return what pins fix of the blocks of a step; one InputError holds every fault and every conflict."""
    return pin_constraints(step.graph, pins)


def require_alike(plan: Plan) -> None:
    """Refuse a pinned table that cuts a weight otherwise than another block with which that is shared."""
    if not plan.model.tied_embeddings:
        return
    misfits = tied_misfits(step_graph_of(plan).graph, plan_programs(plan), table_setting(plan).atoms)
    require(
        *((False, "pins", f"with what is pinned, {misfit}: a pin of the weight holds for both") for misfit in misfits)
    )


def require_forms(plan: Plan) -> None:
    """Refuse a pinned table with an entry whose collectives no layer of NxD executes."""
    _, faults = plan_forms(plan, plan_programs(plan))
    if faults:
        raise InputError(Fault(where=fault.where, message=f"with what is pinned, {fault.message}") for fault in faults)
