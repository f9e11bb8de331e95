"""Blocks with their sharding, made once per model, Kernels, cutting and kind of recompute, whatever the sizes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autoshard.cost.kernel_run import KernelRun, Moment, block_kernels, gradient_sums
from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.layout import Cuts, Cutting
from autoshard.layout.program import Program, Value
from autoshard.layout.sharding import Sharding
from autoshard.plan.lowering import ENDS, StepGraph, lowered, split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.tables import plan_programs, step_graph_of, table_kinds, table_name
from autoshard.spec.kernels import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredBlock:
    """A block with its sharding and its kernels: everything but the sizes.

    ``tied`` names the weights that share their values with another block's; ``placeholders`` those that are one tensor
    each, of whose shape a buffer stays.
    """

    block: Block
    sharding: Sharding
    runs: tuple[KernelRun, ...]
    moments: tuple[Moment, ...]
    sums: tuple[tuple[KernelRun, tuple[Value, ...]], ...] = ()  # of gradients, with what each reads and writes
    tied: frozenset[str] = frozenset()
    placeholders: tuple[tuple[str, ...], ...] = ()
    hides_tp: float = 0.0

    @classmethod
    def of(
        cls,
        block: Block,
        program: Program,
        kernels: Kernels,
        *,
        whole: "LoweredBlock | None" = None,
        pads: bool = False,
    ) -> "LoweredBlock":
        """Group the operations of a lowered block into the runs of a platform's kernels.

        ``whole`` is the same block without recompute. ``pads``: every expert has the same number of slots.
        """
        sharding = Sharding.of(block, program)
        kept_cuts = (whole.sharding if whole else sharding).kept_cuts
        named = (tuple(f"{product}.weight" for product in products) for products in kernels.placeholders)
        placeholders = [tuple(name for name in names if name in block.tensors) for names in named]
        # Products of groups, of as many rows as are routed, add to nothing.
        products = [op for op in block.ops if isinstance(op.kind, Einsum)]
        adding = {op.name for op in products if pads or "slots" not in block.tensors[op.inputs[0]].dims}
        added = {name for op in products if kernels.adds_weights and op.name in adding for name in op.inputs}
        names = {name for names in placeholders for name in names} | {
            name for name in added if f"{name}.sum" in block.tensors
        }
        sums = frozenset(f"{name}.sum" for name in names)
        unmade = (op.inputs[1] for op in block.ops if isinstance(op.kind, Accumulate) and op.outputs[0] in sums)
        of_block = block_kernels(block, frozenset(kept_cuts), sums, frozenset(unmade), eager=kernels.eager)
        return cls(
            block=block,
            sharding=sharding,
            runs=of_block.runs,
            moments=of_block.cut(kept_cuts, sharding.op_cuts),
            sums=tuple(gradient_sums(block, program, adding, eager=kernels.eager)) if kernels.adds_gradients else (),
            placeholders=tuple(filter(None, placeholders)),
            hides_tp=kernels.hides.get("tp", 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlocks:
    """The blocks of a step as one cutting shards them, on any mesh on which no other atoms than these cut anything."""

    step: StepGraph
    cutting: Cutting
    atoms: frozenset[str]
    block_cuts: dict[str, Cutting] = field(default_factory=dict[str, Cutting], compare=False, repr=False)

    def block(self, kind: str, drop: Recompute) -> LoweredBlock:
        """Return a block, recomputed and sharded."""
        used = Recompute() if kind in ENDS else drop.on_device
        return _cut_block(self.step, kind, used, self.cut_of(kind), self.atoms)

    def cut_of(self, kind: str) -> Cutting:
        """Return how the atoms cut a block, whatever is computed again."""
        if kind not in self.block_cuts:
            self.block_cuts[kind] = self.cutting.alone(kind).only(self.atoms)
        return self.block_cuts[kind]

    def every(self) -> tuple[LoweredBlock, ...]:
        """Return blocks that hold every kind of collective; recompute repeats them, and adds no others."""
        return tuple(self.block(kind, Recompute()) for kind in self.step.kinds)


def alike_without(blocks: CutBlocks, atom: str) -> bool:
    """Say whether a lowering in which an atom cuts serves ranks along which there is but one, too.

    It does not where what is gathered with the atom is only moved without it, and so is kept or sent otherwise; nor
    where gradients that are scattered over the atom before they are added are added by a product without it.
    """

    def without_atom(cuts: Cuts) -> object:
        remaining = {dim: tuple(cut_atom for cut_atom in cut if cut_atom != atom) for dim, cut in cuts.items()}
        return frozenset((dim, cut) for dim, cut in remaining.items() if cut)

    def sent_and_kept(blocks: CutBlocks) -> Iterator[object]:
        for block in blocks.every():
            sharding, sent = block.sharding, Counter[object]()
            for message in sharding.messages:
                over = tuple(cut_atom for cut_atom in message.collective.atoms if cut_atom != atom)
                if over and message.collective.kind != "slice":
                    sent[message.pass_, message.collective.kind, message.tensor, over, without_atom(message.cuts)] += 1
            yield sent
            yield Counter(tuple(op.name for op in run.ops) for run, _ in block.sums)
            for cuts in (sharding.kept_cuts, sharding.input_cuts, sharding.waiting_cuts):
                yield {name: frozenset(map(without_atom, layouts)) for name, layouts in cuts.items()}

    fewer = replace(blocks, atoms=blocks.atoms - {atom})
    return all(sent == fewer_sent for sent, fewer_sent in zip(sent_and_kept(blocks), sent_and_kept(fewer), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBlocks:
    """The blocks of a plan as its own table shards them, whatever was edited there."""

    step: StepGraph
    kinds: tuple[tuple[str, Recompute], ...]
    programs: Mapping[str, Program] = field(hash=False)
    lowered_blocks: dict[str, LoweredBlock] = field(default_factory=dict[str, LoweredBlock], compare=False, repr=False)

    @classmethod
    def of(cls, plan: Plan) -> "ListedBlocks":
        """Read the table of a plan."""
        return _listed(replace(plan, prediction=None, provenance={}))

    def block(self, kind: str, drop: Recompute) -> LoweredBlock:
        """Return a block, recomputed and sharded; without recompute if no layer of its kind in the plan recomputes so.

        Prices are columns of every kind of layer under every recompute of the plan; some of these no stage reads.
        """
        used = drop.on_device if (kind, drop.on_device) in self.kinds else Recompute()
        name = table_name(kind, used)
        if name not in self.lowered_blocks:
            whole = self.block(kind, Recompute()) if used.kind != "none" else None
            self.lowered_blocks[name] = step_block(self.step, kind, used, self.programs[name], whole)
        return self.lowered_blocks[name]

    def every(self) -> tuple[LoweredBlock, ...]:
        """Return all blocks, because each may be edited by itself."""
        return tuple(self.block(kind, drop) for kind, drop in self.kinds)


Blocks = CutBlocks | ListedBlocks


@lru_cache(maxsize=8)  # a plan is predicted, traced and explained one after the other
def _listed(plan: Plan) -> ListedBlocks:
    if not plan.strategies:
        raise InputError.of("strategies", "the table is empty, so nothing says what is sent. Make the plan again")
    return ListedBlocks(step=step_graph_of(plan), kinds=table_kinds(plan), programs=plan_programs(plan))


@lru_cache(maxsize=1024)  # cuttings often differ in one block only
def _cut_block(step: StepGraph, kind: str, drop: Recompute, cutting: Cutting, atoms: frozenset[str]) -> LoweredBlock:
    program = lowered(step, kind, drop, cutting, atoms)
    whole = _cut_block(step, kind, Recompute(), cutting, atoms) if drop.kind != "none" else None
    return step_block(step, kind, drop, program, whole)


def step_block(
    step: StepGraph, kind: str, drop: Recompute, program: Program, whole: LoweredBlock | None = None
) -> LoweredBlock:
    """Return a block of a step as a program shards it; ``whole`` is the same block without recompute."""
    pads = step.platform.pads_experts or step.workload.expert_capacity is not None
    sharded = LoweredBlock.of(step.block(kind, drop), program, step.platform, whole=whole, pads=pads)
    tied = frozenset(name.removeprefix(f"{kind}.") for name in step.graph.tied if name.startswith(f"{kind}."))
    return replace(sharded, tied=tied)


def atom_groups(blocks: Iterable[LoweredBlock]) -> frozenset[tuple[str, ...]]:
    """Return every group of atoms that some message or some weight's gradient needs a ring for."""
    groups: set[tuple[str, ...]] = set()
    for block in blocks:
        groups.update(message.collective.atoms for message in block.sharding.messages)
        for pending in block.sharding.parameter_pending.values():
            groups.update(part for part in split_pending(pending) if part)
    return frozenset(groups)
