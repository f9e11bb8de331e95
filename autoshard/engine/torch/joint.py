"""Products of one tensor with several weights as one product, where functions are compiled.

Such weights lie one behind the other, and so do the sums of their gradients, so that they form one matrix. The results
of the products form one matrix, too, of which each result is some columns. So do the gradients of the results: the
compiler makes their kernels write side by side. Where the backward pass is split (I, W) products stay apart.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch

from autoshard.engine.programs import BlockProgram
from autoshard.engine.torch.execution import RankStep
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels.products import add_product, adds_wide
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Tensor
from autoshard.layout.program import Compute, Given, Instruction, Sum, Value, pass_of, read_by, written_by
from autoshard.run.placement import MeshRank, dims_of

Placed = dict[int, Sequence[RankStep]]  # by the id of an instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """The instructions of an action, some sums with fewer inputs, and the steps that replace or follow some of them."""

    entries: Sequence[Instruction]
    instead: Placed = field(default_factory=Placed)
    behind: Placed = field(default_factory=Placed)

    def __or__(self, other: "Joint") -> "Joint":
        """Return the union of two."""
        return Joint(entries=other.entries, instead=self.instead | other.instead, behind=self.behind | other.behind)


def neighbours(parts: BlockProgram) -> tuple[tuple[Tensor, ...], ...]:
    """Return a block's weights in groups: those that multiply one tensor and are cut and summed alike lie together."""
    alike: dict[str, object] = {}
    for name, product in _by_weight(parts.forward, "F").items():
        total = parts.program.results.get(f"{name}.sum")
        taken, weight, made = (parts.block.tensors[one].dims for one in (*product.op.inputs, *product.op.outputs))
        tokens = tuple(dim for dim in taken if dim in made)
        own, summed = made[len(tokens) :], taken[len(tokens) :]
        if total and (made, taken, weight) == ((*tokens, *own), (*tokens, *summed), (*own, *summed)):
            atoms = frozenset(atom for _, atoms in total.layout.dims for atom in atoms)
            alike[name] = product.reads[0].name, total.layout.sums, atoms
    groups: dict[object, list[Tensor]] = {}
    for tensor in parts.block.parameters:
        groups.setdefault((alike.get(tensor.name, tensor.name), tensor.dtype), []).append(tensor)
    return tuple(map(tuple, groups.values()))


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors that lie one behind the other as one row of numbers."""
    together = all(one.data_ptr() + one.nbytes == other.data_ptr() for one, other in pairwise(tensors))
    assert together, "weights that are multiplied at once lie apart"
    return tensors[0].as_strided((sum(one.numel() for one in tensors),), (1,))


def joint_products(
    mesh_rank: MeshRank, formats: Formats, parts: BlockProgram, entries: Sequence[Instruction], kept: Collection[str]
) -> Joint:
    """Join the products of an action with weights that lie one behind the other; ``kept`` are values read later."""
    found = Joint(entries=entries)
    for weights in neighbours(parts):
        if len(weights) > 1:
            group = _Group.of(mesh_rank, formats, parts, weights)
            found |= group.forward(found.entries, kept)
            inputs = group.inputs(found.entries)
            found |= inputs
            found |= group.gradients(found.entries, lies=bool(inputs.instead))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Weights that are one matrix on a rank, each some of its rows."""

    mesh_rank: MeshRank
    formats: Formats
    parts: BlockProgram
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, mesh_rank: MeshRank, formats: Formats, parts: BlockProgram, weights: Sequence[Tensor]) -> "_Group":
        """Read off the program how many rows and columns they have."""
        sizes = {one.name: math.prod(mesh_rank.shape(parts.given(one.name).layout)) for one in weights}
        product = _by_weight(parts.forward, "F")[weights[0].name]
        (x, made) = (value.layout for value in (product.reads[0], product.writes[0]))
        summed = (size for dim, size in zip(dims_of(x), mesh_rank.shape(x), strict=True) if dim not in dims_of(made))
        columns = math.prod(summed)
        return cls(
            mesh_rank=mesh_rank, formats=formats, parts=parts, weights=tuple(sizes), columns=columns,
            rows=tuple(size // max(columns, 1) for size in sizes.values()),
        )  # fmt: skip

    def forward(self, entries: Sequence[Instruction], kept: Collection[str]) -> Joint:
        """Multiply once.

        The results that are kept lie side by side, or each by itself, so that no other result is kept with them.
        """
        found = self._all(_by_weight(entries, "F"))
        if not found:
            return Joint(entries=entries)
        made = tuple(one.writes[0] for one in found)
        later = {*kept, *(name for entry in entries if pass_of(entry) != "F" for name in read_by(entry))}
        shapes = tuple(self.mesh_rank.shape(value.layout) for value in made)
        stay = [value.name in later for value in made]
        turned = [one for value in made if (one := self._kept_of(value, entries, later))]
        alone = any(stay) and len(turned) < len(made)

        def run(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            each = torch.mm(x.reshape(-1, self.columns), weights.view(-1, self.columns).t()).split(self.rows, 1)
            return tuple(
                (one.contiguous() if kept and alone else one).view(shape)
                for one, shape, kept in zip(each, shapes, stay, strict=True)
            )

        taken, names = self._taken(entries, ""), tuple(value.name for value in made)
        product = RankStep(
            entry=found[0], about=_about(found), reads=(found[0].reads[0].name, *taken.writes), writes=names,
            shapes=shapes, run=run,
        )  # fmt: skip
        behind = {}
        if any(stay) and not alone and not all(stay):
            last = next(one for one in entries[::-1] if {*written_by(one)} & {value.name for value in turned})
            behind[id(last)] = [self._kept_together(found[0], turned)]
        return Joint(entries=entries, instead={**_nothing(found), id(found[0]): [taken, product]}, behind=behind)

    def _kept_of(self, value: Value, entries: Sequence[Instruction], later: Collection[str]) -> Value | None:
        """Return the value that is kept for a result: itself, or what its only reader computes in its memory."""
        readers = [one for one in entries if value.name in read_by(one)]
        if value.name in later or len(readers) != 1 or not isinstance(readers[0], Compute):
            return value if value.name in later else None
        (made, *others), tensors = readers[0].writes, self.parts.block.tensors
        alike = (made.layout, tensors[made.tensor].dtype) == (value.layout, tensors[value.tensor].dtype)
        return made if alike and not others and made.name in later else None

    def _kept_together(self, entry: Instruction, values: Sequence[Value]) -> RankStep:
        """Lay values side by side under their own names."""
        names, shapes = tuple(one.name for one in values), tuple(self.mesh_rank.shape(one.layout) for one in values)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            beside, ends = self._beside(tensors), accumulate(self.rows)
            each = (beside.narrow(1, end - width, width) for width, end in zip(self.rows, ends, strict=True))
            return tuple(one.view(shape) for one, shape in zip(each, shapes, strict=True))

        about = f"{', '.join(names)}: side by side"
        return RankStep(entry=entry, about=about, reads=names, writes=names, shapes=shapes, run=run)

    def inputs(self, entries: Sequence[Instruction]) -> Joint:
        """Multiply gradients that lie side by side once, where the products are only added to each other."""
        found = self._all(_by_weight(entries, "I"))
        made = [one.writes[0].name for one in found]
        num_readers = Counter(name for one in entries for name in read_by(one))
        total = next((one for one in entries if isinstance(one, Sum) and {*made} <= {*read_by(one)}), None)
        if not found or total is None or any(num_readers[name] > 1 for name in made):
            return Joint(entries=entries)
        laid, taken, result = self._laid(found), self._taken(entries, ""), found[0].writes[0]
        shape = self.mesh_rank.shape(result.layout)
        product = RankStep(
            entry=found[0], about=_about(found), reads=(*laid.writes, *taken.writes), writes=(result.name,),
            shapes=(shape,),
            run=lambda upstream, weights: (torch.mm(upstream, weights.view(-1, self.columns)).view(shape),),
        )  # fmt: skip
        less = replace(total, reads=tuple(value for value in total.reads if value.name not in made[1:]))
        last = max(found, key=entries.index)
        changed = [less if one is total else one for one in entries]
        return Joint(entries=changed, instead={**_nothing(found), id(last): [laid, taken, product]})

    def gradients(self, entries: Sequence[Instruction], *, lies: bool) -> Joint:
        """Add the gradients of all weights to their sums by one product; gradients of results may lie side by side."""
        makers = {one.writes[0].name: one for one in _products(entries)}
        sums = {
            one.reads[0].tensor.removesuffix(".grad"): one
            for one in entries
            if isinstance(one, Compute) and isinstance(one.op.kind, Accumulate) and one.reads[1].name in makers
        }
        found = self._all({name: makers[one.reads[1].name] for name, one in sums.items()})
        if not found or len({one.reads[1].name for one in found}) > 1:
            return Joint(entries=entries)
        totals = tuple(sums[name] for name in self.weights)
        laid, taken = self._laid(found), self._taken(entries, ".grad")
        into, factors = (self.formats.of(self.parts.block.tensors[one.tensor].dtype) for one in totals[0].reads)
        adds = into == factors or adds_wide(self.formats.device, factors, into)

        def run(total: torch.Tensor, upstream: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
            whole, right = total.view(-1, self.columns), x.reshape(-1, self.columns)
            if adds:
                add_product(whole, upstream.t(), right)
            else:
                whole.add_(torch.mm(upstream.t(), right))
            return (total,)

        product = RankStep(
            entry=totals[0], about=_about(totals), reads=(*taken.writes, *laid.writes, found[0].reads[1].name),
            writes=(_joined(one.writes[0].name for one in totals),), shapes=taken.shapes, run=run, adds=adds,
        )  # fmt: skip
        last = max(totals, key=entries.index)
        steps = [*([] if lies else [laid]), taken, product]
        return Joint(entries=entries, instead={**_nothing((*found, *totals)), id(last): steps})

    def _all(self, found: Mapping[str, Compute]) -> tuple[Compute, ...]:
        """Return the products with all weights, of tensors whose dims are in the order of the forward products.

        Return nothing if one is missing or differs, or if the rank has nothing to multiply.
        """
        mine = tuple(found[name] for name in self.weights if name in found)
        if len(mine) < len(self.weights) or not all((*self.rows, self.columns)):
            return ()
        if mine[0].op.pass_ == "F":
            return mine if len({one.reads[0].name for one in mine}) == 1 else ()
        forward = _by_weight(self.parts.forward, "F")
        wanted = (dims_of(forward[name].writes[0].layout) for name in self.weights)
        return mine if all(dims_of(one.reads[0].layout) == dims for one, dims in zip(mine, wanted, strict=True)) else ()

    def _laid(self, found: Sequence[Compute]) -> RankStep:
        """Lay the gradients that products read side by side."""
        names = tuple(one.reads[0].name for one in found)
        count = math.prod(self.mesh_rank.shape(found[0].reads[0].layout)) // self.rows[0]
        return RankStep(
            entry=found[0], about=f"{', '.join(names)}: side by side", reads=names, writes=(_joined(names),),
            shapes=((count, sum(self.rows)),), run=lambda *gradients: (self._beside(gradients),),
        )  # fmt: skip

    def _beside(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([one.reshape(-1, width) for one, width in zip(tensors, self.rows, strict=True)], 1)

    def _taken(self, entries: Sequence[Instruction], suffix: str) -> RankStep:
        """Take all weights, or the sums of their gradients, from the source."""
        names = tuple(f"{name}{suffix}" for name in self.weights)
        first = next(one for one in entries if isinstance(one, Given) and one.value.tensor == names[0])
        return RankStep(
            entry=first, about=f"{', '.join(names)}: side by side", reads=names, writes=(_joined(names),),
            shapes=((sum(self.rows) * self.columns,),),
        )  # fmt: skip


def _products(entries: Iterable[Instruction]) -> Iterator[Compute]:
    return (one for one in entries if isinstance(one, Compute) and isinstance(one.op.kind, Einsum))


def _by_weight(entries: Iterable[Instruction], pass_: str) -> dict[str, Compute]:
    """Return the products of a pass with weights, by these."""
    return {one.reads[1].tensor: one for one in _products(entries) if one.op.pass_ == pass_}


def _nothing(entries: Iterable[Instruction]) -> Placed:
    """Replace these instructions by nothing."""
    return {id(one): () for one in entries}


def _about(entries: Sequence[Compute]) -> str:
    names, layouts = (one.op.name for one in entries), (str(one.writes[0].layout) for one in entries)
    return f"{', '.join(names)}: one {entries[0].op.kind.label} -> {', '.join(layouts)}"


def _joined(names: Iterable[str]) -> str:
    return " and ".join(names)
