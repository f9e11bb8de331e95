"""The kernels of a block: their operations, what they read and write, and what lies in memory while each runs.

Kernels run in the order in which autograd runs them: a sum of gradients is made as soon as its weight gradient is. A
tensor that is handed on in another layout counts in the larger one while a kernel reads it. W is taken to run right
after I.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from autoshard.cost.collective import Number
from autoshard.graph.block import Block, FusedOps
from autoshard.graph.kinds.attention import SCORES
from autoshard.graph.kinds.linear import Collect, Deliver, Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Dims, Op, Tensor
from autoshard.layout.layout import Cuts, local_sizes
from autoshard.layout.program import Communicate, Compute, CountOnce, Program, Sum, Value
from autoshard.layout.sharding import Sharding
from autoshard.spec.workload import DTYPE_BYTES

Moved = tuple[str, Tensor]  # an operation, and a tensor that it reads or writes
Slot = tuple[str, Tensor, str]  # operation, tensor, and the storage in which it may be kept for backward
Fresh = tuple[str, Tensor, tuple[Cuts, ...]]  # operation, tensor, and how it is cut where it is kept anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """Operations of one pass that run as one entry of a kernel table, and what they read from and write to memory."""

    pass_: str
    ops: tuple[Op, ...]
    touched: tuple[Moved, ...]
    fresh: tuple[Slot, ...]  # of these, what is no state
    keeps: tuple[str, ...]  # storages from which a backward kernel makes again what its gradients need
    skips_masked: bool
    mask_tile: int
    flops_ratio: float
    launches: int
    chunk: int | None  # tokens for each of which it is launched so often
    score_bytes: int  # per (query, key) pair of a head, beside what is kept of them
    traffic_ratio: float
    products: bool  # whether its matrix products are those with the weights of a layer that may be in FP8
    experts: bool = False  # whether these are of rows with the weights of their experts


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKernels:
    """The kernels of a block however it is cut, and what lies in memory while each runs, in the order of both.

    A moment has what its kernel takes unless it finds that as it is saved, what waits, and what is free.
    """

    runs: tuple[KernelRun, ...]
    moments: tuple[tuple[tuple[Slot, ...], tuple[Slot, ...], frozenset[str]], ...]

    def cut(self, storage_cuts: Mapping[str, tuple[Cuts, ...]], op_cuts: Mapping[str, Cuts]) -> "tuple[Moment, ...]":
        """Return the moments, given how storages are kept and operations are cut."""

        def fresh(slots: Sequence[Slot]) -> list[Fresh]:
            return [(op, tensor, storage_cuts.get(storage, ())) for op, tensor, storage in slots]

        def is_as_saved(entry: Fresh) -> bool:
            op, tensor, layouts = entry
            return bool(layouts) and {dim: cut for dim, cut in op_cuts[op].items() if dim in tensor.dims} in layouts

        moments: list[Moment] = []
        for taken, waiting, frees in self.moments:
            takes = [entry for entry in fresh(taken) if not is_as_saved(entry)]
            moments.append(Moment(takes=(*takes, *fresh(waiting)), frees=frees))
        return tuple(moments)


@lru_cache(maxsize=256)  # a search cuts a few blocks in hundreds of ways
def block_kernels(
    block: Block,
    storages: frozenset[str],
    added: frozenset[str] = frozenset(),
    unmade: frozenset[str] = frozenset(),
    *,
    eager: bool = True,
) -> BlockKernels:
    """Group the operations of a table's entry: forward, backward, weight gradients and their sums are a run each.

    ``storages`` stay for backward when nothing is recomputed. ``added`` names sums to which the products of weight
    gradients add themselves, ``unmade`` gradients that are never tensors. ``eager`` kernels hand everything on through
    memory; a compiler makes scores of attention again piece by piece, where their backward needs them.
    """
    runs = tuple(_kernel_runs(block, storages, added, eager=eager))
    return BlockKernels(runs=runs, moments=tuple(_memory_timeline(block, runs, storages, unmade)))


def _kernel_runs(block: Block, storages: frozenset[str], added: frozenset[str], *, eager: bool) -> Iterator[KernelRun]:
    owner = {name: group for group in block.fused for name in group.ops}
    members: dict[tuple[str, str, bool, bool], list[Op]] = defaultdict(list)
    for op in block.select("micro_batch"):
        if op.source in owner:
            summed = isinstance(op.kind, Accumulate) and op.outputs[0] not in added
            members[owner[op.source].ops[0], op.pass_, op.again, summed].append(op)
    traffic = _MemoryTraffic(block, storages, eager=eager)
    weight_products, expert_products = block.weight_products, block.expert_products
    for (_, pass_, again, summed), ops in members.items():
        group, forward = owner[ops[0].source], pass_ == "F" or again
        plain = summed or pass_ == "W"  # nothing of what makes a kernel several is in products and sums of their own
        launches = group.kernel.launches.forward if forward else group.kernel.launches.backward
        if plain:
            weight_launches = None if summed else group.kernel.launches.weights
            launches = min(1, group.kernel.launches.forward) if weight_launches is None else weight_launches
        score_bytes = group.kernel.score_bytes.forward if forward else group.kernel.score_bytes.backward
        touched = tuple(traffic.forward(ops, group) if forward else traffic.backward(ops, group))
        scratch = () if forward or plain else [(group.ops[0], save.tensor) for save in group.scratch]
        products = [op.source for op in ops if isinstance(op.kind, Einsum)]
        fresh = ((op, tensor) for op, tensor in (*touched, *scratch) if not traffic.is_state(tensor))
        yield KernelRun(
            pass_=pass_, ops=tuple(ops), touched=touched,
            fresh=tuple([(op, tensor, traffic.storage(tensor.name)) for op, tensor in fresh]),
            keeps=() if forward or plain else tuple(save.storage for save in group.saves),
            skips_masked=group.kernel.skips_masked, mask_tile=group.kernel.mask_tile,
            flops_ratio=1.0 if forward else group.kernel.backward_flops_ratio,
            launches=launches, chunk=None if plain else group.kernel.chunk, score_bytes=0 if plain else score_bytes,
            traffic_ratio=1.0 if plain else group.kernel.traffic_ratio,
            products=bool(products) and weight_products.issuperset(products),
            experts=not expert_products.isdisjoint(products),
        )  # fmt: skip


def gradient_sums(
    block: Block, program: Program, adding: Collection[str], *, eager: bool
) -> Iterator[tuple[KernelRun, tuple[Value, ...]]]:
    """Return the kernels that add what several readers of a tensor send back, with what each reads and writes.

    Operations in ``adding`` add to the sum by themselves; a sum inside one backward kernel of all readers needs no
    kernel either.
    """
    owner = {name: group.ops[0] for group in block.fused for name in group.ops}
    sums = {op.outputs[0]: op for op in block.ops if isinstance(op.kind, Collect)}
    maker: dict[str, Op] = {}
    for entry in program.instructions:
        if isinstance(entry, Compute):
            maker |= {value.name: entry.op for value in entry.writes}
        elif isinstance(entry, Communicate | CountOnce) and entry.reads.name in maker:
            maker[entry.writes.name] = maker[entry.reads.name]  # among one rank nothing happens in between
        elif isinstance(entry, Sum):
            makers = [maker.get(value.name) for value in entry.reads]
            kernels = {op and owner.get(op.source) for op in makers}
            added = [value for value, op in zip(entry.reads, makers, strict=True) if not (op and op.name in adding)]
            if len(added) > 1 and (len(kernels) > 1 or None in kernels):
                run = KernelRun(
                    pass_="I", ops=(sums[entry.writes.tensor],), touched=(), fresh=(), keeps=(), skips_masked=False,
                    mask_tile=1, flops_ratio=1.0, launches=int(eager), chunk=None, score_bytes=0, traffic_ratio=1.0,
                    products=False,
                )  # fmt: skip
                yield run, (*added, entry.writes)


class _MemoryTraffic:
    """What the kernels of a block read and write; a tensor that a deliver hands on is the one it came from."""

    def __init__(self, block: Block, storages: frozenset[str], *, eager: bool) -> None:
        self.block, self.kept, self.eager = block, storages, eager
        self.saved = {entry.storage for entry in block.saved}
        self.source = {op.name: op.source for op in block.ops}
        # Sums of gradients take the place of the sums before.
        self.resident = {name for op in block.ops if isinstance(op.kind, Accumulate) for name in op.outputs}
        # Tensor -> operations that read it, directly or through delivers.
        self.readers: dict[str, set[str]] = defaultdict(set)
        for op in reversed(block.ops):
            hands_on = isinstance(op.kind, Deliver | Collect)
            for name in op.inputs:
                self.readers[name] |= self.readers[op.outputs[0]] or {op.name} if hands_on else {op.name}
        # What delivers hand on -> the tensors that it is, or is the sum of.
        self.origins = {name: {name} for name in block.tensors}
        for op in block.ops:
            if isinstance(op.kind, Deliver | Collect):
                self.origins[op.outputs[0]] = set[str]().union(*(self.origins[name] for name in op.inputs))

    def forward(self, ops: Sequence[Op], group: FusedOps) -> Iterator[Moved]:
        """Yield each tensor that a forward kernel reads from or writes to memory, once.

        It reads results of other kernels, and writes its results that other kernels read or that are saved for the
        backward pass. A result that only its own backward kernel reads, and that is not saved, is never written.
        """
        results = {output for op in ops for output in op.outputs}
        moved: dict[str, Moved] = {}
        for op in ops:
            read = [name for name in op.inputs if not self.origins[name] <= results]
            readers = {name: {self.source[reader] for reader in self.readers[name]} for name in op.outputs}
            written = [name for name, by in readers.items() if not by or by - {*group.ops} or self.is_kept(name)]
            for name in (*read, *written):
                moved.setdefault(name, (op.name, self.block.tensors[name]))
        yield from moved.values()
        yield from self._copies(group, dropped=any(op.again for op in ops))

    def backward(self, ops: Sequence[Op], group: FusedOps) -> Iterator[Moved]:
        """Yield what a backward kernel moves; for what was not kept as it was it reads the forward kernel's copies."""
        names, results = {op.name for op in ops}, {output for op in ops for output in op.outputs}
        reads = [(op.name, name) for op in ops for name in op.inputs if not self.origins[name] <= results]
        lost = {name for _, name in reads if self.block.tensors[name].role == "activation" and not self.is_kept(name)}
        writes = [
            (op.name, name) for op in ops for name in op.outputs if not self.readers[name] or self.readers[name] - names
        ]
        moved = {name: (op, self.block.tensors[name]) for op, name in (*reads, *writes) if name not in lost}
        yield from moved.values()
        if lost:
            yield from self._copies(group, dropped=True)

    def is_state(self, tensor: Tensor) -> bool:
        """Say whether a tensor has memory for the whole step."""
        return tensor.name in self.resident or tensor.role in ("parameter", "state")

    def is_kept(self, name: str) -> bool:
        """Say whether a rank keeps a tensor for backward."""
        return self.storage(name) in self.kept

    def storage(self, name: str) -> str:
        """Return where a tensor is kept, if it is; a clone's result takes the place of what was dropped."""
        return min(self.origins.get(name, {name})).removesuffix(".again")

    def _copies(self, group: FusedOps, *, dropped: bool) -> Iterator[Moved]:
        """Yield what a kernel keeps beside the tensors of the graph; ``dropped``: what only its clone keeps, too."""
        for save in group.saves:
            again = dropped and (self.eager or save.tensor.dims != SCORES)
            if save.tensor.name not in self.block.tensors and (save.storage in self.saved or again):
                yield group.ops[0], save.tensor


SizesOf = Callable[[Cuts], "RankSizes"]  # cuts -> a rank's sizes of all dims


class RankSizes(dict[str, Any]):  # Number, where the graph takes whole ones
    """A rank's sizes of all dims; the bytes of tensors that are alike are worked out once."""

    def __init__(self, sizes: Mapping[str, Number]) -> None:
        super().__init__(sizes)
        self._bytes: dict[tuple[Dims, str], Number] = {}

    def num_bytes(self, tensor: Tensor) -> Number:
        """Return the bytes of a rank's share of a tensor."""
        key = tensor.dims, tensor.dtype
        if key not in self._bytes:
            self._bytes[key] = tensor.num_elements(self) * DTYPE_BYTES[tensor.dtype]
        return self._bytes[key]


def rank_sizes(
    sizes: Mapping[str, Number], atoms: Mapping[str, Number], by_cuts: dict[object, RankSizes] | None = None
) -> SizesOf:
    """Return how to look up a rank's sizes of all dims by their cuts; ``by_cuts`` has those of earlier questions."""
    cache = dict[object, RankSizes]() if by_cuts is None else by_cuts

    def sizes_of(cuts: Cuts) -> RankSizes:
        if (key := tuple(cuts.items())) not in cache:
            cache[key] = RankSizes(local_sizes(sizes, cuts, atoms))
        return cache[key]

    return sizes_of


def saved_bytes(
    block: Block, sharding: Sharding, sizes_of: SizesOf, atoms: Mapping[str, Number]
) -> Mapping[str, Number]:
    """Return what a rank keeps of a block from forward to backward, for one micro-batch, by storage."""
    tensors = {entry.storage: entry.tensor for entry in block.saved}
    tensors |= {name: block.tensors[name] for name in sharding.input_cuts}
    cuts = {**sharding.kept_cuts, **sharding.input_cuts}
    return {name: bytes_in(tensor, cuts[name], sizes_of, atoms) for name, tensor in tensors.items()}


def bytes_in(tensor: Tensor, layouts: Sequence[Cuts], sizes_of: SizesOf, atoms: Mapping[str, Number]) -> Number:
    """Return the bytes of a tensor in all of these layouts; those that differ in atoms of size 1 alone are one."""
    total: Number = 0
    for number, cuts in enumerate(layouts):
        size = sizes_of(cuts).num_bytes(tensor)
        for earlier in layouts[:number]:
            moved = {atom for dim in {*cuts, *earlier} for atom in {*cuts.get(dim, ())} ^ {*earlier.get(dim, ())}}
            size = size * reduce(np.logical_or, (atoms[atom] > 1 for atom in sorted(moved)), False)
        total = total + size
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Temporary tensors in memory while one kernel runs, and the saved storages that are free by then."""

    takes: tuple[Fresh, ...]
    frees: frozenset[str]


def working_bytes(
    moments: Sequence[Moment], storage_bytes: Mapping[str, Number], op_sizes: Mapping[str, RankSizes], sizes_of: SizesOf
) -> Number:
    """Return how much more memory than the kept storages, of ``storage_bytes``, is in use at the fullest moment."""
    working: Number = 0
    free_bytes = {
        frees: sum(storage_bytes[storage] for storage in sorted(frees))
        for frees in {moment.frees for moment in moments}
    }
    for moment in moments:
        temporary: Number = 0
        for op, tensor, layouts in moment.takes:
            size = op_sizes[op].num_bytes(tensor)
            for cuts in layouts:  # a tensor that is kept takes no more memory, unless the kernel reads more of it
                size = np.where(size > sizes_of(cuts).num_bytes(tensor), size, 0)
            temporary = temporary + size
        working = np.maximum(working, temporary - free_bytes[moment.frees])
    return working


def _memory_timeline(
    block: Block,
    kernels: Iterable[KernelRun],
    kept_storages: frozenset[str],
    unmade: frozenset[str],
) -> Iterator[tuple[tuple[Slot, ...], tuple[Slot, ...], frozenset[str]]]:
    """Yield a moment for each kernel, in the order in which they run, as ``BlockKernels`` has it.

    ``kept_storages`` names the storages that are kept, or made again before backward reads them; ``unmade`` the
    gradients that are never tensors.
    """
    storages = _Storages(block, kept_storages)
    position = {op.name: number for number, op in enumerate(block.ops)}
    maker = {name: position[op.name] for op in block.ops for name in op.outputs}

    def turn(kernel: KernelRun) -> tuple[int, int]:
        first = kernel.ops[0]
        added = storages.root(first.inputs[1]) if isinstance(first.kind, Accumulate) else ""
        # A gradient that the block is given, such as that of a last bias, has no maker here.
        return (maker[added], 1) if added in maker else (position[first.name], 0)

    def takes_memory(entry: Slot) -> bool:
        name = entry[1].name
        return storages.root(name) not in unmade and storages.of(name) not in storages.over.values()

    ordered = sorted(kernels, key=turn)
    backward = (number for number, run in enumerate(ordered) if run.ops[0].pass_ != "F" or run.ops[0].again)
    first_backward = next(backward, len(ordered))
    uses: dict[str, list[tuple[int, Slot]]] = defaultdict(list)
    for number, run in enumerate(ordered):
        for entry in run.fresh:
            uses[storages.of(entry[1].name)].append((number, entry))
    carried = storages.of(f"d.{block.carry_out}")  # arrives when backward starts, and the block hands it back
    kept_until = {storage: number for number, run in enumerate(ordered) for storage in run.keeps}
    dead = {storage: max(used[-1][0], kept_until.get(storage, 0)) for storage, used in uses.items()}
    dead |= {carried: len(ordered)} if carried in uses else {}
    born: dict[str, tuple[int, Slot]] = {}  # of what is made to be read later: when it is made, and how
    for storage, used in uses.items():
        written = (entry for number, entry in used if any(entry[1].name in op.outputs for op in ordered[number].ops))
        entry = next(written, used[0][1])
        if takes_memory(entry) and storage not in kept_storages and entry[2] not in kept_storages:
            born[storage] = first_backward - 1 if storage == carried else used[0][0], entry
    for number, run in enumerate(ordered):
        touched = {storages.of(tensor.name) for _, tensor, _ in run.fresh}
        waiting = (
            entry
            for storage, (since, entry) in born.items()
            if storage not in touched and since < number < dead[storage]
        )
        frees = (
            storage for storage in kept_storages if number >= first_backward and dead.get(storage, number) < number
        )
        yield tuple(filter(takes_memory, run.fresh)), tuple(waiting), frozenset(frees)


class _Storages:
    """Under which name the memory of each tensor of a block is known."""

    def __init__(self, block: Block, kept_storages: frozenset[str]) -> None:
        self._kept = kept_storages
        # A tensor that is handed on or added up -> its first source, into which the other sources are added.
        self._roots: dict[str, str] = {}
        for op in block.ops:
            if isinstance(op.kind, Deliver | Collect):
                first, *rest = map(self.root, op.inputs)
                for added in rest:
                    self._roots |= {name: first for name, root in self._roots.items() if root == added}
                    self._roots[added] = first
                self._roots[op.outputs[0]] = first
        # What is overwritten, and the gradients that lie in its memory -> the storage that takes its place.
        self.over: dict[str, str] = {}
        for over, entry in ((entry.over, entry) for entry in block.saved):
            readers = [op.name for op in block.ops if over and over in map(self.root, op.inputs)]
            inputs = (op for op in block.ops if op.source in readers and op.pass_ == "I")
            outputs = (name for op in inputs if not isinstance(op.kind, Collect) for name in op.outputs)
            gradients = [name for name in outputs if block.tensors[name].dims == entry.tensor.dims]
            self.over |= dict.fromkeys([over, *gradients] if over else [], entry.storage)

    def root(self, name: str) -> str:
        """Return the tensor into whose memory this one is written."""
        return self._roots.get(name, name)

    def of(self, name: str) -> str:
        """Return the storage of a tensor; a clone's result takes the place of what was dropped."""
        root = self.root(name)
        first = root.removesuffix(".again")
        return self.over.get(first, first if first in self._kept else root)
