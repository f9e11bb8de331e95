"""Lower bounds of what a block takes and keeps under recompute, read off the block that keeps everything.

No other program is lowered for them. Kernels whose operations are all computed again run once more, and read at least
what they read before. What they read that is itself computed again is sent to them again. What such a block keeps
follows from the graph alone; every tensor is counted in the smallest of the layouts in which it exists. All else that
recompute needs is left out.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

import numpy as np

from autoshard.cost.collective import Number
from autoshard.cost.compute import KernelWork
from autoshard.cost.kernel_run import KernelRun, SizesOf, rank_sizes
from autoshard.cost.setting import (
    BlockCost,
    BlockWork,
    Counted,
    Question,
    Setting,
    block_cost,
    offloaded,
    work_of,
    works_of,
)
from autoshard.cost.sharded import CutBlocks, LoweredBlock
from autoshard.graph.block import Block, Saved
from autoshard.layout.layout import Layout
from autoshard.layout.program import Communicate, Compute, values_read, values_written
from autoshard.plan.lowering import lowered
from autoshard.plan.recompute import Recompute
from autoshard.search.fill.stage_options import SURE

_AGAIN = ".again"  # ends the names of what clones make
_RING = "around a ring"  # stands for the keys that an operation sends around


def costs_of(
    kinds: Sequence[Recompute], price: Callable[[Recompute], BlockCost], offload: Callable[[BlockCost], BlockCost]
) -> list[BlockCost]:
    """Price kinds of recompute; the cost of those with host memory follows from that of the same program without."""
    costs = {drop: price(drop) for drop in dict.fromkeys(kind.on_device for kind in kinds)}
    return [offload(costs[kind.on_device]) if kind.offload else costs[kind] for kind in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastRecompute:
    """A block of some layouts without recompute, from which its bounds with recompute follow."""

    question: Question
    setting: Setting
    kind: str
    blocks: CutBlocks
    work: BlockWork
    counted: Counted
    least_bytes: dict[Saved, Number]  # of what kinds of recompute keep

    @classmethod
    def of(cls, question: Question, setting: Setting, kind: str) -> "LeastRecompute":
        """Count what a block does without recompute."""
        assert isinstance(setting.blocks, CutBlocks), "a search cuts its blocks itself"
        counted = Counted()
        work = work_of(question, setting, kind, Recompute(), counted)
        least_bytes = dict[Saved, Number]()
        return cls(
            question=question,
            setting=setting,
            kind=kind,
            blocks=setting.blocks,
            work=work,
            counted=counted,
            least_bytes=least_bytes,
        )

    def costs(self, kinds: Sequence[Recompute]) -> list[BlockCost]:
        """Return the costs of several kinds of recompute that no block with them stays below."""
        weights_s = sum(self.cost(Recompute()).seconds["W"].values())
        return costs_of(kinds, self.cost, lambda cost: self._offloaded(cost, weights_s))

    def _offloaded(self, cost: BlockCost, weights_s: Number) -> BlockCost:
        """Return a bound with host memory. What a longer backward pass hides besides, it takes itself."""
        late_s = np.maximum(weights_s, sum(cost.seconds["W"].values())) * (1 + SURE)
        moved = offloaded(replace(cost, seconds={**cost.seconds, "W": {"compute": late_s}}), self.question)
        return replace(moved, seconds={**moved.seconds, "W": cost.seconds["W"]})

    def cost(self, drop: Recompute) -> BlockCost:
        """Return a cost that no block with this recompute stays below, in any pass or in what it saves.

        While one such block is at work, what it keeps and what it makes again are together what the block keeps without
        recompute. So where a block keeps more than is said here, it makes as much less again. Beside that it holds what
        the block holds without recompute, and what clones need.
        """
        setting, question = self.setting, self.question
        if drop.kind == "none":
            return block_cost(self.work, setting.rings, question.rates, self.counted)
        whole = self.blocks.block(self.kind, Recompute())
        block = question.step.block(self.kind, drop)
        sizes_of = rank_sizes(setting.sizes, setting.atoms, self.counted.by_cuts)
        storages = {*whole.block.tensors, *(entry.storage for entry in block.saved)}
        runs, unchanged = list[KernelRun](), list[tuple[KernelRun, KernelWork]]()
        for run, work in self.work.kernels:
            if storages.issuperset(tensor.name for _, tensor in run.touched):
                unchanged.append((run, work))
            else:
                runs.append(_without_copies(run, storages))
        runs += _runs_again(whole, block)
        kernels = (*unchanged, *works_of(whole, runs, setting, sizes_of, question.rates.matrix_tile, self.counted))
        sent = (self.work.messages[number] for number in _sent_again(self.blocks, self.kind, block))
        messages = (*self.work.messages, *((replace(message, pass_="I"), size) for message, size in sent))
        layouts = _layouts_of(self.blocks, self.kind)
        for entry in block.saved:
            if entry not in self.least_bytes:
                self.least_bytes[entry] = _least_bytes(entry, whole, layouts, sizes_of)
        saved: Number = sum(self.least_bytes[entry] for entry in block.saved)
        remade = np.maximum(0.0, self.work.memory.saved_bytes - saved)
        memory = replace(self.work.memory, saved_bytes=saved, waiting_bytes=0, remade_bytes=remade)
        work = replace(self.work, kernels=kernels, messages=messages, memory=memory)
        return block_cost(work, setting.rings, question.rates, self.counted)


def _without_copies(run: KernelRun, storages: Collection[str]) -> KernelRun:
    """Return a kernel that moves only tensors of the graph, and of its own copies those that are kept."""
    return replace(run, touched=tuple((op, tensor) for op, tensor in run.touched if tensor.name in storages))


def _runs_again(whole: LoweredBlock, block: Block) -> Iterator[KernelRun]:
    """Yield the forward kernels all of whose operations a block computes again, each with what it certainly reads."""
    again = {op.source for op in block.ops if op.again}
    for run in whole.runs:
        if run.pass_ == "F" and again.issuperset(op.name for op in run.ops):
            results = {name for op in run.ops for name in op.outputs}
            inputs = {name for op in run.ops for name in op.inputs} - results
            read = tuple((op, tensor) for op, tensor in run.touched if tensor.name in inputs)
            yield replace(run, pass_="I", ops=tuple(replace(op, again=True) for op in run.ops), touched=read)


def _sent_again(blocks: CutBlocks, kind: str, block: Block) -> list[int]:
    """Return the numbers of the forward messages, of the block that keeps everything, that this block repeats.

    A clone reads a tensor that is made again as its operation read it. A tensor that was kept is gathered again on
    platforms that keep none gathered.
    """
    messages, by_reader = blocks.block(kind, Recompute()).sharding.messages, _sent_to(blocks, kind)
    keeps_gathered, again = blocks.step.platform.keeps_gathered, set[int]()
    for clone in block.ops:
        for name in clone.inputs if clone.again else ():
            tensor = name.removesuffix(_AGAIN)
            sent = by_reader.get((clone.source, tensor), ())
            gathers = all(messages[number].collective.kind == "all_gather" for number in sent)
            if tensor != name or (gathers and not keeps_gathered):
                again.update(sent)
        again.update(by_reader.get((clone.source, _RING), ()) if clone.again else ())
    return sorted(again)


@cache
def _sent_to(blocks: CutBlocks, kind: str) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """Return the numbers of the messages of the forward pass that bring an operation one of its inputs, or its ring."""
    program = lowered(blocks.step, kind, Recompute(), blocks.cutting, blocks.atoms)
    to_value, to_reader, number = dict[str, tuple[int, ...]](), dict[tuple[str, str], tuple[int, ...]](), 0
    for entry in program.instructions:
        if isinstance(entry, Communicate):
            to_value[entry.writes.name] = (*to_value.get(entry.reads.name, ()), number)
            number += 1
        elif isinstance(entry, Compute) and entry.op.pass_ == "F":
            for name, value in zip(entry.op.inputs, entry.reads, strict=True):
                to_reader[entry.op.name, name] = to_value.get(value.name, ())
    for ring, message in enumerate(blocks.block(kind, Recompute()).sharding.messages[number:], start=number):
        if message.pass_ == "F":
            to_reader[message.entry, _RING] = (*to_reader.get((message.entry, _RING), ()), ring)
    return to_reader


def _least_bytes(
    entry: Saved, whole: LoweredBlock, layouts: Mapping[str, tuple[Layout, ...]], sizes_of: SizesOf
) -> Number:
    """Return the least that a rank keeps of a tensor, whichever of its layouts it keeps.

    What only a kernel knows is cut as the operation that made it.
    """
    cuts = [layout.named(entry.tensor.dims).cuts for layout in layouts.get(entry.storage, ())]
    if not cuts and entry.op is not None and entry.op in whole.sharding.op_cuts:
        cuts = [{dim: cut for dim, cut in whole.sharding.op_cuts[entry.op].items() if dim in entry.tensor.dims}]
    sizes = [sizes_of(layout).num_bytes(entry.tensor) for layout in cuts]
    return reduce(np.minimum, sizes) if sizes else 0


@cache
def _layouts_of(blocks: CutBlocks, kind: str) -> Mapping[str, tuple[Layout, ...]]:
    """Return every layout in which each tensor of a block exists on the ranks."""
    program = lowered(blocks.step, kind, Recompute(), blocks.cutting, blocks.atoms)
    layouts: dict[str, dict[tuple[object, ...], Layout]] = defaultdict(dict)
    for entry in program.instructions:
        for value in (*values_read(entry), *values_written(entry)):
            layouts[value.tensor].setdefault(value.layout.dims, value.layout)
    return {name: tuple(by_dims.values()) for name, by_dims in layouts.items()}
