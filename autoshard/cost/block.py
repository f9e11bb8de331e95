"""Seconds and bytes of one block on one rank, read off its sharded graph; for numbers or columns alike."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from autoshard.cost.compute import KernelTime, Rates, Sequences, kernel_time
from autoshard.cost.held import Shares, kept_bytes, shape_bytes, shares, working_bytes
from autoshard.cost.kernel_run import KernelRun, kernel_runs
from autoshard.cost.live import Moment, moments
from autoshard.cost.rings import Number, Ring, axis_of_atoms
from autoshard.graph.block import Block
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.sharding import Message, Sharding
from autoshard.plan.recompute import Recompute

PASSES = ("F", "I", "W")


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

    @property
    def sequences(self) -> Sequences:
        """How sequences are cut: zig-zag gives all ranks the same, stretches in a row do not."""
        stretches = self.atoms["cp"] if self.cp_order == "contiguous" else 1
        return Sequences(length=self.sizes["seq"], stretches=stretches)


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
    hides_tp: float = 0.0

    @classmethod
    def of(
        cls,
        block: Block,
        sharding: Sharding,
        *,
        whole: "ShardedBlock | None" = None,
        tied: Iterable[str] = (),
        placeholders: Iterable[Sequence[str]] = (),
        hides_tp: float = 0.0,
    ) -> "ShardedBlock":
        """Group the operations of a block into kernel runs; ``whole`` is the same block without recompute.

        ``placeholders`` names products that add their weight gradients to the sums themselves.
        """
        held = (whole.sharding if whole else sharding).kept_cuts
        added = [
            tuple(product for product in products if f"{product}.weight" in block.tensors) for products in placeholders
        ]
        weights = {f"{product}.weight.sum" for products in added for product in products}
        runs = tuple(kernel_runs(block, held, frozenset(weights)))
        unmade = (op.inputs[1] for op in block.ops if isinstance(op.kind, Accumulate) and op.outputs[0] in weights)
        return cls(
            block=block,
            sharding=sharding,
            runs=runs,
            moments=moments(block, runs, frozenset(held), frozenset(unmade)),
            tied=frozenset(tied),
            placeholders=tuple(tuple(f"{product}.weight" for product in products) for products in added if products),
            hides_tp=hides_tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One execution of a block: seconds by pass and part, bytes sent by axis, bytes kept and needed for a moment."""

    seconds: Mapping[str, Mapping[str, Number]]  # pass -> part (compute, waiting, tp, cp, ep) -> seconds
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
        parts, time = seconds[run.pass_], kernel_time(sharded.block, run, local, rates, setting.sequences)
        parts["compute"] = parts["compute"] + time.work_s
        parts["waiting"] = parts["waiting"] + time.waiting_s
    sent: dict[str, Number] = defaultdict(float)
    for message in sharded.sharding.messages:
        time_s, sent_bytes = _message_cost(sharded, message, setting, shared)
        axis = axis_of_atoms(message.collective.atoms)
        parts = seconds[message.pass_]
        parts[axis] = parts[axis] + time_s
        sent[axis] = sent[axis] + sent_bytes
    for parts in seconds.values():
        parts["tp"] = exposed_s(parts["tp"], parts["compute"], sharded.hides_tp)
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


def exposed_s(traffic_s: Number, covering_s: Number, share: float) -> Number:
    """Return what is left of traffic of which a share may hide behind work that goes on meanwhile.

    >>> float(exposed_s(4.0, 10.0, 0.75)), float(exposed_s(4.0, 1.0, 0.75))
    (1.0, 3.0)
    """
    return np.maximum((1 - share) * traffic_s, traffic_s - covering_s) if share else traffic_s


def kernel_times(sharded: ShardedBlock, setting: Setting, rates: Rates) -> Iterator[tuple[KernelRun, KernelTime]]:
    """Yield every kernel of a block with its time; their sums are the block's compute and waiting."""
    shared = shares(setting.sizes, setting.atoms)
    local = {name: shared(cuts) for name, cuts in sharded.sharding.op_cuts.items()}
    sequences = setting.sequences
    yield from ((run, kernel_time(sharded.block, run, local, rates, sequences)) for run in sharded.runs)


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
