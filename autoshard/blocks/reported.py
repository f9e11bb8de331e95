"""What a solved block takes and holds on one rank, as the prediction of a plan would say it of the lowered program."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autoshard.blocks.choices import Atoms
from autoshard.blocks.problem import OperatorProblem, resting_bytes
from autoshard.cost.collective import Ring
from autoshard.cost.setting import PASSES, BlockSizes, block_cost, block_work
from autoshard.cost.sharded import LoweredBlock
from autoshard.cost.update import HeldWeight, held_weights_s
from autoshard.layout.layout import Layout
from autoshard.layout.program import Given, Program
from autoshard.plan.lowering import split_pending
from autoshard.spec.kernels import Kernels

Split = Callable[[Atoms], tuple[Atoms, Atoms]]  # atoms that a gradient awaits -> summed first, summed after that


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What the price of a block rests on beside its problem: kernels, links, and which gradients are summed first."""

    kernels: Kernels
    ring: Callable[[Atoms], Ring]
    cp_order: str = "contiguous"
    split: Split = split_pending


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """The seconds of a micro-batch, with its share of what is sent once per step, and the bytes that a rank keeps."""

    time_s: float
    memory_bytes: float


def block_price(
    problem: OperatorProblem,
    lowered: LoweredBlock,
    program: Program,
    rests: Mapping[str, Atoms],
    platform: Platform,
) -> BlockPrice:
    """Price the lowered program of a block whose weights may rest in pieces over some atoms."""
    layouts = {
        entry.value.tensor: entry.value.layout
        for entry in program.instructions
        if isinstance(entry, Given) and problem.is_weight(entry.value.tensor)
    }
    sizes = BlockSizes(sizes=problem.sizes, atoms=problem.atoms, cp_order=platform.cp_order)
    work = block_work(lowered, lowered, sizes, problem.rates.matrix_tile)
    held = tuple(_held_weights(problem, lowered, layouts, rests, platform.split))
    groups = {message.collective.atoms for message, _ in work.messages}
    groups.update(atoms for weight in held for atoms in (weight.shared, weight.summed) if atoms)
    rings = {atoms: platform.ring(atoms) for atoms in sorted(groups)}
    cost = block_cost(work, rings, problem.rates)
    pass_s = sum(sum(cost.seconds[name].values()) for name in PASSES)
    sums_s = held_weights_s(held, rings, platform.kernels, pass_s, problem.num_micro_batches, problem.rates.dp_ratio)
    states = sum(resting_bytes(problem, name, layout, rests.get(name, ())) for name, layout in layouts.items())
    return BlockPrice(time_s=float(pass_s + sums_s), memory_bytes=float(states + cost.memory.saved_bytes))


def _held_weights(
    problem: OperatorProblem,
    lowered: LoweredBlock,
    layouts: Mapping[str, Layout],
    rests: Mapping[str, Atoms],
    split: Split,
) -> Iterator[HeldWeight]:
    """Yield the weights of a block with what is sent for them."""
    tensors = problem.block.tensors
    for name, layout in layouts.items():
        rest, pending = rests.get(name, ()), lowered.sharding.parameter_pending.get(name, ())
        shared, summed = (rest, tuple(atom for atom in pending if atom not in rest)) if rest else split(pending)
        trained = name not in problem.frozen
        yield HeldWeight(
            weight_bytes=problem.local_bytes(layout, tensors[name].dtype),
            gradient_bytes=problem.local_bytes(layout, tensors[f"{name}.sum"].dtype) if trained else 0,
            shared=shared,
            summed=summed,
            in_pieces=bool(rest),
        )
