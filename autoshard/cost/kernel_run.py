"""Which operations of a block run as one kernel, and what it reads from and writes to memory."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.cost.live import Fresh
from autoshard.graph.block import Block, Fused
from autoshard.graph.kinds.attention import SCORES
from autoshard.graph.kinds.linear import Collect, Deliver, Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Op, Tensor
from autoshard.layout.layout import Cuts
from autoshard.spec.kernels import BothWays

Moved = tuple[str, Tensor]  # an operation, and a tensor that it reads or writes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """Operations of one pass that run as one entry of a kernel table, and what they read from and write to memory."""

    pass_: str
    ops: tuple[Op, ...]
    touched: tuple[Moved, ...]
    fresh: tuple[Fresh, ...]  # of these, what is no state
    skips_masked: bool
    mask_tile: int
    flops_ratio: float
    launches: int
    score_bytes: int  # per (query, key) pair of a head, beside what is kept of them
    traffic_ratio: float
    products: bool  # whether its matrix products are of activations with the weights of a layer


def kernel_runs(
    block: Block, held: Mapping[str, tuple[Cuts, ...]], added: frozenset[str] = frozenset(), *, eager: bool = True
) -> Iterator[KernelRun]:
    """Group the operations of a table's entry: forward, backward, weight gradients and their sums are a run each.

    ``added`` names sums that the products of weight gradients add to themselves. ``eager`` kernels hand everything on
    through memory; a compiler makes scores of attention again piece by piece, where their backward needs them.
    """
    owner = {name: group for group in block.fused for name in group.ops}
    members: dict[tuple[str, ...], list[Op]] = defaultdict(list)
    for op in block.select("micro_batch"):
        if op.source in owner:
            sums = isinstance(op.kind, Accumulate) and op.outputs[0] not in added
            members[owner[op.source].ops[0], op.pass_, str(op.again), str(sums)].append(op)
    links = _Links.of(block, held, eager=eager)
    weighed = {op.name for op in block.ops if _weighs(block, op)} if block.kind == "layer" else frozenset[str]()
    for (_, pass_, _, sums), ops in members.items():
        yield _kernel_run(links, owner[ops[0].source], pass_, ops, weighed, summed=sums == str(True))


def _weighs(block: Block, op: Op) -> bool:
    return isinstance(op.kind, Einsum) and any(block.tensors[name].role == "parameter" for name in op.inputs)


def _kernel_run(
    links: "_Links", group: Fused, pass_: str, ops: Sequence[Op], weighed: Collection[str], *, summed: bool
) -> KernelRun:
    forward = pass_ == "F" or ops[0].again
    plain = summed or pass_ == "W"  # nothing of what makes a kernel several is in products and sums of their own
    touched = tuple(links.forward(ops, group) if forward else links.backward(ops, group))
    return KernelRun(
        pass_=pass_,
        ops=tuple(ops),
        touched=touched,
        fresh=tuple((op, tensor, links.held_cuts(tensor)) for op, tensor in touched if not links.is_state(tensor)),
        skips_masked=group.skips_masked,
        mask_tile=group.mask_tile,
        flops_ratio=1.0 if forward else group.backward_flops_ratio,
        launches=_launches(group.launches, pass_, forward=forward, summed=summed),
        score_bytes=0 if plain else _way(group.score_bytes, forward=forward),
        traffic_ratio=1.0 if plain else group.traffic_ratio,
        products=_weighed_only([op for op in ops if isinstance(op.kind, Einsum)], weighed),
    )


def _weighed_only(products: Sequence[Op], weighed: Collection[str]) -> bool:
    return bool(products) and all(op.source in weighed for op in products)


def _launches(count: BothWays, pass_: str, *, forward: bool, summed: bool) -> int:
    one = min(1, count.forward)
    if summed:
        return one
    if pass_ == "W":
        return one if count.weights is None else count.weights
    return _way(count, forward=forward)


def _way(count: BothWays, *, forward: bool) -> int:
    return count.forward if forward else count.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """Who reads what in a block; a tensor that a deliver hands on is the one it came from."""

    block: Block
    held: Mapping[str, tuple[Cuts, ...]]  # what is kept for backward when nothing is recomputed, and how it is cut
    origins: Mapping[str, frozenset[str]]  # what delivers hand on -> the tensors that it is, or is the sum of
    resident: frozenset[str]  # sums of gradients: they take the place of the sums before
    readers: Mapping[str, frozenset[str]]  # tensor -> operations that read it, directly or through delivers
    source: Mapping[str, str]  # operation -> the forward operation that it belongs to
    kept: frozenset[str]  # storages of what stays from forward to backward
    eager: bool

    @classmethod
    def of(cls, block: Block, held: Mapping[str, tuple[Cuts, ...]], *, eager: bool) -> "_Links":
        """Walk the operations backwards for what is read, and forwards for where it comes from."""
        readers: dict[str, set[str]] = defaultdict(set)
        for op in reversed(block.ops):
            passes_on = isinstance(op.kind, Deliver | Collect)
            for name in op.inputs:
                readers[name] |= readers[op.outputs[0]] or {op.name} if passes_on else {op.name}
        origins: dict[str, frozenset[str]] = {}
        for op in block.ops:
            if isinstance(op.kind, Deliver | Collect):
                found = [origins.get(name, frozenset({name})) for name in op.inputs]
                origins[op.outputs[0]] = frozenset[str]().union(*found)
        return cls(
            block=block,
            held=held,
            origins=origins,
            resident=frozenset(name for op in block.ops if isinstance(op.kind, Accumulate) for name in op.outputs),
            readers={name: frozenset(found) for name, found in readers.items()},
            source={op.name: op.source for op in block.ops},
            kept=frozenset(entry.storage for entry in block.saved),
            eager=eager,
        )

    def forward(self, ops: Sequence[Op], group: Fused) -> Iterable[Moved]:
        """List what a forward kernel moves: what others made, what others read, what it keeps; once each.

        What only its own backward reads and the kernel does not keep, is never written.
        """
        made = {output for op in ops for output in op.outputs}
        moved: dict[str, Moved] = {}
        for op in ops:
            for name in op.inputs:
                if not self._come_from(name) <= made:
                    moved.setdefault(name, (op.name, self.block.tensors[name]))
            for name in op.outputs:
                sources = {self.source[reader] for reader in self.readers.get(name, ())}
                if not sources or sources - set(group.ops) or self._storage(name) in self.held:
                    moved.setdefault(name, (op.name, self.block.tensors[name]))
        return [*moved.values(), *self._copies(group, dropped=any(op.again for op in ops))]

    def backward(self, ops: Sequence[Op], group: Fused) -> Iterable[Moved]:
        """List what a backward kernel moves; for what was not kept as it was it reads the forward kernel's copies."""
        names, made = {op.name for op in ops}, {output for op in ops for output in op.outputs}
        reads = [(op.name, name) for op in ops for name in op.inputs if not self._come_from(name) <= made]
        lost = [name for _, name in reads if self._is_lost(name)]
        writes = [
            (op.name, name)
            for op in ops
            for name in op.outputs
            if not self.readers.get(name, frozenset()) or self.readers[name] - names
        ]
        moved = {name: (op, self.block.tensors[name]) for op, name in (*reads, *writes) if name not in lost}
        return [*moved.values(), *(self._copies(group, dropped=True) if lost else ())]

    def is_state(self, tensor: Tensor) -> bool:
        """Whether a tensor has memory for the whole step; a sum of gradients takes the place of the sum before."""
        return tensor.name in self.resident or tensor.role in ("parameter", "state")

    def held_cuts(self, tensor: Tensor) -> tuple[Cuts, ...]:
        """Return how a tensor is cut where a rank keeps it for backward; nothing if it does not."""
        return self.held.get(self._storage(tensor.name), ())

    def _storage(self, name: str) -> str:
        """Return what a tensor is kept as; a clone's result takes the place of what was dropped."""
        return min(self._come_from(name)).removesuffix(".again")

    def _come_from(self, name: str) -> frozenset[str]:
        return self.origins.get(name, frozenset({name}))

    def _is_lost(self, name: str) -> bool:
        return self.block.tensors[name].role == "activation" and self._storage(name) not in self.held

    def _copies(self, group: Fused, *, dropped: bool) -> Sequence[Moved]:
        """List what a kernel keeps beside the tensors of the graph; ``dropped``: what only its clone keeps, too."""
        return [
            (group.ops[0], save.tensor)
            for save in group.saves
            if save.tensor.name not in self.block.tensors
            and (save.storage in self.kept or (dropped and (self.eager or save.tensor.dims != SCORES)))
        ]
