"""The teeth of the interpreter: whatever is changed in a lowered program must show."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import settings

from autoshard.graph.op import Op, OpKind, Output
from autoshard.layout.layout import Collective
from autoshard.layout.legal import cut_operations
from autoshard.layout.program import Communicate, Compute, CountOnce, Sum
from autoshard.spec.mesh import Mesh
from tests.layout.meaning import legal_cuts

NUM_MUTANTS = 600 if settings().max_examples >= 200 else 48
WORST_ERROR = 1e-9
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


def _spoil(reads, writes, factor=1):
    kind = Spoil(change=lambda array: factor * array)
    op = Op(name="spoil", kind=kind, inputs=(reads.tensor,), outputs=(reads.tensor,), source="spoil")
    return Compute(op=op, cuts={}, reads=(reads,), writes=(writes,))


def _others(made, layout, mesh):
    """Yield the same collective over other atoms, in another order, of another kind, or along another dim."""
    real = [name for name, size in mesh.axes if size > 1]
    for atoms in itertools.permutations(real, len(made.atoms)):
        sizes = [np.prod([mesh.size(atom) for atom in each]) for each in (atoms, made.atoms)]
        ordered = made.kind in ("all_gather", "reduce_scatter", "slice", "all_to_all")
        if sizes[0] == sizes[1] and atoms != made.atoms and (ordered or set(atoms) != set(made.atoms)):
            yield "other atoms", replace(made, atoms=atoms)
    dims = [dim for dim, _ in layout.dims]
    for kind in OTHER_KINDS[made.kind]:
        if dims or kind.startswith("all_reduce"):
            dim = None if kind.startswith("all_reduce") else made.dim or dims[0]
            yield "other kind", Collective(kind=kind, dim=dim, atoms=made.atoms)
    for dim in dims if made.dim else ():
        if dim not in (made.dim, made.to_dim):
            yield "other dim", replace(made, dim=dim)


def _mutants_of(entry, mesh):
    """Yield what is done to an instruction, and what stands in its place then."""
    match entry:
        case Communicate(collective=made, reads=reads, writes=writes):
            aside = replace(writes, name=f"{writes.name}!")
            yield "dropped", (_spoil(reads, writes),)
            yield "twice as large", (replace(entry, writes=aside), _spoil(aside, writes, 2))
            if made.kind != "all_reduce_max":  # the maximum of equal values is no other
                yield "doubled", (replace(entry, writes=aside), replace(entry, reads=aside))
            for sort, other in _others(made, reads.layout, mesh):
                yield sort, (replace(entry, collective=other),)
        case CountOnce(reads=reads, writes=writes):
            yield "counted by all", (_spoil(reads, writes),)
            yield "counted by none", (_spoil(reads, writes, 0),)
        case Sum(reads=reads):
            for at, value in enumerate(reads):
                yield "addend dropped", (replace(entry, reads=(*reads[:at], *reads[at + 1 :])),)
                yield "addend doubled", (replace(entry, reads=(*reads, value)),)
        case Compute(ring=hops):
            for at, hop in enumerate(hops):
                yield "hop dropped", (replace(entry, ring=(*hops[:at], *hops[at + 1 :])),)
                yield "hop doubled", (replace(entry, ring=(*hops[:at], hop, *hops[at:])),)
        case _:
            pass


def _mutants(program, mesh):
    """Yield the sort of every mutant, where it differs, and the program."""
    for number, entry in enumerate(program.instructions):
        atoms = entry.collective.atoms if isinstance(entry, Communicate) else getattr(entry, "atoms", None)
        if atoms is None or any(mesh.size(atom) > 1 for atom in atoms):
            for sort, instead in _mutants_of(entry, mesh):
                instructions = (*program.instructions[:number], *instead, *program.instructions[number + 1 :])
                yield sort, f"{sort}: {entry}, now {instead[-1]}", replace(program, instructions=instructions)


def _shows(program, mesh, case):
    """Whether results, or if not those any tensor that an operation makes, differ from the uncut block's."""
    with np.errstate(all="ignore"):
        try:
            return not (case.error(program, mesh) <= WORST_ERROR and case.tensors_agree(program, mesh))
        except (AssertionError, ValueError, IndexError):
            return True


SETTINGS = (
    ("llama", "layer", {"edp": 2, "kv": 2}, True),
    ("llama", "layer", {"kv": 2, "rep": 2}, True),
    ("llama", "layer", {"cp": 4, "kv": 2}, True),
    ("llama", "layer", {"cp": 2, "kv": 2, "rep": 2}, True),
    ("llama", "head", {"edp": 2, "kv": 4}, True),
    ("llama", "head", {"cp": 2, "kv": 2, "rep": 2}, False),
    ("gpt", "embed", {"edp": 2, "kv": 4}, True),
    ("mixtral", "layer", {"edp": 2, "ep": 2, "kv": 2}, True),
    ("mixtral", "layer", {"ep": 4, "kv": 2}, True),
    ("neox", "layer", {"edp": 2, "rep": 4}, False),
)


def _programs(uncut, natural_cuts):
    """Yield natural shardings of every block, then random ones."""
    for options, kind, atoms, sequence_parallel in SETTINGS:
        case, mesh = uncut(options, kind, batch=8, seq=8, even=True), Mesh.virtual(**atoms)
        cuts = natural_cuts(case.block, atoms, sequence_parallel=sequence_parallel)
        for keeps in (True, False):
            yield case, mesh, case.lower(cuts, mesh, {"batch": ("edp",), "seq": ("cp",)}, keeps_gathered=keeps)
    for seed in itertools.count():
        rng = random.Random(seed)
        case = uncut(rng.choice(["llama", "neox"]), "layer", batch=8, seq=8, even=True, seed=seed)
        names = ("edp", "cp", "kv")[: rng.choice([2, 3])]
        mesh = Mesh.virtual(**dict.fromkeys(names, 2))
        cuts = {op.name: rng.choice(list(legal_cuts(case.block, op, names))) for op in cut_operations(case.block)}
        yield case, mesh, case.lower(cuts, mesh, {"batch": ("edp",)}, keeps_gathered=rng.random() < 0.5)


def test_every_mutant_of_a_lowered_program_is_caught(uncut, natural_cuts):
    sorts, survivors = Counter(), []
    for case, mesh, program in _programs(uncut, natural_cuts):
        assert case.error(program, mesh) <= WORST_ERROR
        by_sort = defaultdict(list)
        for sort, how, mutant in _mutants(program, mesh):
            by_sort[sort].append((how, mutant))
        for sort, found in by_sort.items():
            for how, mutant in random.Random(0).sample(found, min(max(1, NUM_MUTANTS // 100), len(found))):
                sorts[sort] += 1
                if not _shows(mutant, mesh, case):
                    survivors.append(f"{how} on {mesh}, {case.block.kind}")
        if sorts.total() >= NUM_MUTANTS:
            break
    assert not survivors, "\n".join(survivors)


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_every_mutant_of_a_message_of_loads_is_caught(uncut, natural_cuts, over):
    """One that is not summed over a part of the tokens lets each rank balance what it has."""
    for atoms in ({"edp": 2, "cp": 2}, {"cp": 2, "kv": 2}, {"edp": 2, "ep": 2, "cp": 2}):
        case, mesh = uncut(f"mixtral of a balanced {over}", batch=8, seq=8, even=True), Mesh.virtual(**atoms)
        cuts = natural_cuts(case.block, atoms, sequence_parallel=True)
        program = case.lower(cuts, mesh, {"batch": ("edp",), "seq": ("cp",)}, keeps_gathered=True)
        assert case.error(program, mesh) <= WORST_ERROR
        mutants = [(how, mutant) for _, how, mutant in _mutants(program, mesh) if "entry='router_load_out'" in how]
        assert len(mutants) >= 3, f"no load is summed on {mesh}"
        assert [how for how, mutant in mutants if not _shows(mutant, mesh, case)] == []
