"""Text from weights: a model's forward pass up to the logits, on one rank or cut over several, and tokens chosen."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from autoshard.engine.programs import BlockProgram, programs_of, tied_instances
from autoshard.engine.torch.execution import RankStep, Values, run_steps
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels import Rotations
from autoshard.engine.torch.kernels.grouped import groups_products
from autoshard.engine.torch.steps import NUMBERS, RankContext, steps_of
from autoshard.engine.torch.world import World
from autoshard.graph.decoder import LOGITS
from autoshard.graph.op import Array
from autoshard.layout.layout import Layout
from autoshard.layout.program import Compute, Given, Instruction, Value, read_by, written_by
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.placement import MeshRank, sequence_order
from autoshard.runtime.convert.stored import WeightSource

Choose = Callable[[torch.Tensor], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardBlock:
    """A block's forward pass on one rank."""

    parts: BlockProgram
    steps: tuple[RankStep, ...]
    result: Value  # that it hands on


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakingModel:
    """All blocks of a model and a rank's part of their weights, for sequences of one length."""

    length: int
    context: RankContext
    blocks: Mapping[str, _ForwardBlock]
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, plan: Plan, source: WeightSource, formats: Formats) -> "SpeakingModel":
        """Read this rank's part of the weights, for a plan without stages whose ranks have met in torch's world.

        The workload of the plan says how long sequences are.
        """
        programs = programs_of(plan, packs=groups_products(formats.device))
        if plan.mesh.num_ranks > 1:
            world = World.build(plan.mesh, programs.group_atoms(), None, RankActivity())
        else:
            world = World(
                mesh=plan.mesh, rank=0, groups={}, sent_bytes=Counter(), activity=RankActivity(), channels={},
            )  # fmt: skip
        mesh_rank = MeshRank(mesh=plan.mesh, rank=world.rank, sizes=programs.graph.sizes)
        context = RankContext(
            world=world,
            mesh_rank=mesh_rank,
            formats=formats,
            positions=torch.from_numpy(sequence_order(plan)),
            rotations=Rotations(),
            packed=programs.packed,
        )
        (stage,) = programs.stages
        forwards = {id(parts): _forward(context, parts) for parts in stage.values()}  # equal layers have one program
        ties, weights, read = tied_instances(programs.graph), dict[str, torch.Tensor](), dict[object, torch.Tensor]()
        for name, parts in stage.items():
            for tensor in parts.block.parameters:
                instance = f"{name}.{tensor.name}"
                owner, bounds = ties.get(instance, instance), mesh_rank.bounds(parts.input_value(tensor.name).layout)
                if (owner, bounds) not in read:
                    shape = [stop - start for start, stop in bounds]
                    memory = torch.empty(shape, dtype=formats.of(tensor.dtype))
                    source.fill(memory, owner, [start for start, _ in bounds])
                    read[owner, bounds] = memory.to(formats.device)
                weights[instance] = read[owner, bounds]
        blocks = {name: forwards[id(parts)] for name, parts in stage.items()}
        return cls(length=plan.workload.seq_len, context=context, blocks=blocks, weights=weights)

    @torch.no_grad()
    def logits(self, tokens: Array, place: int) -> torch.Tensor:
        """Return the logits behind one token of [1, length], the same on all ranks; later tokens change nothing."""
        hidden: torch.Tensor | None = None
        for name, block in self.blocks.items():
            values: Values = {}
            run_steps(block.steps, values, self._source(name, block, tokens, hidden))
            hidden = values[block.result.name].contiguous()
        assert hidden is not None, "a model has blocks"
        *_, last = self.blocks.values()
        return self._row(hidden, last.result.layout, place)

    def _row(self, logits: torch.Tensor, layout: Layout, place: int) -> torch.Tensor:
        """Return one row of logits of which every rank holds a part."""
        here, sizes = self.context.mesh_rank, self.context.mesh_rank.sizes
        (_, (first, stop), (low, high)) = here.bounds(layout)
        row = torch.zeros(sizes[layout.dims[-1][0]])
        counted = {atom for _, atoms in layout.dims for atom in atoms} | {*layout.sums}
        if first <= place < stop and here.is_first(atom for atom, _ in here.mesh.axes if atom not in counted):
            row[low:high] = logits[0, place - first]
        return self.context.world.total(row) if here.mesh.num_ranks > 1 else row

    def _source(
        self, name: str, block: _ForwardBlock, tokens: Array, hidden: torch.Tensor | None
    ) -> Callable[[str], torch.Tensor]:
        carried, formats = block.parts.block.carry_in, self.context.formats

        def source(tensor: str) -> torch.Tensor:
            if tensor in NUMBERS:
                return self.context.numbers(tensor, block.parts.input_value(tensor).layout)
            if tensor == carried:
                assert hidden is not None, "the first block takes tokens"
                return hidden
            if tensor == "tokens":
                layout = block.parts.input_value(tensor).layout
                return formats.tensor(self.context.mesh_rank.block(tokens, layout), "int64")
            return self.weights[f"{name}.{tensor}"]

        return source


def _forward(context: RankContext, parts: BlockProgram) -> _ForwardBlock:
    """Prepare a block's forward pass, of the last block only what its logits are made of."""
    ends = [entry for entry in parts.forward if isinstance(entry, Compute) and entry.op.name in LOGITS]
    result = ends[-1].writes[0] if ends else parts.program.results[parts.handed_on]
    parts = replace(parts, forward=tuple(_makers(parts.forward, result.name)))
    return _ForwardBlock(parts=parts, steps=tuple(steps_of(context, parts, "F", {result.name})), result=result)


def _makers(instructions: Sequence[Instruction], result: str) -> Iterator[Instruction]:
    """Yield the instructions without which a value would not be made, in their order."""
    needed, makers = {result}, list[Instruction]()
    for entry in reversed(instructions):
        if needed.intersection(written_by(entry)):
            makers.append(entry)
            needed.update(() if isinstance(entry, Given) else read_by(entry))
    yield from reversed(makers)


def continued(
    model: SpeakingModel, prompt: Sequence[int], num_tokens: int, choose: Choose, ends: Sequence[tuple[int, ...]] = ()
) -> Iterator[int]:
    """Yield so many tokens behind a prompt, or fewer where they end as one of ``ends``.

    Every rank of a model chooses the same ones.
    """
    tokens, first = np.zeros((1, model.length), dtype=np.int64), len(prompt)
    tokens[0, :first] = prompt
    for place in range(first, first + num_tokens):
        tokens[0, place] = token = choose(model.logits(tokens, place - 1))
        yield token
        if any(end and tuple(tokens[0, max(first, place + 1 - len(end)) : place + 1].tolist()) == end for end in ends):
            return


def chooser(temperature: float, top_k: int | None, seed: int) -> Choose:
    """Return how a token is chosen: the likeliest at temperature 0; else at random, perhaps among a few.

    >>> logits = torch.tensor([0.0, 2.0, 1.0])
    >>> chooser(0.0, None, 0)(logits), chooser(1.0, 1, 0)(logits)
    (1, 1)
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        numbers = logits.to("cpu", torch.float64)
        if not temperature:
            return int(numbers.argmax())
        best, places = numbers.topk(min(top_k or len(numbers), len(numbers)))
        shares = torch.softmax(best / temperature, dim=0)
        return int(places[torch.multinomial(shares, 1, generator=generator)])

    return choose
