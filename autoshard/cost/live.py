"""What lies in memory while a kernel of a block runs, beside states and what is kept, read off the order of operations.

The order is the one in which autograd runs them: a sum of gradients is made as soon as its weight gradient is. A tensor
that is handed on in another layout counts in the larger one while a kernel reads it. W is taken to run right after I.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Op, Tensor
from autoshard.layout.layout import Cuts

Fresh = tuple[str, Tensor, tuple[Cuts, ...]]  # operation, tensor, and how it is cut where it is kept anyway


class Kernel(Protocol):
    """A kernel's operations, and the tensors that it reads or writes and that are no state."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """Its operations."""
        ...

    @property
    def fresh(self) -> tuple[Fresh, ...]:
        """What it touches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What lies in memory beside all that is kept while one kernel runs, and what of that is needed no more."""

    takes: tuple[Fresh, ...]
    frees: frozenset[str]  # storages


def moments(
    block: Block,
    kernels: Sequence[Kernel],
    op_cuts: Mapping[str, Cuts],
    held: frozenset[str],
    unmade: frozenset[str],
) -> tuple[Moment, ...]:
    """Return a moment for each kernel, in the order in which they run.

    ``op_cuts`` says how each operation is cut; ``held`` names the storages that are kept, or made again before backward
    reads them; ``unmade`` the gradients that are never tensors.
    """
    line = _Line(block=block, kernels=tuple(kernels), op_cuts=op_cuts, held=held, unmade=unmade)
    return tuple(map(line.moment, range(len(line.ordered))))


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The kernels of a block in a row, and from when to when each tensor lives."""

    block: Block
    kernels: tuple[Kernel, ...]
    op_cuts: Mapping[str, Cuts]
    held: frozenset[str]
    unmade: frozenset[str]

    def moment(self, number: int) -> Moment:
        """Return what is held while a kernel runs: what it touches, what waits for later kernels."""
        fresh = self.ordered[number].fresh
        own = tuple(entry for entry in fresh if self._takes_room(entry[1].name) and not self._as_kept(entry))
        touched = {self.storage(entry[1].name) for entry in fresh}
        waiting = tuple(
            entry
            for storage, entry in self._entries.items()
            if storage not in touched and self._born[storage] < number < self._dead[storage]
        )
        freed = {storage for storage in self.held if self._dead.get(storage, number) < number}
        return Moment(takes=(*own, *waiting), frees=frozenset(freed) if number >= self._turn else frozenset())

    @cached_property
    def ordered(self) -> tuple[Kernel, ...]:
        """The kernels in the order in which they run."""
        place = {op.name: number for number, op in enumerate(self.block.ops)}
        maker = {name: op.name for op in self.block.ops for name in op.outputs}

        def turn(kernel: Kernel) -> tuple[int, int]:
            first = kernel.ops[0]
            if isinstance(first.kind, Accumulate):
                return place[maker[self._root(first.inputs[1])]], 1
            return place[first.name], 0

        return tuple(sorted(self.kernels, key=turn))

    def storage(self, name: str) -> str:
        """Return under which name a tensor's memory is known; a clone's result takes the place of what was dropped."""
        root = self._root(name)
        first = root.removesuffix(".again")
        return self._over.get(first, first if first in self.held else root)

    @cached_property
    def _roots(self) -> Mapping[str, str]:
        """What is handed on or added up -> the first tensor that it is made of, into which others are added."""
        roots: dict[str, str] = {}
        for op in self.block.ops:
            if isinstance(op.kind, Deliver | Collect):
                first, *others = (roots.get(name, name) for name in op.inputs)
                for other in others:
                    roots |= {name: first for name, root in roots.items() if root == other}
                    roots[other] = first
                roots[op.outputs[0]] = first
        return roots

    def _root(self, name: str) -> str:
        return self._roots.get(name, name)

    @cached_property
    def _over(self) -> Mapping[str, str]:
        """What is overwritten, and its gradient -> the storage that takes its place."""
        found: dict[str, str] = {}
        for entry in self.block.saved:
            if entry.over:
                readers = [op.name for op in self.block.ops if entry.over in map(self._root, op.inputs)]
                gradients = [
                    name
                    for op in self.block.ops
                    if op.source in readers and op.pass_ == "I" and not isinstance(op.kind, Collect)
                    for name in op.outputs
                    if self.block.tensors[name].dims == entry.tensor.dims
                ]
                found |= dict.fromkeys([entry.over, *gradients], entry.storage)
        return found

    def _takes_room(self, name: str) -> bool:
        return self._root(name) not in self.unmade and self.storage(name) not in self._over.values()

    def _as_kept(self, entry: Fresh) -> bool:
        """Say whether an operation finds a tensor as it is kept, whatever the sizes of atoms."""
        op, tensor, held = entry
        return {dim: cut for dim, cut in self.op_cuts[op].items() if dim in tensor.dims} in held

    @cached_property
    def _turn(self) -> int:
        """The number of the first kernel of backward."""
        backward = (number for number, one in enumerate(self.ordered) if one.ops[0].pass_ != "F" or one.ops[0].again)
        return next(backward, len(self.ordered))

    @cached_property
    def _uses(self) -> Mapping[str, list[tuple[int, bool, Fresh]]]:
        """Storage -> its uses in order: which kernel, whether it makes it, and the entry."""
        uses: dict[str, list[tuple[int, bool, Fresh]]] = defaultdict(list)
        for number, kernel in enumerate(self.ordered):
            made = {name for op in kernel.ops for name in op.outputs}
            for entry in kernel.fresh:
                uses[self.storage(entry[1].name)].append((number, entry[1].name in made, entry))
        return uses

    @cached_property
    def _dead(self) -> Mapping[str, float]:
        """Storage -> the number of the last kernel that uses it; what the block hands back lives to its end."""
        end = {self.storage(f"d.{name}") for name in (self.block.carry_out,) if name}
        last = {storage: max(number for number, _, _ in uses) for storage, uses in self._uses.items()}
        return {storage: len(self.ordered) if storage in end else number for storage, number in last.items()}

    @cached_property
    def _born(self) -> Mapping[str, int]:
        """Storage -> the number of the kernel that makes it; what arrives with backward is there when that starts."""
        arrived = {self.storage(f"d.{self.block.carry_out}")}
        return {
            storage: self._turn - 1 if storage in arrived else min(number for number, _, _ in uses)
            for storage, uses in self._uses.items()
        }

    @cached_property
    def _entries(self) -> Mapping[str, Fresh]:
        """Storage of what is made to be read later -> how it is made, or how it is read if it comes from outside."""
        found: dict[str, Fresh] = {}
        for storage, uses in self._uses.items():
            makes = [entry for _, made, entry in uses if made]
            _, _, read = uses[0]
            entry = makes[0] if makes else read
            if self._takes_room(entry[1].name) and storage not in self.held and not entry[2]:
                found[storage] = entry
        return found
