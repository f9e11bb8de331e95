"""The programs that ranks execute, read off a plan's table: per stage its blocks in order, split into passes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autoshard.engine.routing import counted_over
from autoshard.engine.rows import in_runs
from autoshard.engine.tying import with_tied_sums
from autoshard.errors import require
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.program import (
    Communicate,
    Compute,
    Given,
    Instruction,
    Program,
    Value,
    read_by,
    written_by,
)
from autoshard.plan.lowering import StepGraph, split_pending
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, plan_programs, table_name
from autoshard.run.placement import Bounds
from autoshard.spec.mesh import ATOMS


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgram:
    """A block as ranks run it: its program, and the instructions of its forward and of its backward pass."""

    block: Block
    program: Program
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]  # I, then W
    num_input: int  # instructions of ``backward`` that are I

    @property
    def handed_on(self) -> str:
        """The tensor that the forward pass hands to the next block; in the last block, the loss."""
        return self.block.gives[0]

    @property
    def handed_back(self) -> str | None:
        """The gradient that the backward pass hands to the block before; None in the first block."""
        sums = {f"{tensor.name}.sum" for tensor in self.block.parameters}
        return next((name for name in self.program.results if name not in {*sums, *self.block.gives}), None)

    @property
    def reported(self) -> Mapping[str, Value]:
        """The numbers that the forward pass makes for reports only, by tensor; their parts lie on several ranks."""
        return {name: self.program.results[name] for name in self.block.gives[1:]}

    def instructions(self, kind: str) -> tuple[Instruction, ...]:
        """Return the instructions of a kind of action."""
        split = self.num_input
        by_kind = {"F": self.forward, "B": self.backward, "I": self.backward[:split], "W": self.backward[split:]}
        return by_kind[kind]

    def results(self, kind: str) -> Mapping[str, Value]:
        """Return the results of a kind of action, by tensor."""
        names = {name for entry in self.instructions(kind) for name in written_by(entry)}
        return {tensor: value for tensor, value in self.program.results.items() if value.name in names}

    def input_value(self, tensor: str) -> Value:
        """Return the value of a tensor that comes from outside the block, with the layout that the program expects."""
        values = (entry.value for entry in self.program.instructions if isinstance(entry, Given))
        return next(value for value in values if value.tensor == tensor)


class MadeInputs(Protocol):
    """The inputs of blocks that no batch brings as they are: code makes them of the batch, on every rank alike."""

    def has(self, block: str, tensor: str) -> bool:
        """Whether the code computes this input of a block from the batch."""
        ...

    def turn(self, block: str, tensor: str, micro_batch: int) -> int | None:
        """Return the number under which a step keeps an input: one for all micro-batches; None if it keeps none."""
        ...

    def part(self, place: tuple[str, str], batch: Mapping[str, Any], bounds: Bounds, device: Any) -> Any:
        """Return a part of an input, whose ``place`` is its block and its name there, as a tensor of torch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrograms:
    """A plan's graph, and for every stage its blocks by name (``layer.3``), as ``OpGraph.instances`` names them."""

    graph: OpGraph
    stages: tuple[Mapping[str, BlockProgram], ...]
    packed: bool = False  # whether experts take as many rows as are routed to them, and no slots
    inputs: MadeInputs | None = None  # where code makes them

    def group_atoms(self) -> frozenset[tuple[str, ...]]:
        """Return the atoms of every collective of a plan: of programs, rings, and sums of weights' gradients."""
        groups: set[tuple[str, ...]] = set()
        for parts in (parts for blocks in self.stages for parts in blocks.values()):
            for entry in parts.program.instructions:
                if isinstance(entry, Communicate):
                    groups.add(entry.collective.atoms)
                elif isinstance(entry, Compute):
                    groups |= {hop.atoms for hop in entry.ring}
            groups |= {counted_over(parts.program)} if self.packed else set()
        return frozenset(groups).union(*self._pending())

    def spreads(self) -> frozenset[tuple[str, ...]]:
        """Return the atoms over which the batch is spread for some weight: its ranks may share the optimizer's work."""
        return frozenset(spread for spread, _ in self._pending())

    def _pending(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Yield the atoms over which the gradient of each weight awaits its sum, in the two parts of that sum."""
        for parts in (parts for blocks in self.stages for parts in blocks.values()):
            for tensor in parts.block.parameters:
                yield split_pending(parts.program.results[f"{tensor.name}.sum"].layout.sums)


def programs_of(plan: Plan, *, packs: bool = False) -> PlanPrograms:
    """Read the programs off a plan's table; refuse all entries at once that the torch engine cannot execute.

    If the engine ``packs``, experts that drop nothing take their rows one after the other.
    """
    whole = sorted({name for name, _ in plan.mesh.axes} - set(ATOMS))
    written = f"{' and '.join(whole)} must be written in parts: edp and ep for dp, kv and rep for tp"
    empty = "the table is empty, so nothing says which collectives to execute. Make the plan again"
    require((not whole, "mesh", written), (bool(plan.strategies), "strategies", empty))
    graph, blocks = graph_of(plan), plan_blocks(plan)
    programs = with_tied_sums(graph, plan_programs(plan))
    parts = {name: split_passes(blocks[name], program) for name, program in programs.items()}
    stages = tuple(
        {name: parts[table] for name, table in _contents(plan, number, graph.order)}
        for number in range(len(plan.stages))
    )
    packed = packs and plan.model.num_experts > 0 and plan.workload.expert_capacity is None
    return PlanPrograms(graph=graph, stages=stages, packed=packed)


def graph_of(plan: Plan) -> OpGraph:
    """Return the step of a plan before sharding; experts that drop nothing get a slot for every token.

    Devices without grouped products fill the slots (``pads_experts``); others take as many rows as are routed.
    """
    workload, model = plan.workload, plan.model
    if model.num_experts and workload.expert_capacity is None:
        workload = replace(workload, expert_capacity=model.num_experts / model.experts_per_token)
    micro_batch = plan.micro_batch * plan.mesh.size("dp")
    step = StepGraph(model=model, workload=workload, kernels=plan.kernels)
    return replace(step.graph, sizes=step.sizes(micro_batch))


def _contents(plan: Plan, number: int, order: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the blocks that a stage runs, in order, each with the name of its table in the plan."""
    stage = plan.stages[number]
    if number == 0:
        yield "embed.0", "embed"
    for number_in_stage, place in enumerate(range(stage.first_layer, stage.first_layer + stage.num_layers)):
        yield f"layer.{place}", table_name(order[place], stage.recompute.of_layer(number_in_stage))
    if number == len(plan.stages) - 1:
        yield "head.0", "head"


def split_passes(block: Block, program: Program) -> BlockProgram:
    """Split a block's program into forward, I (gradients of inputs) and W (gradients of weights).

    Work by rows is gathered into runs, and each gradient is added as soon as it is there.
    """
    handed_on = block.gives[0]
    parts = program.by_pass(handed_on)
    upstream = f"d.{handed_on}"
    assert upstream not in {name for entry in parts.forward for name in read_by(entry)}, (
        f"{block.kind}: forward reads the gradient of its own result"
    )
    forward, input_pass, weight_pass = in_runs((parts.forward, parts.inputs, parts.weights))
    input_pass, weight_pass = _added_immediately(input_pass), _added_immediately(weight_pass)
    return BlockProgram(
        block=block,
        program=program,
        forward=forward,
        backward=(*input_pass, *weight_pass),
        num_input=len(input_pass),
    )


def _added_immediately(entries: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Add every gradient to its sum as soon as it is computed, so that no two gradients are held at once."""
    adding = [entry for entry in entries if isinstance(entry, Compute) and isinstance(entry.op.kind, Accumulate)]
    sums = {entry.reads[0].name for entry in adding}
    inputs = (entry for entry in entries if isinstance(entry, Given) and entry.value.name in sums)
    return early(entries, {id(entry) for entry in (*adding, *inputs)})


def early(entries: Sequence[Instruction], late: Collection[int]) -> tuple[Instruction, ...]:
    """Move each instruction whose id is in ``late`` forward, right behind the last maker of what it reads."""
    places: dict[str, int] = {}  # of the makers of values
    placed: list[tuple[int, Instruction]] = []
    for number, entry in enumerate(entries):
        place = max((places.get(name, -1) for name in read_by(entry)), default=-1) if id(entry) in late else number
        places |= dict.fromkeys(written_by(entry), place)
        placed.append((place, entry))
    return tuple(entry for _, entry in sorted(placed, key=lambda pair: pair[0]))


def tied_instances(graph: OpGraph) -> Mapping[str, str]:
    """Return the weights that have the values of another weight, with the weight that owns them.

    Both have the names that ``OpGraph.instances`` gives them.
    """
    # Their blocks occur once: ``head.unembed.weight`` is of ``head.0``.
    return {copy.replace(".", ".0.", 1): owner.replace(".", ".0.", 1) for copy, owner in graph.tied.items()}
