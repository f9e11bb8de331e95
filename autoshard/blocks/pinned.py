"""Pinned layouts in a search: what they leave to the solver, and which candidates can keep to them."""

from collections.abc import Iterator, Mapping
from functools import cache

from autoshard.blocks.places import Held
from autoshard.cost.setting import Question
from autoshard.errors import Fault, InputError
from autoshard.layout.claims import Claim, Claims, claims_of
from autoshard.layout.layout import show_atoms, whole_axes
from autoshard.layout.pin import Pin
from autoshard.layout.sites import BOUNDARY, Net
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate, boundary_cuts
from autoshard.plan.lowering import ATOMS, Step
from autoshard.plan.nxd.forms import plan_forms
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs


def held_by(step: Step, kind: str, pins: tuple[Pin, ...]) -> Mapping[str, Held]:
    """Return what pins fix of every operation of a block; every fault and conflict of the pins is told at once."""
    claims = _claims(step, pins)
    if claims is None:
        return {}
    found: dict[str, Held] = {}
    for site in {*claims.cuts, *claims.sums}:
        if site.startswith(f"{kind}."):
            mine = claims.cuts.get(site, {})
            origin = " and ".join(dict.fromkeys(str(claim.pin) for claim in mine.values()))
            cuts = {dim: claim.atoms for dim, claim in mine.items()}
            found[site.removeprefix(f"{kind}.")] = Held(cuts=cuts, sums=claims.sums.get(site, {}), origin=origin)
    return found


def pin_faults(question: Question, candidate: Candidate, pins: tuple[Pin, ...]) -> tuple[Fault, ...]:
    """Say which pins a candidate cannot keep to: dims smaller than their parts, another layout between blocks."""
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


def _boundary_faults(step: Step, candidate: Candidate, atoms: Mapping[str, int], pins: tuple[Pin, ...]) -> list[Fault]:
    """Say where a pin asks for another layout between blocks."""
    claims, sp = _claims(step, pins), candidate.sequence_parallel
    between = boundary_cuts(candidate.boundary, sequence_parallel=sp)
    asked: Mapping[str, Claim] = claims.cuts.get(BOUNDARY, {}) if claims else {}
    found: list[Fault] = []
    for dim, claim in asked.items():
        mine = [atom for atom in claim.atoms if atoms[atom] > 1]
        fixed = [atom for atom in between.get(dim, ()) if atoms[atom] > 1]
        if mine != fixed:
            how = f"{dim}/{show_atoms(whole_axes(fixed, atoms))}" if fixed else f"{dim} whole"
            other = "another boundary" if candidate.boundary else f"--fix sp={str(not sp).lower()}"
            message = f"between blocks lies {how}. Pin it so, leave the pin out, or try {other}"
            found.append(Fault(where=str(claim.pin), message=message))
    return found


@cache
def _claims(step: Step, pins: tuple[Pin, ...]) -> Claims | None:
    """Read pins for any mesh: every atom may cut something."""
    if not pins:
        return None
    return claims_of(Net.of(step.graph), dict.fromkeys(ATOMS, 2), None, pins)


def require_forms(plan: Plan) -> None:
    """Refuse a table that keeps to what is pinned, and in which some entry then sends what no layer of NxD sends."""
    _, faults = plan_forms(plan, plan_programs(plan))
    if faults:
        raise InputError(Fault(where=one.where, message=f"with what is pinned, {one.message}") for one in faults)
