"""From the cuts of a block's forward operations to a program: backward tied to them, collectives derived.

A tensor passes from its maker to its readers through a deliver. A reader that needs the maker's layout takes it as it
is; to every other layout the deliver changes it once. Gradients take the same way back: contributions with equal cuts
are added, and the sum is changed to the layout that the maker's own gradient needs. An addition passes its gradient on
to both inputs, with its own cuts.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import Dims, Op, Pass
from autoshard.layout.layout import Collective, Cuts, Layout
from autoshard.layout.legal import op_dims
from autoshard.layout.program import (
    Communicate,
    Compute,
    CountOnce,
    Given,
    Instruction,
    Program,
    Sum,
    Value,
    in_the_earliest_pass,
)
from autoshard.layout.redistribute import Price, Sizes, cutting_atoms, layout_over, only_gathers, redistribute


def lower(  # noqa: PLR0913
    block: Block,
    cuts: Mapping[str, Cuts],
    atoms: Sizes,
    price: Price,
    *,
    boundary: Cuts,
    keeps_gathered: bool,
    has_inputs: bool = False,
) -> Program:
    """Lower the micro-batch of a block; ``cuts`` holds the cut of every dim of every forward operation.

    If every rank ``has_inputs`` whole, each reader is given its part.
    """
    forward = Lowering(
        block, cuts, atoms, price, boundary=boundary, keeps_gathered=keeps_gathered, has_inputs=has_inputs
    )
    return forward.finished(block)


Atoms = tuple[str, ...]
Busy = frozenset[str] | None
When = Pass | Literal["again"]  # whose reading: of a pass, or of what is computed again for backward


Read = tuple[int, str, Dims, bool, bool]  # index, name and dims of an input, and if it is a state and lets sums pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpFacts:
    """What holds of an operation of a block however it is cut: its dims, its inputs in order, its results."""

    dims: Dims
    read_dims: frozenset[str]
    reads: tuple[Read, ...]  # states last: their sums wait like those of what is added to them
    results: tuple[tuple[str, Dims, tuple[int, ...]], ...]  # with the inputs whose sums pass into each
    maximises: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockFacts:
    """What holds of a block however it is cut."""

    ops: Mapping[str, _OpFacts]
    forward: tuple[_OpFacts, ...]
    at_once: frozenset[str]  # gradients that are summed where they arrive
    settled: frozenset[str]
    maker: Mapping[str, Op]


@lru_cache(maxsize=256)  # a search cuts a few blocks in hundreds of ways
def _facts(block: Block) -> _BlockFacts:
    collects = (op for op in block.select("micro_batch", "I") if isinstance(op.kind, Collect) and op.kind.settles)
    at_once = frozenset(name for op in collects for name in op.outputs)
    settled, ops = _settled(block) | at_once, dict[str, _OpFacts]()
    for op in block.select("micro_batch"):
        linear, tensors = op.kind.linear_through(), [block.tensors[name] for name in op.inputs]
        reads = [
            (index, tensor.name, tensor.dims, tensor.role == "state", index in linear and tensor.name not in settled)
            for index, tensor in enumerate(tensors)
        ]
        passing = [
            tuple(read for read in range(len(tensors)) if index in linear.get(read, ()))
            for index in range(len(op.outputs))
        ]
        ops[op.name] = _OpFacts(
            dims=op_dims(block, op),
            read_dims=frozenset(dim for tensor in tensors for dim in tensor.dims),
            reads=tuple(sorted(reads, key=lambda read: read[3])),
            results=tuple((name, block.tensors[name].dims, passing[index]) for index, name in enumerate(op.outputs)),
            maximises=isinstance(op.kind, Reduce) and op.kind.function == "max",
        )
    maker = {name: op for op in reversed(block.ops) for name in op.outputs}
    forward = tuple(ops[op.name] for op in block.select("micro_batch", "F"))
    return _BlockFacts(ops=ops, forward=forward, at_once=at_once, settled=settled, maker=maker)


class Lowering:
    """A program under construction: the values that exist, their layouts, and the passes that made them.

    It begins with the forward pass. What is computed again changes no other pass, so one forward pass may be finished
    with every kind of recompute.
    """

    def __init__(  # noqa: PLR0913
        self,
        block: Block,
        cuts: Mapping[str, Cuts],
        atoms: Sizes,
        price: Price,
        *,
        boundary: Cuts,
        keeps_gathered: bool,
        has_inputs: bool = False,
    ) -> None:
        self.block = block
        self.cuts = cuts
        self.atoms, self._cutting = atoms, cutting_atoms(atoms)
        self.price = price
        self.boundary = boundary
        self.keeps_gathered, self.has_inputs = keeps_gathered, has_inputs
        self.instructions: list[Instruction] = []
        self.made: dict[str, Value] = {}
        self._changed: dict[tuple[str, Layout, When], Value] = {}
        self._parts: dict[str, list[str]] = {}
        self._origin: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._entry = {tensor: f"{name}_out" for name in block.gives for tensor in (name, f"d.{name}")}
        self._seeds = {f"d.{name}": name for name in block.gives}  # gradients that arrive, and of which results
        self._count = 0
        self._facts = _facts(block)
        for op in block.select("micro_batch", "F"):
            self.add(op)

    def finished(self, block: Block) -> Program:
        """Return the program of the block, or of the same block with operations that are computed again."""
        lowering = self._with_backward_of(block)
        for op in block.select("micro_batch", "IW"):
            lowering.add(op)
        lowering.finish_clones()
        results = {f"{tensor.name}.sum": lowering.made[f"{tensor.name}.sum"] for tensor in block.parameters}
        for name in block.gives:  # parts of a single number wait: a loss is only reported, and added once per step
            has_dims = bool(block.tensors[name].dims)
            results[name] = lowering.fetch(name, lowering.between(name), "F") if has_dims else lowering.made[name]
        for name in block.takes:
            gradient = block.given_back(name)
            results[gradient] = lowering.fetch(gradient, lowering.between(name), "I")
        gradients = {results[block.given_back(name)].name for name in block.takes}
        return Program(instructions=in_the_earliest_pass(lowering.instructions, gradients), results=results)

    def _with_backward_of(self, block: Block) -> "Lowering":
        """Return a copy of the forward pass that goes on with another block; its forward pass is the same."""
        lowering = copy(self)
        lowering.block, lowering._facts = block, _facts(block)
        assert self._facts.forward == lowering._facts.forward, "recompute changes no forward pass"
        lowering.instructions = [*self.instructions]
        lowering.made, lowering._changed = {**self.made}, {**self._changed}
        lowering._parts, lowering._origin, lowering._entry = {**self._parts}, {**self._origin}, {**self._entry}
        return lowering

    def add(self, op: Op) -> None:
        """Lower one operation; delivers and their gradients only record the tensors behind a name."""
        if isinstance(op.kind, Deliver):
            back = {new: old for old, new in op.kind.rename}
            self._origin[op.outputs[0]] = (op.inputs[0], back)
            self._entry[op.inputs[0]] = op.source
            return
        if isinstance(op.kind, Collect):
            self._parts[op.outputs[0]] = list(op.inputs)
            self._entry[op.outputs[0]] = op.source
            return
        facts = self._facts.ops[op.name]
        op_cuts, ring = _restricted(self.cuts[op.source], facts.dims), tuple[Collective, ...]()
        around = tuple(atom for atom in op_cuts.get(op.kind.ring_dim, ()) if self.atoms.get(atom, 1) > 1)
        if around:
            hops = math.prod(self.atoms[atom] for atom in around) - isinstance(op.kind, Attend)
            ring = (Collective(kind="permute", dim=op.kind.ring_dim, atoms=around),) * hops
        reads = tuple(self._reads(op, facts, op_cuts))
        writes = tuple(self._outputs(facts, op_cuts, reads))
        self.made |= {value.tensor: value for value in writes}
        self.instructions.append(Compute(op=op, cuts=op_cuts, reads=reads, writes=writes, ring=ring))

    def finish_clones(self) -> None:
        """Give unread results of clones the layouts of the forward pass, because modules run to their end."""
        ops = self.block.select("micro_batch")
        read = {name for op in ops for name in op.inputs}
        for op in ops:
            if op.again and isinstance(op.kind, Deliver) and op.outputs[0] not in read:
                tensor = op.outputs[0].removesuffix(".again")
                readers = (reader for reader in self.block.select("micro_batch", "F") if tensor in reader.inputs)
                reader_cuts = [self.cuts[reader.name] for reader in readers if reader.name in self.cuts]
                for cuts in (*reader_cuts, self.boundary) if tensor in self.block.gives else reader_cuts:
                    self.fetch(op.outputs[0], _restricted(cuts, self.block.tensors[tensor].dims), "again")

    def fetch(self, tensor: str, cuts: Cuts, when: When, busy: Busy = None) -> Value:
        """Return a value of a tensor in these cuts, changing it if need be.

        A linear reader gives the atoms that cut its dims (``busy``) and takes sums that are pending over others.
        """
        root, root_cuts = tensor, dict(cuts)
        while root in self._origin:
            root, back = self._origin[root]
            root_cuts = {back.get(dim, dim): atoms for dim, atoms in root_cuts.items()}
        if root in self._parts:
            return self._collected(root, root_cuts, when, busy)
        if root not in self.made:
            from_neighbours = root in self._seeds or root in self.block.takes
            self._give(root, self.between(root) if from_neighbours else root_cuts)
        elif self.has_inputs and self.block.tensors[root].role == "input":
            return self._given_again(root, root_cuts)
        return self._change(self.made[root], root_cuts, when, busy)

    def _reads(self, op: Op, facts: _OpFacts, op_cuts: Cuts) -> list[Value]:
        """Fetch the inputs of an operation in its cuts; an accumulator last: its sums wait like its addend's."""
        busy = frozenset(atom for atoms in op_cuts.values() for atom in atoms)
        when: When = "again" if op.again else op.pass_
        by_index: dict[int, Value] = {}
        for index, name, dims, is_state, passes in facts.reads:
            if is_state:
                (addend,) = by_index.values()
                self._give(name, dict(addend.layout.dims), addend.layout.sums)
            by_index[index] = self.fetch(name, {dim: op_cuts[dim] for dim in dims}, when, busy if passes else None)
        return [by_index[index] for index in range(len(op.inputs))]

    def between(self, tensor: str) -> Cuts:
        """Return how a tensor lies between blocks."""
        return _restricted(self.boundary, self.block.tensors[tensor].dims)

    def _give(self, tensor: str, cuts: Cuts, sums: tuple[str, ...] = ()) -> None:
        layout = _layout(self.block.tensors[tensor].dims, cuts, sums=sums)
        self.made[tensor] = Value(name=tensor, tensor=tensor, layout=layout)
        self.instructions.append(Given(value=self.made[tensor]))

    def _given_again(self, tensor: str, cuts: Cuts) -> Value:
        """Give another reader its part of an input."""
        layout = _layout(self.block.tensors[tensor].dims, cuts)
        key = (tensor, layout, "F")
        if layout == self.made[tensor].layout:
            return self.made[tensor]
        if key not in self._changed:
            self._changed[key] = self._new(tensor, layout)
            self.instructions.append(Given(value=self._changed[key]))
        return self._changed[key]

    def _outputs(self, facts: _OpFacts, op_cuts: Cuts, reads: Sequence[Value]) -> Iterator[Value]:
        """Cut results as their operation is cut; an atom of a dim that one lacks leaves a sum (or maximum) pending."""
        used = [(dim, atoms) for dim, atoms in op_cuts.items() if atoms and dim in facts.read_dims]
        for name, dims, passing in facts.results:
            held = {atom for dim in dims for atom in op_cuts[dim]}
            lost = [atom for _, atoms in used for atom in atoms if atom not in held]
            passed = [atom for number in passing for atom in reads[number].layout.sums]
            pending = tuple(dict.fromkeys((*lost, *passed)))
            layout = _layout(dims, op_cuts, **{"maxima" if facts.maximises else "sums": pending})
            yield Value(name=name, tensor=name, layout=layout)

    def _change(self, value: Value, cuts: Cuts, when: When, busy: Busy) -> Value:
        now = value.layout
        pending = () if busy is None else tuple(atom for atom in now.sums if atom not in busy)
        if (
            pending == now.sums
            and not now.maxima
            and now.dims == tuple([(dim, tuple(cuts.get(dim, ()))) for dim, _ in now.dims])
        ):
            return value
        target = _layout(tuple(dim for dim, _ in now.dims), cuts, sums=pending)
        gathers = only_gathers(layout_over(now, self._cutting), layout_over(target, self._cutting))
        shared = "F" if self.keeps_gathered or not gathers else when if when in ("F", "again") else "I"
        key = (value.name, target, shared)  # sums and moves are kept for later readers, gathers on some platforms
        if key not in self._changed:
            self._changed[key] = self._communicate(value, target, "I" if when == "again" else when)
        return self._changed[key]

    def _communicate(self, value: Value, target: Layout, pass_: Pass) -> Value:
        entry = self._entry.get(value.tensor, value.tensor)
        path = redistribute(value.layout, target, self.atoms, self.price)
        for number, change in enumerate(path, start=1):  # the path leaves out atoms of size 1; its end names them again
            after = self._new(value.tensor, target if number == len(path) else change.after)
            self.instructions.append(
                Communicate(entry=entry, pass_=pass_, collective=change.collective, reads=value, writes=after)
            )
            value = after
        return Value(name=value.name, tensor=value.tensor, layout=target)

    def _collected(self, tensor: str, cuts: Cuts, when: When, busy: Busy) -> Value:
        """Add the gradients of all readers: those with equal cuts first, then these sums, brought to one layout."""
        by_layout: dict[Layout, list[Value]] = defaultdict(list)
        dims = self.block.tensors[tensor].dims
        for part in self._parts[tensor]:
            value = self._part(part, tensor)
            by_layout[_layout(dims, dict(value.layout.dims))].append(value)
        added = [self._added(tensor, values) for values in by_layout.values()]
        if tensor in self._facts.at_once:
            added = [self._change(value, dict(value.layout.dims), when, None) for value in added]
        changed = [self._change(value, cuts, when, busy) for value in added]
        if len({frozenset(value.layout.sums) for value in changed}) > 1:  # one part may stay pending only if all do
            changed = [self._change(value, cuts, when, None) for value in changed]
        return self._added(tensor, changed)

    def _part(self, part: str, tensor: str) -> Value:
        """Return a contribution to a gradient with the maker's names of the dims; an addition keeps its own cuts."""
        value = self.made.get(part)
        if part in self._parts or part in self._seeds:
            result = self._seeds.get(part) or self.block.op(self._entry[part]).inputs[0]
            cuts = self.cuts[self._facts.maker[result].source]
            value = self.fetch(part, _restricted(cuts, self.block.tensors[part].dims), "I")
        assert value, f"{part} is not made yet"
        kind = self._facts.maker[tensor].kind
        names = dict(kind.rename) if isinstance(kind, Collect) else {}
        dims = tuple((names.get(dim, dim), atoms) for dim, atoms in value.layout.dims)
        return Value(name=value.name, tensor=tensor, layout=Layout(dims=dims, sums=value.layout.sums))

    def _added(self, tensor: str, values: Sequence[Value]) -> Value:
        """Add values with equal cuts; over an atom that is pending in some only, the others count on one rank."""
        if len(values) == 1:
            return values[0]
        pending = tuple(dict.fromkeys(atom for value in values for atom in value.layout.sums))
        aligned: list[Value] = []
        for value in values:
            missing = tuple(atom for atom in pending if atom not in value.layout.sums)
            layout = Layout(dims=value.layout.dims, sums=pending)
            if not missing:
                aligned.append(Value(name=value.name, tensor=value.tensor, layout=layout))
                continue
            key = (value.name, layout, "F")
            if key not in self._changed:
                self._changed[key] = self._new(value.tensor, layout)
                self.instructions.append(CountOnce(atoms=missing, reads=value, writes=self._changed[key]))
            aligned.append(self._changed[key])
        key = (" + ".join(value.name for value in aligned), aligned[0].layout, "F")
        if key not in self._changed:
            self._changed[key] = self._new(tensor, aligned[0].layout)
            self.instructions.append(Sum(reads=tuple(aligned), writes=self._changed[key]))
        return self._changed[key]

    def _new(self, tensor: str, layout: Layout) -> Value:
        self._count += 1
        return Value(name=f"{tensor}@{self._count}", tensor=tensor, layout=layout)


def _settled(block: Block) -> frozenset[str]:
    """Return the tensors with a reader that needs their sum resolved; no other reader may then pass it on pending."""
    roots: dict[str, str] = {}
    needed: set[str] = set()
    for op in block.select("micro_batch"):
        if isinstance(op.kind, Deliver):
            roots[op.outputs[0]] = roots.get(op.inputs[0], op.inputs[0])
        elif not isinstance(op.kind, Collect):
            linear = op.kind.linear_through()
            needed |= {roots.get(name, name) for index, name in enumerate(op.inputs) if index not in linear}
    return frozenset(needed | {name for name, root in roots.items() if root in needed})


def _restricted(cuts: Cuts, dims: Dims) -> Cuts:
    return {dim: cuts.get(dim, ()) for dim in dims}


def _layout(dims: Dims, cuts: Cuts, *, sums: tuple[str, ...] = (), maxima: tuple[str, ...] = ()) -> Layout:
    return _one_layout(tuple([(dim, tuple(cuts.get(dim, ()))) for dim in dims]), sums, maxima)


@lru_cache(maxsize=1 << 14)  # a block has many values of few layouts
def _one_layout(dims: tuple[tuple[str, Atoms], ...], sums: Atoms, maxima: Atoms) -> Layout:
    return Layout(dims=dims, sums=sums, maxima=maxima)
