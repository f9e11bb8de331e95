"""Lowered programs give the results of the uncut block, and whatever is changed in one shows: mutants are caught."""

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
from autoshard.layout.legal import cut_operations, faults
from autoshard.layout.program import Communicate, Compute, CountOnce, Sum
from autoshard.spec.mesh import Mesh
from tests.kit import TINY
from tests.layout.meaning import legal_cuts, random_mesh

BOUNDARY = ("batch", "seq", "hidden")
NUM_CASES = 600 if settings().max_examples >= 200 else 32
WORST_ERROR = 1e-9
MEGATRON = (("edp", 2), ("ep", 1), ("kv", 2), ("rep", 1))


@pytest.fixture(scope="session")
def random_cuts():
    """Any legal cuts; which are legal depends on model, block and operation, not on sizes, and is enumerated once."""
    known = {}

    def draw(block, options, names, rng):
        found = {}
        for op in cut_operations(block):
            if op.name in ("dispatch", "combine"):
                found[op.name] = rng.choice(list(legal_cuts(block, op, names, found)))
                continue
            key = (options, block.kind, op.name, names)
            if key not in known:
                known[key] = list(legal_cuts(block, op, names))
            found[op.name] = rng.choice(known[key])
        return found

    return draw


def _random_boundary(names, rng):
    cuts = {dim: [] for dim in BOUNDARY}
    for name in rng.sample(names, len(names)):
        dim = rng.choice([*BOUNDARY, None])
        if dim:
            cuts[dim].append(name)
    return {dim: tuple(cut) for dim, cut in cuts.items()}


BALANCED = ("mixtral of a balanced batch", "mixtral of a balanced sequence")


def _compare_random_case(uncut, random_cuts, seed, models=tuple(TINY)):
    rng = random.Random(seed)
    options = rng.choice(models)
    kind = rng.choice(["layer"] * 6 + ["head"] * 3 + ["embed"])
    again = rng.choice([(), None, ("attend",)]) if kind == "layer" else ()
    case = uncut(options, kind, batch=rng.randint(1, 4), seq=rng.choice([2, 3, 5, 6]), again=again, seed=seed)
    mesh = random_mesh(rng)
    names = tuple(name for name, _ in mesh.axes)
    cuts, boundary = random_cuts(case.block, options, names, rng), _random_boundary(names, rng)
    assert not faults(case.block, cuts, names)
    program = case.lower(cuts, mesh, boundary, keeps_gathered=rng.random() < 0.5)
    error = case.error(program, mesh)
    assert error <= WORST_ERROR, f"seed {seed}: {options} {kind} on {mesh.axes}, again {again}: off by {error}"


def test_whatever_is_legal_gives_the_results_and_every_gradient_of_the_uncut_block(uncut, random_cuts):
    for seed in range(NUM_CASES):
        _compare_random_case(uncut, random_cuts, seed)
    for seed in range(NUM_CASES // 10 + 1):  # and keeps documents apart
        _compare_random_case(uncut, random_cuts, seed, ("llama of documents", "gpt of documents", "qwen of documents"))
    for seed in range(NUM_CASES // 5 + 1):  # and balances experts
        _compare_random_case(uncut, random_cuts, seed, BALANCED)


def _lowered_at_random(case, random_cuts, rng, *, keeps_gathered):
    """Cut a layer of experts at random for a random mesh."""
    mesh = random_mesh(rng)
    names = tuple(name for name, _ in mesh.axes)
    cuts = random_cuts(case.block, "mixtral", names, rng)
    return case.lower(cuts, mesh, _random_boundary(names, rng), keeps_gathered=keeps_gathered), mesh


def test_full_experts_drop_what_their_own_group_of_tokens_has_too_much(uncut, random_cuts):
    """Together the groups drop other tokens than one queue for all of them would."""
    differ = 0
    for seed in range(NUM_CASES // 6):
        rng = random.Random(seed)
        again, capacity = rng.choice([(), None]), rng.choice([0.5, 1.0, 1.25])
        case = uncut("mixtral", batch=4, seq=rng.choice([3, 4]), again=again, seed=seed, capacity=capacity)
        program, mesh = _lowered_at_random(case, random_cuts, rng, keeps_gathered=True)
        error = case.queueing_as(program, mesh).error(program, mesh)
        assert error <= WORST_ERROR, f"seed {seed}: capacity {capacity} on {mesh.axes}: off by {error}"
        differ += case.error(program, mesh) > WORST_ERROR
    assert differ


@pytest.mark.parametrize("capacity", [0.5, 2.0, None])
def test_what_experts_read_has_its_gradient_summed_where_a_platform_does_so(uncut, random_cuts, capacity):
    for seed in range(3):
        rng, again = random.Random(seed), (None if seed % 3 == 0 else ())
        case = uncut("mixtral", batch=4, seq=3, again=again, seed=seed, capacity=capacity, platform="nxd")
        program, mesh = _lowered_at_random(case, random_cuts, rng, keeps_gathered=False)
        error = case.queueing_as(program, mesh).error(program, mesh)
        assert error <= WORST_ERROR, f"seed {seed}: capacity {capacity} on {mesh.axes}: off by {error}"


@pytest.mark.parametrize(
    ("capacity", "sent"),
    [
        (64.0, {"I expert_in all_reduce /kv", "I mlp_in slice seq/kv"}),
        (None, {"I mlp_in all_reduce /kv", "I mlp_in slice seq/kv"}),
    ],
)
def test_nxd_sums_slots_or_tokens_on_every_rank_before_it_slices_them(uncut, natural_cuts, capacity, sent):
    case = uncut("mixtral", even=True, capacity=capacity, platform="nxd")
    mesh, boundary = Mesh.virtual(kv=2), {"seq": ("kv",)}
    cuts = natural_cuts(case.block, {"kv": 2}, sequence_parallel=True)
    lines = _listed(case.lower(cuts, mesh, boundary, keeps_gathered=False))
    assert {line for line in lines if line.startswith(("I expert_in", "I mlp_in"))} == sent


def _natural(  # noqa: PLR0913
    uncut, natural_cuts, options, kind, atoms, *, sequence_parallel=True, keeps_gathered=True, **more
):  # fmt: skip
    case = uncut(options, kind, even=True, **more)
    mesh = Mesh.virtual(**dict(atoms))
    cuts = natural_cuts(case.block, dict(atoms), sequence_parallel=sequence_parallel)
    names = dict(atoms)
    assert not faults(case.block, cuts, names)
    tp = ("kv", "rep") if sequence_parallel else ()
    seq = tuple(atom for atom in ("cp", *tp) if atom in names)
    boundary = {"batch": tuple(atom for atom in ("edp", "ep") if atom in names), "seq": seq}
    program = case.lower(cuts, mesh, boundary, keeps_gathered=keeps_gathered)
    assert case.error(program, mesh) <= WORST_ERROR
    return program


def _listed(program):
    return [f"{entry.pass_} {entry.entry} {entry.collective}" for entry in program.collectives()]


def test_the_collectives_of_megatron_come_out_by_themselves(uncut, natural_cuts):
    plain = _natural(uncut, natural_cuts, "llama", "layer", MEGATRON, sequence_parallel=False)
    assert _listed(plain) == [
        f"{entry} all_reduce /kv" for entry in ("F attn_out", "F mlp_out", "I mlp_in", "I attn_in")
    ]
    program = _natural(uncut, natural_cuts, "llama", "layer", MEGATRON)
    assert _listed(program) == [
        "F attn_in all_gather seq/kv",
        "F attn_out reduce_scatter seq/kv",
        "F mlp_in all_gather seq/kv",
        "F mlp_out reduce_scatter seq/kv",
        "I mlp_out all_gather seq/kv",
        "I mlp_in reduce_scatter seq/kv",
        "I attn_out all_gather seq/kv",
        "I attn_in reduce_scatter seq/kv",
    ]


@pytest.mark.parametrize("options", TINY)
def test_gradients_of_weights_wait_for_the_end_of_the_step(uncut, natural_cuts, options):
    program = _natural(uncut, natural_cuts, options, "layer", MEGATRON, batch=4)
    sums = {name: value.layout.sums for name, value in program.results.items() if name.endswith(".sum")}
    waiting = {name for name, atoms in sums.items() if "edp" in atoms or name.split(".")[0] in ("gate", "up", "down")}
    assert sums.keys() == waiting
    assert not [entry for entry in program.collectives() if "edp" in entry.collective.atoms and entry.pass_ == "W"]


@pytest.mark.parametrize("options", ["llama", "gpt", "qwen"])
def test_keys_and_values_travel_once_around_the_ring_and_their_gradients_come_home(uncut, natural_cuts, options):
    program = _natural(uncut, natural_cuts, options, "layer", (("cp", 4),), seq=8)
    rings = {entry.op.name: entry.ring for entry in program.instructions if isinstance(entry, Compute) and entry.ring}
    hop = Collective.parse("permute kv_seq/cp")
    assert rings == {"attend": (hop,) * 3, "attend.d012": (hop,) * 4}
    assert not program.collectives()


def test_what_only_one_reader_left_pending_counts_once(uncut, natural_cuts):
    program = _natural(uncut, natural_cuts, "neox", "layer", (("kv", 1), ("rep", 2)), sequence_parallel=False)
    assert [entry for entry in program.instructions if isinstance(entry, CountOnce)]


def test_one_rank_sends_nothing(uncut, natural_cuts):
    for kind in ("embed", "layer", "head"):
        program = _natural(uncut, natural_cuts, "mixtral", kind, (("edp", 1), ("kv", 1)))
        assert not program.collectives()


NUM_MUTANTS = 600 if settings().max_examples >= 200 else 48
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
