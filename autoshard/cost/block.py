"""Seconds and bytes of one block on one rank, read off its sharded graph; for numbers or columns alike."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from autoshard.cost.calibration import Calibration
from autoshard.cost.held import Local, Shares, kept_bytes, shape_bytes, shares, working_bytes
from autoshard.cost.live import Fresh, Moment, moments
from autoshard.cost.rings import Number, Ring, axis_of_atoms
from autoshard.graph.block import Block, Fused
from autoshard.graph.kinds.attention import Attend, AttendGradient
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Op, Tensor
from autoshard.layout.layout import Cuts
from autoshard.layout.sharding import Message, Sharding
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster import Cluster

PASSES = ("F", "I", "W")
Moved = tuple[str, Tensor]  # an operation, and a tensor that it reads or writes


class Blocks(Protocol):
    """Where the blocks of a model come from, sharded."""

    def block(self, kind: str, drop: Recompute) -> "ShardedBlock":
        """Return a block, recomputed and sharded."""
        ...

    def every(self) -> "tuple[ShardedBlock, ...]":
        """Return blocks whose collectives are all that may be sent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One layout's numbers: sizes of the dims before sharding, sizes of the atoms, rings; or columns of them."""

    blocks: Blocks
    sizes: Mapping[str, Number]
    atoms: Mapping[str, Number]
    rings: Mapping[tuple[str, ...], Ring]
    zero: Literal[0, 1, 3]
    cp_order: Literal["contiguous", "zigzag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank reaches per second."""

    matrix_flops_per_s: float
    vector_flops_per_s: float
    memory_bytes_per_s: float

    @classmethod
    def of(cls, cluster: Cluster, dtype: str, calibration: Calibration) -> "Rates":
        """Take the peaks of a cluster's chip down by what the calibration says."""
        return cls(
            matrix_flops_per_s=cluster.rank_matrix_flops_per_s(dtype) * calibration.matrix_efficiency,
            vector_flops_per_s=cluster.rank_vector_flops_per_s * calibration.vector_efficiency,
            memory_bytes_per_s=cluster.rank_memory_bandwidth_bytes_per_s * calibration.memory_efficiency,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """Operations of one pass that run as one kernel, and the tensors that it reads from and writes to memory."""

    pass_: str
    ops: tuple[Op, ...]
    touched: tuple[Moved, ...]
    fresh: tuple[Fresh, ...]  # of these, what is no state
    skips_masked: bool
    flops_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBlock:
    """A block with its sharding and its kernels: everything but the sizes.

    ``tied`` names the weights that share their values with another block's; ``placeholders`` those that are one tensor
    each, of whose shape a buffer stays.
    """

    block: Block
    sharding: Sharding
    runs: tuple[KernelRun, ...]
    moments: tuple[Moment, ...]
    tied: frozenset[str] = frozenset()
    placeholders: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(
        cls,
        block: Block,
        sharding: Sharding,
        *,
        whole: "ShardedBlock | None" = None,
        tied: Iterable[str] = (),
        placeholders: Iterable[Sequence[str]] = (),
    ) -> "ShardedBlock":
        """Group the operations of a block into kernel runs; ``whole`` is the same block without recompute.

        ``placeholders`` names products that add their weight gradients to the sums themselves.
        """
        held = (whole.sharding if whole else sharding).kept_cuts
        runs = tuple(_kernel_runs(block, held))
        added = [
            tuple(product for product in products if f"{product}.weight" in block.tensors) for products in placeholders
        ]
        weights = {f"{product}.weight.sum" for products in added for product in products}
        unmade = (op.inputs[1] for op in block.ops if isinstance(op.kind, Accumulate) and op.outputs[0] in weights)
        return cls(
            block=block,
            sharding=sharding,
            runs=runs,
            moments=moments(block, runs, sharding.op_cuts, frozenset(held), frozenset(unmade)),
            tied=frozenset(tied),
            placeholders=tuple(tuple(f"{product}.weight" for product in products) for products in added if products),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One execution of a block: seconds by pass and part, bytes sent by axis, bytes kept and needed for a moment."""

    seconds: Mapping[str, Mapping[str, Number]]  # pass -> part (compute, tp, cp, ep) -> seconds
    sent_bytes: Mapping[str, Number]  # axis -> bytes
    saved_bytes: Number
    remade_bytes: Number  # what recompute brings back while this block is in backward
    working_bytes: Number  # at most at any time of a pass, beside states and kept activations
    weights: Mapping[tuple[str, ...], Number]  # atoms that the gradient's sum is pending over -> weights on the rank
    tied_weights: Mapping[tuple[str, ...], Number]  # likewise, those that share their values with another block's
    placeholder_bytes: Number = 0  # that stay once for all such blocks of a rank

    def part_s(self, part: str) -> Number:
        """Return the seconds of one part over all passes."""
        return sum(self.seconds[name].get(part, 0.0) for name in PASSES)


def block_cost(sharded: ShardedBlock, whole: ShardedBlock, setting: Setting, rates: Rates) -> BlockCost:
    """Price a block: every kernel by its roofline, every message by its ring; ``whole`` is it without recompute."""
    seconds: dict[str, dict[str, Number]] = {name: defaultdict(float) for name in PASSES}
    shared = shares(setting.sizes, setting.atoms)
    local = {name: shared(cuts) for name, cuts in sharded.sharding.op_cuts.items()}
    for run in sharded.runs:
        parts = seconds[run.pass_]
        parts["compute"] = parts["compute"] + _run_s(sharded.block, run, local, rates, setting)
    sent: dict[str, Number] = defaultdict(float)
    for message in sharded.sharding.messages:
        time_s, sent_bytes = _message_cost(sharded, message, setting, shared)
        axis = axis_of_atoms(message.collective.atoms)
        parts = seconds[message.pass_]
        parts[axis] = parts[axis] + time_s
        sent[axis] = sent[axis] + sent_bytes
    saved = sum(kept_bytes(sharded.block, sharded.sharding, shared, setting.atoms).values())
    kept = kept_bytes(whole.block, whole.sharding, shared, setting.atoms)
    return BlockCost(
        seconds=seconds,
        sent_bytes=sent,
        saved_bytes=saved,
        remade_bytes=sum(kept.values()) - saved,
        working_bytes=working_bytes(sharded.moments, kept, local, shared),
        placeholder_bytes=sum(
            shape_bytes(sharded.block, sharded.sharding, names, shared) for names in sharded.placeholders
        ),
        weights=_local_parameters(sharded, shared, tied=False),
        tied_weights=_local_parameters(sharded, shared, tied=True),
    )


def kernel_seconds(sharded: ShardedBlock, setting: Setting, rates: Rates) -> Iterator[tuple[KernelRun, Number]]:
    """Yield every kernel of a block with its time; their sum is the block's compute."""
    shared = shares(setting.sizes, setting.atoms)
    local = {name: shared(cuts) for name, cuts in sharded.sharding.op_cuts.items()}
    yield from ((run, _run_s(sharded.block, run, local, rates, setting)) for run in sharded.runs)


def message_costs(sharded: ShardedBlock, setting: Setting) -> Iterator[tuple[Message, Number, Number]]:
    """Yield every message of a block with its time and the bytes that a rank sends; their sum is what it sends."""
    shared = shares(setting.sizes, setting.atoms)
    yield from ((one, *_message_cost(sharded, one, setting, shared)) for one in sharded.sharding.messages)


def _message_cost(sharded: ShardedBlock, message: Message, setting: Setting, shared: Shares) -> tuple[Number, Number]:
    ring = setting.rings[message.collective.atoms]
    message_bytes = shared(message.cuts).num_bytes(sharded.block.tensors[message.tensor])
    return ring.time_s(message.collective, message_bytes), ring.sent_bytes(message.collective, message_bytes)


def _local_parameters(sharded: ShardedBlock, shared: Shares, *, tied: bool) -> Mapping[tuple[str, ...], Number]:
    """Return how many of one block's tied or other weights a rank holds, by the atoms their gradients' sums await."""
    counts: dict[tuple[str, ...], Number] = defaultdict(int)
    for tensor in sharded.block.parameters:
        if (tensor.name in sharded.tied) == tied:
            pending = sharded.sharding.parameter_pending[tensor.name]
            local = shared(sharded.sharding.parameter_cuts[tensor.name])
            counts[pending] = counts[pending] + tensor.num_elements(local)
    return counts


def _run_s(block: Block, run: KernelRun, local: Mapping[str, Local], rates: Rates, setting: Setting) -> Number:
    """Return a kernel's time: that of the slowest of matrix unit, vector unit and memory."""
    matrix: Number = 0
    vector: Number = 0
    for op in run.ops:
        call = block.call(op, local[op.name])
        share: Number = 1.0
        if run.skips_masked and isinstance(op.kind, Attend | AttendGradient):
            share = _met_share(op.kind.window, setting)
        matrix = matrix + run.flops_ratio * share * op.kind.matrix_flops(call)
        vector = vector + share * op.kind.vector_flops(call)
    compute_s = np.maximum(matrix / rates.matrix_flops_per_s, vector / rates.vector_flops_per_s)
    return np.maximum(compute_s, _num_bytes(run.touched, local) / rates.memory_bytes_per_s)


def _num_bytes(moved: Iterable[Moved], local: Mapping[str, Local]) -> Number:
    return sum(local[op].num_bytes(tensor) for op, tensor in moved)


def _met_share(window: int | None, setting: Setting) -> Number:
    """Return which part of its (query, key) pairs the slowest cp rank does not skip as masked.

    In zig-zag order all ranks have the same. In contiguous order the last one meets all keys before its own, so
    without a window 2 - 1/cp times the average.
    """
    seq, pieces = setting.sizes["seq"], setting.atoms["cp"] if setting.cp_order == "contiguous" else 1
    seen = _visible_pairs(window, seq) - _visible_pairs(window, seq - seq / pieces)
    return seen * pieces / seq**2


def _visible_pairs(window: int | None, seq_len: Number) -> Number:
    """Count the pairs as ``Attend.visible_pairs`` does, for a column of lengths."""
    reach = np.minimum(window or seq_len, seq_len)
    return reach * (reach + 1) / 2 + (seq_len - reach) * reach


def _kernel_runs(block: Block, held: Mapping[str, tuple[Cuts, ...]]) -> Iterable[KernelRun]:
    """Group the operations: a fused forward kernel, its backward in one, weight gradients each on their own."""
    owner = {name: group for group in block.fused for name in group.ops}
    members: dict[tuple[str, ...], list[Op]] = defaultdict(list)
    for op in block.select("micro_batch"):
        if op.source in owner:
            alone = op.pass_ == "W" or isinstance(op.kind, Accumulate)
            members[(op.name,) if alone else (owner[op.source].ops[0], op.pass_, str(op.again))].append(op)
    links = _Links.of(block, held)
    for ops in members.values():
        group, forward = owner[ops[0].source], ops[0].pass_ == "F" or ops[0].again
        touched = tuple(links.forward(ops, group) if forward else links.backward(ops, group))
        yield KernelRun(
            pass_=ops[0].pass_,
            ops=tuple(ops),
            touched=touched,
            fresh=tuple((op, tensor, links.held_cuts(tensor)) for op, tensor in touched if not links.is_state(tensor)),
            skips_masked=group.skips_masked,
            flops_ratio=1.0 if forward else group.backward_flops_ratio,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """Who reads what in a block; a tensor that a deliver hands on is the one it came from."""

    block: Block
    held: Mapping[str, tuple[Cuts, ...]]  # what is kept for backward when nothing is recomputed, and how it is cut
    origins: Mapping[str, frozenset[str]]  # what delivers hand on -> the tensors that it is, or is the sum of
    resident: frozenset[str]  # sums of gradients: they take the place of the sums before
    readers: Mapping[str, frozenset[str]]  # tensor -> operations that read it, directly or through delivers
    source: Mapping[str, str]  # operation -> the forward operation that it belongs to

    @classmethod
    def of(cls, block: Block, held: Mapping[str, tuple[Cuts, ...]]) -> "_Links":
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
        return [*moved.values(), *self._copies(group)]

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
        return [*moved.values(), *(self._copies(group) if lost else ())]

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

    def _copies(self, group: Fused) -> Sequence[Moved]:
        """List what a kernel keeps beside the tensors of the graph."""
        return [(group.ops[0], save.tensor) for save in group.saves if save.tensor.name not in self.block.tensors]
