"""Seconds and bytes of one block on one rank, read off its sharded graph; for numbers or columns alike."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.block_memory import rank_sizes, saved_bytes, shape_bytes, waiting_bytes, working_bytes
from autoshard.cost.collective import Number, Ring
from autoshard.cost.compute import KernelWork, Rates, Sequences, kernel_time, kernel_work
from autoshard.cost.kernel_run import KernelRun
from autoshard.cost.sharded import Blocks, LoweredBlock
from autoshard.layout.sharding import Message
from autoshard.plan.recompute import Recompute
from autoshard.spec.mesh import axis_of_atoms

Text = str | NDArray[np.str_]
PASSES = ("F", "I", "W")
_IN_PIECES = ("all_gather", "reduce_scatter")  # one for each rank, of which a product can wait for the first alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One layout's numbers: sizes of the dims before sharding, sizes of the atoms, rings; or columns of them."""

    blocks: Blocks
    sizes: Mapping[str, Number]
    atoms: Mapping[str, Number]
    rings: Mapping[tuple[str, ...], Ring]
    zero: Literal[0, 1, 3]
    cp_order: Text

    @property
    def sequences(self) -> Sequences:
        """How attention cuts sequences: zig-zag gives all ranks the same, as heads do, stretches in a row do not."""
        attend = self.blocks.block("layer", Recompute()).sharding.op_cuts["attend"]
        parts = math.prod(self.atoms[atom] for atom in attend.get("seq", ()))
        return Sequences(length=self.sizes["seq"], stretches=np.where(self.cp_order == "contiguous", parts, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One execution of a block: seconds by pass and part, bytes sent by axis, bytes kept and needed for a moment."""

    seconds: Mapping[str, Mapping[str, Number]]  # pass -> part (compute, waiting, tp, cp, ep) -> seconds
    sent_bytes: Mapping[str, Number]  # axis -> bytes
    saved_bytes: Number
    waiting_bytes: Number  # what a split backward keeps from I to W instead of what is saved
    remade_bytes: Number  # what recompute brings back while this block is in backward
    working_bytes: Number  # at most at any time of a pass, beside states and kept activations
    weights: Mapping[tuple[str, ...], Number]  # atoms that the gradient's sum is pending over -> weights on the rank
    tied_weights: Mapping[tuple[str, ...], Number]  # likewise, those that share their values with another block's
    placeholder_bytes: Number = 0  # that stay once for all such blocks of a rank
    hidden_s: Number = 0.0  # of what is sent, behind kernels: not in the seconds of tp

    def part_s(self, part: str) -> Number:
        """Return the seconds of one part over all passes."""
        return sum(self.seconds[name].get(part, 0.0) for name in PASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What one execution of a block does and needs on one rank, whatever the rates and links."""

    kernels: tuple[tuple[KernelRun, KernelWork], ...]
    messages: tuple[tuple[Message, Number], ...]  # with the bytes of a rank's buffer where it is largest
    hides_tp: float
    saved_bytes: Number
    waiting_bytes: Number
    remade_bytes: Number
    working_bytes: Number
    placeholder_bytes: Number
    weights: Mapping[tuple[str, ...], Number]
    tied_weights: Mapping[tuple[str, ...], Number]


def block_work(sharded: LoweredBlock, whole: LoweredBlock, setting: Setting, tile: int) -> BlockWork:
    """Count what a block does, sends and holds; ``whole`` is it without recompute, ``tile`` the matrix unit's."""
    block, sharding, sequences = sharded.block, sharded.sharding, setting.sequences
    sizes_of = rank_sizes(setting.sizes, setting.atoms)
    op_sizes = {name: sizes_of(cuts) for name, cuts in sharding.op_cuts.items()}
    saved = sum(saved_bytes(block, sharding, sizes_of, setting.atoms).values())
    kept = saved_bytes(whole.block, whole.sharding, sizes_of, setting.atoms)
    weights: dict[bool, dict[tuple[str, ...], Number]] = {True: defaultdict(int), False: defaultdict(int)}
    for tensor in block.parameters:
        counts, pending = weights[tensor.name in sharded.tied], sharding.parameter_pending[tensor.name]
        counts[pending] = counts[pending] + tensor.num_elements(sizes_of(sharding.parameter_cuts[tensor.name]))
    return BlockWork(
        kernels=tuple((run, kernel_work(block, run, op_sizes, tile, sequences)) for run in sharded.runs),
        messages=tuple((one, sizes_of(one.cuts).num_bytes(block.tensors[one.tensor])) for one in sharding.messages),
        hides_tp=sharded.hides_tp,
        saved_bytes=saved,
        waiting_bytes=waiting_bytes(block, sharding, sizes_of, setting.atoms),
        remade_bytes=sum(kept.values()) - saved,
        working_bytes=working_bytes(sharded.moments, kept, op_sizes, sizes_of),
        placeholder_bytes=sum(shape_bytes(block, sharding, names, sizes_of) for names in sharded.placeholders),
        weights=weights[False],
        tied_weights=weights[True],
    )


def block_cost(work: BlockWork, rings: Mapping[tuple[str, ...], Ring], rates: Rates) -> BlockCost:
    """Price a block: every kernel by its roofline, every message by its ring."""
    seconds: dict[str, dict[str, Number]] = {name: defaultdict(float) for name in PASSES}
    for run, kernel in work.kernels:
        parts, (work_s, waiting_s) = seconds[run.pass_], kernel_time(kernel, rates)
        parts["compute"] = parts["compute"] + work_s
        parts["waiting"] = parts["waiting"] + waiting_s
    sent: dict[str, Number] = defaultdict(float)
    hidden: dict[str, Number] = defaultdict(float)
    for message, message_bytes in work.messages:
        ring, axis = rings[message.collective.atoms], axis_of_atoms(message.collective.atoms)
        parts, time_s = seconds[message.pass_], ring.time_s(message.collective, message_bytes)
        parts[axis] = parts[axis] + time_s
        sent[axis] = sent[axis] + ring.sent_bytes(message.collective, message_bytes)
        if work.hides_tp and axis == "tp" and message.collective.kind in _IN_PIECES:
            hidden[message.pass_] = hidden[message.pass_] + work.hides_tp * (1 - 1 / ring.size) * time_s
    for pass_, most_s in hidden.items():  # traffic goes on while a device waits for hosts
        parts = seconds[pass_]
        hidden[pass_] = np.minimum(most_s, parts["compute"] + parts["waiting"])
        parts["tp"] = parts["tp"] - hidden[pass_]
    return BlockCost(
        seconds=seconds,
        sent_bytes=sent,
        saved_bytes=work.saved_bytes,
        waiting_bytes=work.waiting_bytes,
        remade_bytes=work.remade_bytes,
        working_bytes=work.working_bytes,
        placeholder_bytes=work.placeholder_bytes,
        hidden_s=sum(hidden.values()),
        weights=work.weights,
        tied_weights=work.tied_weights,
    )


def exposed_s(traffic_s: Number, covering_s: Number, share: float) -> Number:
    """Return what is left of traffic of which a share may hide behind work that goes on meanwhile.

    >>> float(exposed_s(4.0, 10.0, 0.75)), float(exposed_s(4.0, 1.0, 0.75))
    (1.0, 3.0)
    """
    return np.maximum((1 - share) * traffic_s, traffic_s - covering_s) if share else traffic_s
