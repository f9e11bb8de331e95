"""The cheapest layouts of a decoder's own blocks on the mesh of a plan, as lines of tables."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from autoshard.blocks.choices import atom_dims, op_cuts
from autoshard.blocks.operators import solve
from autoshard.blocks.problem import OperatorProblem
from autoshard.cost.built_in import calibration_of
from autoshard.cost.collective import Number, Ring, mesh_ring
from autoshard.cost.compute import rank_rates
from autoshard.errors import Faults, require
from autoshard.graph.block import Block
from autoshard.graph.op import Op
from autoshard.layout.layout import Collective, Cuts
from autoshard.layout.legal import cut_operations
from autoshard.layout.program import Program
from autoshard.layout.table import Table, TableSetting, program_of, strategies, strategy_lines
from autoshard.modules.training.graph import CodeGraph
from autoshard.plan.candidate import boundary_cuts
from autoshard.plan.lowering import ATOMS, ENDS, NOMINAL_PRICE
from autoshard.plan.plan import Plan
from autoshard.plan.verify import tied_misfits
from autoshard.spec.kernels import load_kernels

WeightCut = tuple[tuple[str, ...], ...]  # the atoms that cut each dim of a weight
Fixed = Mapping[str, WeightCut]
Posed = Callable[[str, Fixed], OperatorProblem]

_OF_TENSORS = ("kv", "rep")  # atoms that cut what a layer computes, and no sequences
_TOKENS = ("batch", "seq")
_WIDE = 2  # numbers, of which two ranks can have one each


def code_setting(plan: Plan) -> TableSetting:
    """Return what the tables of a decoder's own blocks are read against; every rank makes their inputs whole."""
    return TableSetting(
        atoms={atom: plan.mesh.size(atom) for atom in ATOMS},
        price=NOMINAL_PRICE,
        boundary=boundary_cuts(plan.boundary, sequence_parallel=plan.sp),
        keeps_gathered=load_kernels(plan.kernels).keeps_gathered,
        has_inputs=True,
    )


def solved_tables(code: CodeGraph, plan: Plan) -> Mapping[str, Table]:
    """Return the lines of all blocks that have a table; those of a kind of recompute are what differs without it."""
    setting, cuts = code_setting(plan), _solved(code, plan)
    tables: dict[str, Table] = {}
    for name, block in code.table_blocks([drop for _, drop in plan.layers]).items():
        program = setting.lowered(block, cuts[block.kind])
        table = strategy_lines(strategies(program, block), setting.atoms)
        plain = tables.get(block.kind, {})
        tables[name] = {entry: line for entry, line in table.items() if plain.get(entry) != line}
    return tables


def _solved(code: CodeGraph, plan: Plan) -> Mapping[str, Mapping[str, Cuts]]:
    """Return the cuts of all kinds of blocks; a weight that embedding and head share is cut alike in both."""
    posed = _posed(code, plan)
    cuts = {kind: solve(posed(kind, {})).cuts for kind in code.blocks if kind not in ENDS}
    ends = [{kind: solve(posed(kind, fixed[kind])) for kind in ENDS} for fixed in _shared_cuts(code, posed)]
    best = min(ends, key=lambda pair: sum(solution.cost_s for solution in pair.values()))
    return {**cuts, **{kind: solution.cuts for kind, solution in best.items()}}


def _shared_cuts(code: CodeGraph, posed: Posed) -> Iterator[Mapping[str, Fixed]]:
    """Yield the ways to cut all weights that embedding and head share, by block: those that both allow."""
    pairs = [(owner.partition(".")[2], copy.partition(".")[2]) for copy, owner in code.graph.tied.items()]
    embed, head = (posed(kind, {}) for kind in ENDS)
    by_pair: list[Sequence[WeightCut]] = []
    for owner, copy in pairs:
        both = [cut for cut in _weight_cuts(embed, owner) if cut in _weight_cuts(head, copy)]
        by_pair.append(both or [((),) * len(embed.block.tensors[owner].dims)])
    for cuts in itertools.product(*by_pair):
        fixed = list(zip(pairs, cuts, strict=True))
        yield {"embed": {owner: cut for (owner, _), cut in fixed}, "head": {copy: cut for (_, copy), cut in fixed}}


def _weight_cuts(problem: OperatorProblem, weight: str) -> list[WeightCut]:
    """Return how all readers of a weight may cut its dims."""
    dims = problem.block.tensors[weight].dims
    readers = [op.name for op in cut_operations(problem.block) if weight in op.inputs]
    cuts_of = [{tuple(tuple(cuts.get(dim, ())) for dim in dims) for cuts in problem.allowed[name]} for name in readers]
    return sorted(set.intersection(*cuts_of))


def _posed(code: CodeGraph, plan: Plan) -> Posed:
    """Return how to pose the problem of a kind of block, in which some weights are cut so."""
    setting, calibration, kernels = code_setting(plan), calibration_of(plan), load_kernels(plan.kernels)
    real = tuple(atom for atom, size in setting.atoms.items() if size > 1)

    @cache
    def ring(atoms: frozenset[str]) -> Ring:
        return mesh_ring(plan.cluster, plan.mesh, tuple(sorted(atoms, key=ATOMS.index)), calibration)

    def seconds(collective: Collective, message_bytes: Number) -> Number:
        return ring(frozenset(collective.atoms)).time_s(collective, message_bytes)

    def problem(kind: str, fixed: Fixed) -> OperatorProblem:
        block = code.blocks[kind]
        allowed = {op.name: _choices(code, block, op, real) for op in cut_operations(block)}
        for weight, cut in fixed.items():
            for op in (op for op in cut_operations(block) if weight in op.inputs):
                fitting = (
                    _fitting(block, weight, cut, choices) for choices in (allowed[op.name], op_cuts(block, op, real))
                )
                allowed[op.name] = next(choices for choices in fitting if choices)
        return OperatorProblem(
            block=block, sizes=code.graph.sizes, atoms=setting.atoms, seconds=seconds, allowed=allowed,
            boundary={dim: tuple(atom for atom in cut if atom in real) for dim, cut in setting.boundary.items()},
            rates=rank_rates(plan.cluster, plan.workload.precision, calibration, kernels),
            num_micro_batches=plan.schedule.num_micro_batches, keeps_gathered=setting.keeps_gathered,
        )  # fmt: skip

    return problem


def _fitting(block: Block, weight: str, cut: WeightCut, choices: Sequence[Cuts]) -> tuple[Cuts, ...]:
    """Return the choices in which a weight is cut so."""
    pairs = list(zip(block.tensors[weight].dims, cut, strict=True))
    return tuple(cuts for cuts in choices if all(tuple(cuts.get(dim, ())) == atoms for dim, atoms in pairs))


def _choices(code: CodeGraph, block: Block, op: Op, atoms: Sequence[str]) -> tuple[Cuts, ...]:
    """Return the cuts in which each axis does what it was searched for: dp and cp cut tokens, tp weights."""
    return op_cuts(block, op, atoms, [_dims(code, block, op, atom) for atom in atoms])


def _dims(code: CodeGraph, block: Block, op: Op, atom: str) -> Sequence[str]:
    """Return the dims that an atom may cut; an empty name stands for none."""
    legal, sizes = atom_dims(block, op, atom), code.graph.sizes
    if atom not in _OF_TENSORS:
        tokens = _TOKENS[atom == "cp"]
        return (tokens,) if tokens in legal else ("",)
    weights = [block.tensors[name] for name in op.inputs if block.tensors[name].role == "parameter"]
    matrix = {dim for weight in weights if len(weight.dims) > 1 for dim in weight.dims}
    wide = [dim for dim in legal if dim in matrix and sizes[dim] >= _WIDE]
    return wide or [dim for dim in legal if dim != "batch"]


def code_programs(code: CodeGraph, plan: Plan, tables: Mapping[str, Table]) -> Mapping[str, Program]:
    """Turn the lines of all blocks into programs; refuse all at once that cannot be executed."""
    setting, faults, programs = code_setting(plan), Faults(), dict[str, Program]()
    for name, block in code.table_blocks([drop for _, drop in plan.layers]).items():
        with faults.of(f"code.strategies.{name}"):
            table = {**tables.get(block.kind, {}), **tables.get(name, {})}
            programs[name] = program_of(block, table, setting)
    faults.refuse()
    tied = tied_misfits(code.graph, programs, setting.atoms)
    require(*((False, "code.strategies", why) for why in tied))
    return programs
