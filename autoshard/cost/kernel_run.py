"""Which operations of a block run as one kernel, and what it reads from and writes to memory."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.graph.block import Block, FusedOps
from autoshard.graph.kinds.attention import SCORES
from autoshard.graph.kinds.linear import Collect, Deliver, Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Op, Tensor
from autoshard.layout.layout import Cuts

Moved = tuple[str, Tensor]  # an operation, and a tensor that it reads or writes
Fresh = tuple[str, Tensor, tuple[Cuts, ...]]  # operation, tensor, and how it is cut where it is kept anyway


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
    block: Block, kept: Mapping[str, tuple[Cuts, ...]], added: frozenset[str] = frozenset(), *, eager: bool = True
) -> Iterator[KernelRun]:
    """Group the operations of a table's entry: forward, backward, weight gradients and their sums are a run each.

    ``kept`` says how storages are cut that stay for backward when nothing is recomputed. ``added`` names sums that the
    products of weight gradients add to themselves. ``eager`` kernels hand everything on through memory; a compiler
    makes scores of attention again piece by piece, where their backward needs them.
    """
    owner = {name: group for group in block.fused for name in group.ops}
    members: dict[tuple[str, str, bool, bool], list[Op]] = defaultdict(list)
    for op in block.select("micro_batch"):
        if op.source in owner:
            summed = isinstance(op.kind, Accumulate) and op.outputs[0] not in added
            members[owner[op.source].ops[0], op.pass_, op.again, summed].append(op)
    traffic = _MemoryTraffic(block, kept, eager=eager)
    for (_, pass_, again, summed), ops in members.items():
        group, forward = owner[ops[0].source], pass_ == "F" or again
        plain = summed or pass_ == "W"  # nothing of what makes a kernel several is in products and sums of their own
        launches = group.kernel.launches.forward if forward else group.kernel.launches.backward
        if plain:
            apart = None if summed else group.kernel.launches.weights
            launches = min(1, group.kernel.launches.forward) if apart is None else apart
        score_bytes = group.kernel.score_bytes.forward if forward else group.kernel.score_bytes.backward
        touched = tuple(traffic.forward(ops, group) if forward else traffic.backward(ops, group))
        products = [op.source for op in ops if isinstance(op.kind, Einsum)]
        yield KernelRun(
            pass_=pass_,
            ops=tuple(ops),
            touched=touched,
            fresh=tuple(
                (op, tensor, traffic.kept_cuts(tensor.name)) for op, tensor in touched if not traffic.is_state(tensor)
            ),
            skips_masked=group.kernel.skips_masked,
            mask_tile=group.kernel.mask_tile,
            flops_ratio=1.0 if forward else group.kernel.backward_flops_ratio,
            launches=launches,
            score_bytes=0 if plain else score_bytes,
            traffic_ratio=1.0 if plain else group.kernel.traffic_ratio,
            products=bool(products) and traffic.weighted.issuperset(products),
        )


class _MemoryTraffic:
    """What the kernels of a block read and write; a tensor that a deliver hands on is the one it came from."""

    def __init__(self, block: Block, kept: Mapping[str, tuple[Cuts, ...]], *, eager: bool) -> None:
        self.block, self.kept, self.eager = block, kept, eager
        self.saved = {entry.storage for entry in block.saved}
        self.source = {op.name: op.source for op in block.ops}
        # Sums of gradients take the place of the sums before.
        self.resident = {name for op in block.ops if isinstance(op.kind, Accumulate) for name in op.outputs}
        self.weighted = {
            op.name
            for op in block.ops
            if isinstance(op.kind, Einsum) and block.kind == "layer"
            if any(block.tensors[name].role == "parameter" for name in op.inputs)
        }
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
        """Yield what a forward kernel moves: what others made, what others read, what it keeps; once each.

        What only its own backward reads and the kernel does not keep, is never written.
        """
        made = {output for op in ops for output in op.outputs}
        moved: dict[str, Moved] = {}
        for op in ops:
            read = [name for name in op.inputs if not self.origins[name] <= made]
            sources = {name: {self.source[reader] for reader in self.readers[name]} for name in op.outputs}
            written = [name for name, own in sources.items() if not own or own - {*group.ops} or self.kept_cuts(name)]
            for name in (*read, *written):
                moved.setdefault(name, (op.name, self.block.tensors[name]))
        yield from moved.values()
        yield from self._copies(group, dropped=any(op.again for op in ops))

    def backward(self, ops: Sequence[Op], group: FusedOps) -> Iterator[Moved]:
        """Yield what a backward kernel moves; for what was not kept as it was it reads the forward kernel's copies."""
        names, made = {op.name for op in ops}, {output for op in ops for output in op.outputs}
        reads = [(op.name, name) for op in ops for name in op.inputs if not self.origins[name] <= made]
        lost = {name for _, name in reads if self.block.tensors[name].role == "activation" and not self.kept_cuts(name)}
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

    def kept_cuts(self, name: str) -> tuple[Cuts, ...]:
        """Return how a tensor is cut where a rank keeps it for backward; nothing if it does not.

        A clone's result takes the place of what was dropped.
        """
        return self.kept.get(min(self.origins.get(name, {name})).removesuffix(".again"), ())

    def _copies(self, group: FusedOps, *, dropped: bool) -> Iterator[Moved]:
        """Yield what a kernel keeps beside the tensors of the graph; ``dropped``: what only its clone keeps, too."""
        for save in group.saves:
            again = dropped and (self.eager or save.tensor.dims != SCORES)
            if save.tensor.name not in self.block.tensors and (save.storage in self.saved or again):
                yield group.ops[0], save.tensor
