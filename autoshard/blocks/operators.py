"""The best cut of every operation of a block: exact, by elimination over tables of prices.

Backward is tied to the forward operation's cuts. Both ends of the block are clamped to the boundary layout. A reader
takes a tensor as it was made, if nothing is pending in it, or as it is delivered, in one layout for all that do not
take it as made. Stated restrictions: several atoms cut a dim in the mesh's order; a sum passes on pending only to the
one reader of a tensor; under a memory limit, where tables would grow too large (a layer on three atoms), three readers
or more take a tensor differently only where that can save time, not where it only saves memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.blocks.factors import Factor, eliminate, joined, minimise
from autoshard.blocks.limited import minimise_within
from autoshard.blocks.op_prices import reduction_s, ring_of_s, roofline_s
from autoshard.blocks.problem import Atoms, OperatorProblem, op_choices, real_cuts
from autoshard.blocks.tables import Tables
from autoshard.layout.layout import Cuts
from autoshard.layout.program import Communicate, Compute, Program
from autoshard.layout.redistribute import Change

__all__ = ["OperatorProblem", "OperatorSolution", "assess", "op_choices", "solve", "solve_keeping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSolution:
    """The cuts of every forward operation, and what they cost together.

    ``gap`` says how much cheaper another solution could be at most, as a share; 0 is proven best. Where nothing keeps
    to the memory limit, ``fits`` is false and these are the cuts that need least. ``rests`` names the atoms over which
    an operation's weights rest in pieces.
    """

    cuts: Mapping[str, Cuts]
    cost_s: float
    kept_bytes: float = 0.0
    gap: float = 0.0
    fits: bool = True
    rests: Mapping[str, Atoms] = field(default_factory=dict[str, Atoms])
    keeps_gathered: bool = True

    def __str__(self) -> str:
        """Print the cost with its certificate."""
        fits = "" if self.fits else ", does not fit"
        return f"{self.cost_s * 1e3:.4g} ms, {self.kept_bytes / 2**20:.4g} MiB kept, gap {self.gap:.2%}{fits}"


def solve(problem: OperatorProblem, tables: Tables | None = None) -> OperatorSolution:
    """Find the cheapest cuts of a block within its memory limit; its tables may be there already."""
    tables = tables or Tables(problem)
    found = minimise_within(tables.sizes, tables.factors(), problem.memory_limit_bytes)
    assert math.isfinite(found.cost), "any layout can be changed into any other, so that some way must be left"
    return solution_of(tables, found.choices, OperatorSolution(
        cuts={}, cost_s=found.cost, kept_bytes=found.weight, gap=found.gap, fits=found.fits,
        keeps_gathered=problem.keeps_gathered,
    ))  # fmt: skip


def solve_keeping(problem: OperatorProblem) -> OperatorSolution:
    """Find the cheapest cuts whether backward finds what forward gathered or gathers again: a choice for the block."""
    kept, again = (solve(replace(problem, keeps_gathered=keeps)) for keeps in (True, False))
    best = min(kept, again, key=lambda found: (not found.fits, found.cost_s if found.fits else found.kept_bytes))
    bound_s = min(found.cost_s * (1 - found.gap) for found in (kept, again) if found.fits or not best.fits)
    return replace(best, gap=max(0.0, 1 - bound_s / best.cost_s))


def cost_of(problem: OperatorProblem, cuts: Mapping[str, Cuts]) -> float:
    """Return what a block costs with these cuts."""
    tables = Tables(problem)
    fixed: list[Factor] = []
    for name, choices in tables.choices.items():
        same = [real_cuts(choice.cuts) == real_cuts(cuts[name]) for choice in choices]
        fixed.append(Factor(variables=(name,), table=np.where(same, 0.0, np.inf)))
    return minimise(tables.sizes, [*tables.factors(), *fixed]).cost


def totals(problem: OperatorProblem, names: Sequence[str]) -> Mapping[str, tuple[tuple[Cuts, float], ...]]:
    """Return for operations what the block costs with each of their choices, all others chosen anew.

    Memory is not limited here.
    """
    tables = Tables(problem)
    factors = tables.factors()
    found: dict[str, tuple[tuple[Cuts, float], ...]] = {}
    for name in names:
        costs = joined((name,), tables.sizes, eliminate(tables.sizes, factors, keep=(name,)).rest).table
        pairs = zip(tables.choices[name], costs, strict=True)
        found[name] = tuple((choice.cuts, float(cost_s)) for choice, cost_s in pairs)
    return found


def solution_of(tables: Tables, numbers: Mapping[str, int], costs: OperatorSolution) -> OperatorSolution:
    """Return the cuts and rests that the numbers of choices stand for, with these costs."""
    rests = {op.name: tables.rests[numbers[name]] for op in tables.ops if (name := tables.rest_name(op)) in numbers}
    return OperatorSolution(
        cuts={name: choices[numbers[name]].cuts for name, choices in tables.choices.items()},
        cost_s=costs.cost_s,
        kept_bytes=costs.kept_bytes,
        gap=costs.gap,
        fits=costs.fits,
        keeps_gathered=costs.keeps_gathered,
        rests={name: atoms for name, atoms in rests.items() if atoms},
    )


def assess(problem: OperatorProblem, program: Program) -> float:
    """Price a lowered program: every operation, every collective, every ring, and the reduction of weight gradients.

    The batch is there in any cut, so that what changes its layout is free. Weights rest as they are used. The solver's
    cost is the same, but that the program is cheaper where the two delivers of an addition need its gradient in one
    and the same other layout: it changes it once, and the solver counts both.
    """
    block = problem.block
    total = 0.0
    for entry in program.instructions:
        if isinstance(entry, Compute):
            total += float(np.max(roofline_s(problem, entry.op, [entry.cuts]))) + ring_of_s(
                problem, entry.op, entry.cuts
            )
        elif isinstance(entry, Communicate) and block.tensors[entry.reads.tensor].role != "input":
            change = Change(collective=entry.collective, before=entry.reads.layout, after=entry.writes.layout)
            total += problem.price(block.tensors[entry.reads.tensor].dtype)(change)
    for tensor in block.parameters:
        layout = program.results[f"{tensor.name}.sum"].layout
        real = [atom for atom in layout.sums if problem.atoms[atom] > 1]
        total += reduction_s(problem, tensor.name, dict(layout.dims), real)
    return total
