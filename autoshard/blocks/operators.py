"""The best cut of every operation of a block: exact, by elimination over tables of prices.

Backward is tied to the forward operation's cuts. Both ends of the block are clamped to the boundary layout. A reader
takes a tensor as it was made, if nothing is pending in it, or as it is delivered, in one layout for all that do not
take it as made. Stated restrictions: several atoms cut a dim in the mesh's order; a sum passes on pending only to the
one reader of a tensor; where readers have very many choices, all of them take the tensor alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autoshard.blocks.choices import Atoms, real_cuts
from autoshard.blocks.elimination import CostFactor, eliminate
from autoshard.blocks.limited import minimise_within
from autoshard.blocks.problem import OperatorProblem
from autoshard.blocks.tables import Tables
from autoshard.layout.layout import Cuts

__all__ = ["OperatorProblem", "OperatorSolution", "cost_of", "solve", "totals"]


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

    def __str__(self) -> str:
        """Print the cost with its certificate."""
        fits = "" if self.fits else ", does not fit"
        return f"{self.cost_s * 1e3:.4g} ms, {self.kept_bytes / 2**20:.4g} MiB kept, gap {self.gap:.2%}{fits}"


def solve(problem: OperatorProblem, tables: Tables | None = None) -> OperatorSolution:
    """Find the cheapest cuts of a block within its memory limit; its tables may be there already."""
    tables = tables or Tables(problem)
    found = minimise_within(tables.sizes, tables.factors(), problem.memory_limit_bytes)
    assert math.isfinite(found.cost), "any layout can be changed into any other, so that some way must be left"
    rests = {op.name: tables.rests[found.choices.get(tables.rest_name(op), 0)] for op in tables.ops}
    return OperatorSolution(
        cuts={name: choices[found.choices[name]].cuts for name, choices in tables.choices.items()},
        cost_s=found.cost,
        kept_bytes=found.weight,
        gap=found.gap,
        fits=found.fits,
        rests={name: atoms for name, atoms in rests.items() if atoms},
    )


def cost_of(problem: OperatorProblem, cuts: Mapping[str, Cuts]) -> float:
    """Return what a block costs with these cuts."""
    tables = Tables(problem)
    fixed: list[CostFactor] = []
    for name, choices in tables.choices.items():
        same = [real_cuts(choice.cuts) == real_cuts(cuts[name]) for choice in choices]
        fixed.append(CostFactor(variables=(name,), table=np.where(same, 0.0, np.inf)))
    return eliminate(tables.sizes, [*tables.factors(), *fixed]).cost


def totals(problem: OperatorProblem) -> Mapping[str, tuple[tuple[Cuts, float], ...]]:
    """Return for every operation what the block costs with each of its cuts, all others chosen anew.

    Memory is not limited here.
    """
    tables = Tables(problem)
    least = eliminate(tables.sizes, tables.factors()).least_totals()
    return {
        name: tuple((choice.cuts, float(cost_s)) for choice, cost_s in zip(choices, least[name], strict=True))
        for name, choices in tables.choices.items()
    }
