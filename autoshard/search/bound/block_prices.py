"""Prices of blocks for many layouts: those that cut a block alike share its price, however their other blocks are cut.

A mixture has dozens of cuttings, of which many differ in one block only. A price costs as much for one layout as for
a hundred.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.setting import BlockCost, PerCandidate, Question, Setting
from autoshard.cost.sharded import CutBlocks, alike_without, atom_groups
from autoshard.cost.stages import BlockTotals
from autoshard.layout.layout import Cutting
from autoshard.plan.recompute import Recompute
from autoshard.schedule.waves import Ints
from autoshard.search.bound.mesh_columns import MeshColumns, atom_columns
from autoshard.search.bound.space import Space

Price = Callable[[Setting], Sequence[BlockCost]]  # of one kind of block, a cost for each kind of recompute


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredLayouts(PerCandidate):
    """Layouts whose blocks one lowering serves."""

    blocks: CutBlocks
    space: Space  # of them alone
    numbers: Ints  # of them in the space of the search
    orders: NDArray[np.str_]  # of the sequence over cp

    def setting(self, question: Question, meshes: MeshColumns, groups: Iterable[tuple[str, ...]]) -> Setting:
        """Return the numbers of the layouts, with the rings of some groups of ranks."""
        return Setting(
            blocks=self.blocks,
            sizes=question.sizes((self.space.rows["mbs"] * self.space.rows["dp"]).astype(np.float64)),
            atoms=meshes.sizes(self.numbers),
            rings=meshes.rings(groups, self.numbers),
            zero=self.space.base.zero,
            cp_order=self.orders,
        )

    @classmethod
    def joined(cls, parts: "Sequence[LoweredLayouts]") -> "LoweredLayouts":
        """Return the layouts of several parts as if all were of the first lowering."""
        first = parts[0]
        if len(parts) == 1:
            return first
        rows = {key: np.concatenate([part.space.rows[key] for part in parts]) for key in first.space.rows}
        numbers, orders = ([getattr(part, name) for part in parts] for name in ("numbers", "orders"))
        return replace(
            first,
            space=replace(first.space, rows=rows),
            numbers=np.concatenate(numbers),
            orders=np.concatenate(orders),
        )


def block_totals(
    question: Question, meshes: MeshColumns, kind: str, parts: Sequence[LoweredLayouts], price: Price
) -> list[BlockTotals]:
    """Price a kind of block for the layouts of every part; parts that cut it alike are priced together."""
    by_cut: dict[object, list[int]] = defaultdict(list)
    for place, part in enumerate(parts):
        by_cut[part.blocks.cut_of(kind), part.blocks.atoms].append(place)
    totals: dict[int, BlockTotals] = {}
    for places in by_cut.values():
        together = LoweredLayouts.joined([parts[place] for place in places])
        groups = atom_groups([together.blocks.block(kind, Recompute())])  # recompute repeats them, and adds no others
        costs = price(together.setting(question, meshes, groups))
        of_all = BlockTotals.of(costs, len(together.numbers))
        ends = np.cumsum([len(parts[place].numbers) for place in places]).tolist()
        for place, first, end in zip(places, [0, *ends], ends, strict=False):
            totals[place] = of_all.only(slice(first, end))
    return [totals[place] for place in range(len(parts))]


def split(layouts: Ints, cuts: Sequence[NDArray[np.bool_]]) -> Iterator[Ints]:
    """Group layouts by which of some atoms are larger than 1."""
    kinds = sum((is_cut[layouts] << number for number, is_cut in enumerate(reversed(cuts))), 0 * layouts)
    yield from (layouts[kinds == kind] for kind in np.unique(kinds))


def lowered_alike(
    question: Question, space: Space, cutting: Cutting, *, apart: bool
) -> Iterator[tuple[Ints, CutBlocks]]:
    """Yield layouts that share one lowering, in which groups of one rank send nothing, with their blocks.

    Experts and their slots may be cut over all but edp, so it matters which of these exceed 1; in models without
    experts some of these may matter. Where tensors may be pinned, all atoms matter: ``apart``.
    """
    cuts = {atom: column > 1 for atom, column in atom_columns(question.model, space).items()}
    mixture = bool(question.model.num_experts)

    def lowered(layouts: Ints) -> CutBlocks:
        atoms = frozenset(atom for atom, column in cuts.items() if column[layouts].any())
        return CutBlocks(step=question.step, cutting=cutting, atoms=atoms)

    always = [atom for atom in cuts if apart or (mixture and atom != "edp")]
    for similar in split(np.arange(space.num_layouts), [cuts[atom] for atom in always]):
        whole = lowered(similar)
        mixed = [atom for atom in cuts if atom not in always and atom in whole.atoms and not cuts[atom][similar].all()]
        matter = [atom for atom in mixed if atom != "edp" and not alike_without(whole, atom)]
        for group in split(similar, [cuts[atom] for atom in matter]):
            yield group, lowered(group)
