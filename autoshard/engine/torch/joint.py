"""Products of one tensor with several weights as one product, where functions are compiled.

Such weights lie one behind the other, and so do the sums of their gradients, so that they form one matrix. The results
of the products form one matrix, too, of which each result is some columns. So do the gradients of the results: the
compiler makes their kernels write side by side. Where the backward pass is split (I, W) products stay apart.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise

import torch

from autoshard.engine.programs import BlockProgram
from autoshard.engine.torch.execution import RankStep
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels.matrices import Multiplier
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Op, Tensor
from autoshard.layout.program import Compute, Given, Instruction, Sum, Value, pass_of, read_by, written_by
from autoshard.run.placement import MeshRank, dims_of

Place = tuple[MeshRank, Formats, Callable[[Op], Multiplier]]  # of a rank, with how it multiplies
Placed = dict[int, Sequence[RankStep]]  # by the id of an instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """The instructions of an action, some sums with fewer inputs, and the steps that replace or follow some of them."""

    entries: Sequence[Instruction]
    instead: Placed = field(default_factory=Placed)
    behind: Placed = field(default_factory=Placed)

    def __or__(self, later: "Joint") -> "Joint":
        """Return the steps of both, with the instructions of the later one, which was made from those of this one."""
        return Joint(entries=later.entries, instead=self.instead | later.instead, behind=self.behind | later.behind)


def neighbours(parts: BlockProgram) -> tuple[tuple[Tensor, ...], ...]:
    """Return a block's weights in groups, whose weights lie together.

    The weights of a group multiply the same tensor, have the same format, and are cut and summed over the same atoms.
    """
    uses: dict[str, object] = {}  # by weight what the weights of one group share
    for name, product in _by_weight(parts.forward, "F").items():
        gradient_sum = parts.program.results.get(f"{name}.sum")
        operands = (*product.op.inputs, *product.op.outputs)
        factor, weight, result = (parts.block.tensors[operand].dims for operand in operands)
        tokens = tuple(dim for dim in factor if dim in result)
        rows, columns = result[len(tokens) :], factor[len(tokens) :]
        is_matrix = (result, factor, weight) == ((*tokens, *rows), (*tokens, *columns), (*rows, *columns))
        if gradient_sum and is_matrix:
            atoms = frozenset(atom for _, atoms in gradient_sum.layout.dims for atom in atoms)
            uses[name] = product.reads[0].name, gradient_sum.layout.sums, atoms
    groups: dict[object, list[Tensor]] = {}
    for tensor in parts.block.parameters:
        groups.setdefault((uses.get(tensor.name, tensor.name), tensor.dtype), []).append(tensor)
    return tuple(map(tuple, groups.values()))


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors that lie one behind the other as one row of numbers."""
    touch = all(tensor.data_ptr() + tensor.nbytes == following.data_ptr() for tensor, following in pairwise(tensors))
    assert touch, "weights that are multiplied at once lie apart"
    return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def joint_products(
    place: Place, parts: BlockProgram, entries: Sequence[Instruction], read_later: Collection[str]
) -> Joint:
    """Join the products of an action with weights that lie one behind the other, and are multiplied in one format.

    Values that are ``read_later``, by another action, keep a memory of their own.
    """
    joint, products = Joint(entries=entries), _by_weight(parts.forward, "F")
    _, _, multiplier = place
    groups = (lying for lying in neighbours(parts) if len(lying) > 1)
    alike = (groupby(lying, lambda weight: multiplier(products[weight.name].op)) for lying in groups)
    for weights in (tuple(group) for lying in alike for _, group in lying):
        if len(weights) > 1:
            group = _WeightGroup.of(place, parts, weights)
            joint |= group.forward(joint.entries, read_later)
            inputs = group.inputs(joint.entries)
            joint |= inputs
            joint |= group.gradients(joint.entries, has_upstream=bool(inputs.instead))
    return joint


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightGroup:
    """Weights that are one matrix on a rank, each some of its rows."""

    mesh_rank: MeshRank
    formats: Formats
    multiplier: Callable[[Op], Multiplier]
    parts: BlockProgram
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, place: Place, parts: BlockProgram, weights: Sequence[Tensor]) -> "_WeightGroup":
        """Read off the program how many rows and columns they have."""
        mesh_rank, formats, multiplier = place
        sizes = {weight.name: math.prod(mesh_rank.shape(parts.input_value(weight.name).layout)) for weight in weights}
        product = _by_weight(parts.forward, "F")[weights[0].name]
        factor, result = (value.layout for value in (product.reads[0], product.writes[0]))
        columns = math.prod(
            size
            for dim, size in zip(dims_of(factor), mesh_rank.shape(factor), strict=True)
            if dim not in dims_of(result)
        )
        return cls(
            mesh_rank=mesh_rank, formats=formats, multiplier=multiplier, parts=parts, weights=tuple(sizes),
            columns=columns, rows=tuple(size // max(columns, 1) for size in sizes.values()),
        )  # fmt: skip

    def forward(self, entries: Sequence[Instruction], read_later: Collection[str]) -> Joint:
        """Multiply a tensor with all weights once.

        The results that are read later lie side by side, or each by itself, so that no other result stays in memory
        with them.
        """
        products = self._all(_by_weight(entries, "F"))
        if not products:
            return Joint(entries=entries)
        results = tuple(product.writes[0] for product in products)
        later = {*read_later, *(name for entry in entries if pass_of(entry) != "F" for name in read_by(entry))}
        shapes = tuple(self.mesh_rank.shape(value.layout) for value in results)
        stay = [value.name in later for value in results]
        staying = [value for result in results if (value := self._stays_for(result, entries, later))]
        copies = any(stay) and len(staying) < len(results)
        multiplier = self.multiplier(products[0].op)

        def run(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            matrix = weights.view(-1, self.columns).t()
            columns = multiplier.product(x.reshape(-1, self.columns), matrix).split(self.rows, 1)
            return tuple(
                (result.contiguous() if stays and copies else result).view(shape)
                for result, shape, stays in zip(columns, shapes, stay, strict=True)
            )

        matrix = self._matrix(entries, "")
        product = RankStep(
            entry=products[0], about=_about(products), reads=(products[0].reads[0].name, *matrix.writes),
            writes=tuple(value.name for value in results), shapes=shapes, run=run,
        )  # fmt: skip
        behind = {}
        if any(stay) and not copies and not all(stay):
            names = {value.name for value in staying}
            last = next(entry for entry in entries[::-1] if names.intersection(written_by(entry)))
            behind[id(last)] = [self._moved_together(products[0], staying)]
        instead = {**_nothing(products), id(products[0]): [matrix, product]}
        return Joint(entries=entries, instead=instead, behind=behind)

    def _stays_for(self, result: Value, entries: Sequence[Instruction], later: Collection[str]) -> Value | None:
        """Return the value that stays in memory for a result: itself, or what its only reader computes in its place."""
        readers = [entry for entry in entries if result.name in read_by(entry)]
        if result.name in later or len(readers) != 1 or not isinstance(readers[0], Compute):
            return result if result.name in later else None
        (first, *more), tensors = readers[0].writes, self.parts.block.tensors
        same_form = (first.layout, tensors[first.tensor].dtype) == (result.layout, tensors[result.tensor].dtype)
        return first if same_form and not more and first.name in later else None

    def _moved_together(self, entry: Instruction, values: Sequence[Value]) -> RankStep:
        """Return the step that copies values into one matrix, of which they are columns under the names they had."""
        names = tuple(value.name for value in values)
        shapes = tuple(self.mesh_rank.shape(value.layout) for value in values)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            matrix, ends = self._columns(tensors), accumulate(self.rows)
            columns = (matrix.narrow(1, end - width, width) for width, end in zip(self.rows, ends, strict=True))
            return tuple(column.view(shape) for column, shape in zip(columns, shapes, strict=True))

        about = f"{', '.join(names)}: side by side"
        return RankStep(entry=entry, about=about, reads=names, writes=names, shapes=shapes, run=run)

    def inputs(self, entries: Sequence[Instruction]) -> Joint:
        """Multiply gradients that lie side by side once, where the products are only added to each other."""
        products = self._all(_by_weight(entries, "I"))
        terms = [product.writes[0].name for product in products]
        num_readers = Counter(name for entry in entries for name in read_by(entry))
        total = next((entry for entry in entries if isinstance(entry, Sum) and {*terms} <= {*read_by(entry)}), None)
        if not products or total is None or any(num_readers[name] > 1 for name in terms):
            return Joint(entries=entries)
        upstream, matrix, result = self._upstream(products), self._matrix(entries, ""), products[0].writes[0]
        shape, multiplier = self.mesh_rank.shape(result.layout), self.multiplier(products[0].op)
        product = RankStep(
            entry=products[0], about=_about(products), reads=(*upstream.writes, *matrix.writes), writes=(result.name,),
            shapes=(shape,),
            run=lambda upstream, weights: (
                multiplier.product(upstream, weights.view(-1, self.columns)).view(shape),
            ),
        )  # fmt: skip
        shorter = replace(total, reads=tuple(value for value in total.reads if value.name not in terms[1:]))
        last = max(products, key=entries.index)
        changed = [shorter if entry is total else entry for entry in entries]
        return Joint(entries=changed, instead={**_nothing(products), id(last): [upstream, matrix, product]})

    def gradients(self, entries: Sequence[Instruction], *, has_upstream: bool) -> Joint:
        """Add the gradients of all weights to their sums by one product.

        ``has_upstream``: the step for the gradients of inputs has laid the gradients of results side by side already.
        """
        makers = {product.writes[0].name: product for product in _products(entries)}
        sums = {
            entry.reads[0].tensor.removesuffix(".grad"): entry
            for entry in entries
            if isinstance(entry, Compute) and isinstance(entry.op.kind, Accumulate) and entry.reads[1].name in makers
        }
        products = self._all({weight: makers[entry.reads[1].name] for weight, entry in sums.items()})
        if not products or len({product.reads[1].name for product in products}) > 1:
            return Joint(entries=entries)
        totals = tuple(sums[name] for name in self.weights)
        upstream, matrix = self._upstream(products), self._matrix(entries, ".grad")
        into, factors = (self.formats.of(self.parts.block.tensors[value.tensor].dtype) for value in totals[0].reads)
        multiplier = self.multiplier(products[0].op)
        adds = multiplier.adds(factors, into)

        def run(total: torch.Tensor, upstream: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
            whole, right = total.view(-1, self.columns), x.reshape(-1, self.columns)
            if adds:
                multiplier.add(whole, upstream.t(), right)
            else:
                whole.add_(multiplier.product(upstream.t(), right))
            return (total,)

        product = RankStep(
            entry=totals[0], about=_about(totals), reads=(*matrix.writes, *upstream.writes, products[0].reads[1].name),
            writes=(_joined(total.writes[0].name for total in totals),), shapes=matrix.shapes, run=run, adds=adds,
        )  # fmt: skip
        last = max(totals, key=entries.index)
        steps = [*([] if has_upstream else [upstream]), matrix, product]
        return Joint(entries=entries, instead={**_nothing((*products, *totals)), id(last): steps})

    def _all(self, by_weight: Mapping[str, Compute]) -> tuple[Compute, ...]:
        """Return the products with all weights, of tensors whose dims are in the order of the forward products.

        Return nothing if one is missing or differs, or if the rank has nothing to multiply.
        """
        products = tuple(by_weight[name] for name in self.weights if name in by_weight)
        if len(products) < len(self.weights) or not all((*self.rows, self.columns)):
            return ()
        if products[0].op.pass_ == "F":
            return products if len({product.reads[0].name for product in products}) == 1 else ()
        forward = _by_weight(self.parts.forward, "F")
        orders = [dims_of(forward[name].writes[0].layout) for name in self.weights]
        return products if [dims_of(product.reads[0].layout) for product in products] == orders else ()

    def _upstream(self, products: Sequence[Compute]) -> RankStep:
        """Return the step that lays the gradients which products read side by side."""
        names = tuple(product.reads[0].name for product in products)
        count = math.prod(self.mesh_rank.shape(products[0].reads[0].layout)) // self.rows[0]
        return RankStep(
            entry=products[0], about=f"{', '.join(names)}: side by side", reads=names, writes=(_joined(names),),
            shapes=((count, sum(self.rows)),), run=lambda *gradients: (self._columns(gradients),),
        )  # fmt: skip

    def _columns(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a matrix with a row for each token, of which every tensor is some columns."""
        return torch.cat([tensor.reshape(-1, width) for tensor, width in zip(tensors, self.rows, strict=True)], 1)

    def _matrix(self, entries: Sequence[Instruction], suffix: str) -> RankStep:
        """Return the step that takes all weights, or the sums of their gradients, from the source."""
        names = tuple(f"{name}{suffix}" for name in self.weights)
        first = next(entry for entry in entries if isinstance(entry, Given) and entry.value.tensor == names[0])
        return RankStep(
            entry=first, about=f"{', '.join(names)}: side by side", reads=names, writes=(_joined(names),),
            shapes=((sum(self.rows) * self.columns,),),
        )  # fmt: skip


def _products(entries: Iterable[Instruction]) -> Iterator[Compute]:
    return (entry for entry in entries if isinstance(entry, Compute) and isinstance(entry.op.kind, Einsum))


def _by_weight(entries: Iterable[Instruction], pass_: str) -> dict[str, Compute]:
    """Return the products of a pass with weights, by these."""
    return {product.reads[1].tensor: product for product in _products(entries) if product.op.pass_ == pass_}


def _nothing(entries: Iterable[Instruction]) -> Placed:
    """Replace these instructions by nothing."""
    return {id(entry): () for entry in entries}


def _about(products: Sequence[Compute]) -> str:
    names = (product.op.name for product in products)
    layouts = (str(product.writes[0].layout) for product in products)
    return f"{', '.join(names)}: one {products[0].op.kind.label} -> {', '.join(layouts)}"


def _joined(names: Iterable[str]) -> str:
    return " and ".join(names)
