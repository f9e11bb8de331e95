"""The teeth of the interpreter: whatever is changed in a lowered program must show."""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import settings

from autoshard.graph.op import Op, OpKind, Output
from autoshard.layout.layout import Collective
from autoshard.layout.legal import cut_operations
from autoshard.layout.program import Communicate, Compute, CountOnce, Program, Sum
from autoshard.spec.mesh import Mesh
from tests.layout.meaning import legal_cuts

NUM_MUTANTS = 600 if settings().max_examples >= 200 else 48
WORST_ERROR = 1e-9
ORDERED = ("all_gather", "reduce_scatter", "slice", "all_to_all")
OTHER_KINDS = {
    "all_gather": ("all_reduce",),
    "all_reduce": ("all_gather", "all_reduce_max", "reduce_scatter"),
    "all_reduce_max": ("all_reduce", "all_gather"),
    "reduce_scatter": ("all_reduce", "slice"),  # an all_reduce followed by a slice would be the same
    "all_to_all": ("all_gather", "slice"),
    "slice": ("reduce_scatter",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoil(OpKind):
    """What is no operation of the model: changes an array on its way."""

    change: Callable[[np.ndarray], np.ndarray]

    def infer(self, inputs):
        return (Output(dims=inputs[0].dims, dtype=inputs[0].dtype),)

    def evaluate(self, call, *arrays):
        return (self.change(arrays[0]),)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    sort: str
    how: str
    number: int  # of the instruction that it replaces
    instructions: tuple

    def of(self, program):
        before, after = program.instructions[: self.number], program.instructions[self.number + 1 :]
        return Program(instructions=(*before, *self.instructions, *after), results=program.results)

    def __str__(self):
        return f"{self.number}: {self.sort}, {self.how}"


def _spoil(reads, writes, change):
    op = Op(name="spoil", kind=Spoil(change=change), inputs=(reads.tensor,), outputs=(reads.tensor,), source="spoil")
    return Compute(op=op, cuts={}, reads=(reads,), writes=(writes,))


def _aside(value):
    return replace(value, name=f"{value.name}!")


def _size(mesh, atoms):
    return math.prod(mesh.size(atom) for atom in atoms)


def _same_size(mesh, atoms):
    """Yield other atoms over which a group is as large."""
    real = [name for name, size in mesh.axes if size > 1]
    for count in range(1, len(real) + 1):
        for other in itertools.permutations(real, count):
            if _size(mesh, other) == _size(mesh, atoms) and set(other) != set(atoms):
                yield other


def _collective_mutants(number, entry, mesh):
    made = entry.collective
    if _size(mesh, made.atoms) == 1:
        return
    twice = _spoil(_aside(entry.writes), entry.writes, lambda array: array * 2)
    found = [
        ("dropped", (_spoil(entry.reads, entry.writes, lambda array: array),)),
        ("doubled", (replace(entry, writes=_aside(entry.writes)), replace(entry, reads=_aside(entry.writes)))),
        ("twice as large", (replace(entry, writes=_aside(entry.writes)), twice)),
        *((sort, (replace(entry, collective=other),)) for sort, other in _others(made, entry.reads.layout, mesh)),
    ]
    for sort, instructions in found:
        if sort != "doubled" or made.kind != "all_reduce_max":  # the maximum of equal values is no other
            how = f"{entry.pass_} {entry.entry} {made}, now {instructions[-1]}"
            yield Mutant(sort=sort, how=how, number=number, instructions=instructions)


def _others(made, layout, mesh):
    yield from (("other atoms", replace(made, atoms=atoms)) for atoms in _same_size(mesh, made.atoms))
    if made.kind in ORDERED:
        orders = [order for order in itertools.permutations(made.atoms) if order != made.atoms]
        yield from (("other order", replace(made, atoms=order)) for order in orders)
    dims = [dim for dim, _ in layout.dims]
    for kind in OTHER_KINDS[made.kind]:
        if dims or kind.startswith("all_reduce"):
            dim = None if kind.startswith("all_reduce") else made.dim or dims[0]
            yield "other kind", Collective(kind=kind, dim=dim, atoms=made.atoms)
    rest = [dim for dim in dims if dim not in (made.dim, made.to_dim)]
    if made.dim:
        yield from (("other dim", replace(made, dim=dim)) for dim in rest)
    if made.to_dim:
        yield from (("other dim", replace(made, to_dim=dim)) for dim in rest)


def _ring_mutants(number, entry):
    hops = entry.ring
    for at, hop in enumerate(hops):
        for sort, ring in (("dropped", (*hops[:at], *hops[at + 1 :])), ("doubled", (*hops[:at], hop, *hops[at:]))):
            instructions = (replace(entry, ring=ring),)
            yield Mutant(sort=f"hop {sort}", how=f"{entry.op.name} {at}", number=number, instructions=instructions)


def _once_mutants(number, entry, mesh):
    if _size(mesh, entry.atoms) == 1:
        return
    found = [
        ("counted by all", _spoil(entry.reads, entry.writes, lambda array: array)),
        ("counted by none", _spoil(entry.reads, entry.writes, lambda array: 0 * array)),
        *(("counted over other atoms", replace(entry, atoms=atoms)) for atoms in _same_size(mesh, entry.atoms)),
    ]
    for sort, instruction in found:
        yield Mutant(sort=sort, how=f"{entry.reads.name}", number=number, instructions=(instruction,))


def _sum_mutants(number, entry):
    for at, value in enumerate(entry.reads):
        for sort, reads in (
            ("addend dropped", (*entry.reads[:at], *entry.reads[at + 1 :])),
            ("addend doubled", (*entry.reads, value)),
        ):
            yield Mutant(sort=sort, how=value.name, number=number, instructions=(replace(entry, reads=reads),))


def _mutants(program, mesh):
    for number, entry in enumerate(program.instructions):
        match entry:
            case Communicate():
                yield from _collective_mutants(number, entry, mesh)
            case CountOnce():
                yield from _once_mutants(number, entry, mesh)
            case Sum():
                yield from _sum_mutants(number, entry)
            case Compute(ring=ring) if ring:
                yield from _ring_mutants(number, entry)


def _shows(mutant, program, mesh, case):
    """Whether results, or if not those any tensor that an operation makes, differ from the uncut block's."""
    changed = mutant.of(program)
    with np.errstate(all="ignore"):
        try:
            return not (case.error(changed, mesh) <= WORST_ERROR and case.tensors_agree(changed, mesh))
        except (AssertionError, ValueError, IndexError):
            return True


SETTINGS = (
    ("llama", "layer", (("edp", 2), ("kv", 2)), True),
    ("llama", "layer", (("kv", 2), ("rep", 2)), True),
    ("llama", "layer", (("cp", 4), ("kv", 2)), True),
    ("llama", "layer", (("cp", 2), ("kv", 2), ("rep", 2)), True),
    ("llama", "head", (("edp", 2), ("kv", 4)), True),
    ("llama", "head", (("cp", 2), ("kv", 2), ("rep", 2)), False),
    ("gpt", "embed", (("edp", 2), ("kv", 4)), True),
    ("mixtral", "layer", (("edp", 2), ("ep", 2), ("kv", 2)), True),
    ("mixtral", "layer", (("ep", 4), ("kv", 2)), True),
    ("neox", "layer", (("edp", 2), ("rep", 4)), False),
)


def _programs(uncut, natural_cuts):
    """Yield natural shardings of every block, then random ones."""
    for options, kind, atoms, sequence_parallel in SETTINGS:
        case = uncut(options, kind, batch=8, seq=8, even=True)
        mesh = Mesh.virtual(**dict(atoms))
        cuts = natural_cuts(case.block, dict(atoms), sequence_parallel=sequence_parallel)
        for keeps in (True, False):
            yield case, mesh, case.lower(cuts, mesh, {"batch": ("edp",), "seq": ("cp",)}, keeps_gathered=keeps)
    for seed in itertools.count():
        rng = random.Random(seed)
        case = uncut(rng.choice(["llama", "neox"]), "layer", batch=8, seq=8, even=True, seed=seed)
        mesh = Mesh.virtual(**dict.fromkeys(("edp", "cp", "kv")[: rng.choice([2, 3])], 2))
        names = [name for name, _ in mesh.axes]
        cuts = {op.name: rng.choice(list(legal_cuts(case.block, op, names))) for op in cut_operations(case.block)}
        yield case, mesh, case.lower(cuts, mesh, {"batch": ("edp",)}, keeps_gathered=rng.random() < 0.5)


def _some_of_each(found, count):
    by_sort = defaultdict(list)
    for mutant in found:
        by_sort[mutant.sort].append(mutant)
    rng = random.Random(0)
    return [mutant for each in by_sort.values() for mutant in rng.sample(each, min(count, len(each)))]


def test_every_mutant_of_a_lowered_program_is_caught(uncut, natural_cuts):
    sorts, survivors = Counter(), []
    for case, mesh, program in _programs(uncut, natural_cuts):
        assert case.error(program, mesh) <= WORST_ERROR
        for mutant in _some_of_each(list(_mutants(program, mesh)), max(1, NUM_MUTANTS // 100)):
            sorts[mutant.sort] += 1
            if not _shows(mutant, program, mesh, case):
                survivors.append(f"{mutant} on {mesh.axes}, {case.block.kind}")
        if sorts.total() >= NUM_MUTANTS:
            break
    assert not survivors, "\n".join(survivors)
