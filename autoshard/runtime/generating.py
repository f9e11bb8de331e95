"""Text from weights: a model's forward pass up to the logits on one device, and tokens chosen one after the other."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from autoshard.engine.programs import BlockProgram, programs_of, tied_instances
from autoshard.engine.torch.execution import RankStep, Values, run_steps
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels import Rotations
from autoshard.engine.torch.kernels.products import groups_products
from autoshard.engine.torch.ledger import Ledger
from autoshard.engine.torch.steps import NUMBERS, RankContext, steps_of
from autoshard.engine.torch.world import World
from autoshard.graph.op import Array
from autoshard.layout.program import Compute, Given, Instruction, read_by, written_by
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.placement import MeshRank, sequence_order
from autoshard.runtime.convert.stored import WeightSource

_LAST_PRODUCT = "unembed"  # whose results are the logits
Choose = Callable[[torch.Tensor], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardBlock:
    """A block's forward pass on one rank."""

    parts: BlockProgram
    steps: tuple[RankStep, ...]
    result: str  # the value that it hands on


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """All blocks of a model and their weights on one device, for sequences of one length."""

    context: RankContext
    blocks: Mapping[str, _ForwardBlock]
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, plan: Plan, source: WeightSource, formats: Formats) -> "WholeModel":
        """Read the weights of a plan of one rank; its workload says how long sequences are."""
        programs = programs_of(plan, packs=groups_products(formats.device))
        world = World(
            mesh=plan.mesh, rank=0, groups={}, sent_bytes=Counter(), activity=RankActivity(), channels={},
            ledger=Ledger(),
        )  # fmt: skip
        context = RankContext(
            world=world,
            mesh_rank=MeshRank(mesh=plan.mesh, rank=0, sizes=programs.graph.sizes),
            formats=formats,
            positions=torch.from_numpy(sequence_order(plan)),
            rotations=Rotations(),
            packed=programs.packed,
        )
        (stage,) = programs.stages
        forwards = {id(parts): _forward(context, parts) for parts in stage.values()}  # equal layers have one program
        ties, weights = tied_instances(programs.graph), dict[str, torch.Tensor]()
        for name, parts in stage.items():
            for tensor in parts.block.parameters:
                instance = f"{name}.{tensor.name}"
                owner = ties.get(instance, instance)
                if owner not in weights:
                    memory = torch.empty(source.shapes[owner], dtype=formats.of(tensor.dtype))
                    source.fill(memory, owner, (0,) * memory.dim())
                    weights[owner] = memory.to(formats.device)
                weights[instance] = weights[owner]
        return cls(
            context=context, blocks={name: forwards[id(parts)] for name, parts in stage.items()}, weights=weights
        )

    @torch.no_grad()
    def logits(self, tokens: Array) -> torch.Tensor:
        """Return the logits behind every token of [1, length]: what they say does not depend on later tokens."""
        hidden: torch.Tensor | None = None
        for name, block in self.blocks.items():
            values: Values = {}
            run_steps(block.steps, values, self._source(name, block, tokens, hidden))
            hidden = values[block.result].contiguous()
        assert hidden is not None, "a model has blocks"
        return hidden[0]

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
            return formats.tensor(tokens, "int64") if tensor == "tokens" else self.weights[f"{name}.{tensor}"]

        return source


def _forward(context: RankContext, parts: BlockProgram) -> _ForwardBlock:
    """Prepare a block's forward pass, of the last block only what its logits are made of."""
    ends = [entry for entry in parts.forward if isinstance(entry, Compute) and entry.op.name == _LAST_PRODUCT]
    result = ends[0].writes[0].name if ends else parts.program.results[parts.handed_on].name
    parts = replace(parts, forward=tuple(_makers(parts.forward, result)))
    return _ForwardBlock(parts=parts, steps=tuple(steps_of(context, parts, "F", {result})), result=result)


def _makers(instructions: Sequence[Instruction], result: str) -> Iterator[Instruction]:
    """Yield the instructions without which a value would not be made, in their order."""
    needed, makers = {result}, list[Instruction]()
    for entry in reversed(instructions):
        if needed.intersection(written_by(entry)):
            makers.append(entry)
            needed.update(() if isinstance(entry, Given) else read_by(entry))
    yield from reversed(makers)


def continued(model: WholeModel, prompt: Sequence[int], length: int, choose: Choose, stop: int | None) -> Iterator[int]:
    """Yield one token after the other behind a prompt, until a sequence has its length or the token that stops it."""
    tokens = np.zeros((1, length), dtype=np.int64)
    tokens[0, : len(prompt)] = prompt
    for place in range(len(prompt), length):
        token = choose(model.logits(tokens)[place - 1])
        yield token
        if token == stop:
            return
        tokens[0, place] = token


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
