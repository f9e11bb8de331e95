"""What a step notes of its routers, for reports: whom tokens chose, how sure the routers were, what was dropped.

Notes change no result, and no plan lists them. Each rank notes what its own tokens did, in a value beside those of the
program. The notes of all micro-batches are added on the device, and read where the loss is read; then all ranks add
theirs. Where several ranks have the same tokens, the first of them notes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.engine.programs import BlockProgram
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.kinds.experts import Choosing, Slot
from autoshard.graph.router import BALANCE, Z, router_losses
from autoshard.layout.program import Compute, Instruction, Value
from autoshard.plan.plan import Plan
from autoshard.run.reports import RouterReport
from autoshard.spec.model_parts import RouterScores

Noted = Literal["choices", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Stands behind an instruction: what is noted of which values, as a value of this name.

    Of ``choices`` these are the tokens of each expert, and the sum over tokens of the entropy of their probabilities;
    of ``dropped`` the number of choices that found no slot.
    """

    noted: Noted
    reads: tuple[Value, ...]
    writes: str
    probabilities: RouterScores = "softmax"  # what makes them of logits


def observation_behind(entry: Instruction, sizes: Mapping[str, int], *, packed: bool) -> Observation | None:
    """Return what is noted behind an instruction; None for most."""
    if not isinstance(entry, Compute) or entry.op.again:
        return None
    if isinstance(entry.op.kind, Choosing):
        reads, chosen = (entry.reads[0], entry.writes[1]), entry.writes[1]
        made_by = entry.op.kind.probabilities
        return Observation(noted="choices", probabilities=made_by, reads=reads, writes=f"{chosen.name}.noted")
    drops = sizes.get("slots", 0) < sizes["batch"] * sizes["seq"] and not packed
    if isinstance(entry.op.kind, Slot) and drops:
        return Observation(noted="dropped", reads=entry.writes, writes=f"{entry.writes[0].name}.noted")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A value of a block that is noted: as what, its name, and the atoms along which other ranks have other parts."""

    noted: str
    value: str
    atoms: frozenset[str]


def notes_of(parts: BlockProgram, sizes: Mapping[str, int], *, packed: bool) -> Iterator[Note]:
    """Yield what the forward pass of a block notes: behind instructions, and the losses of its router."""
    for entry in parts.forward:
        if seen := observation_behind(entry, sizes, packed=packed):
            cut = frozenset(atom for _, atoms in seen.reads[-1].layout.dims for atom in atoms)
            yield Note(noted=seen.noted, value=seen.writes, atoms=cut)
    for name, value in parts.reported.items():
        yield Note(noted=name, value=value.name, atoms=frozenset(value.layout.sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterNotes:
    """Where the notes of each router lie in one row of numbers, which all ranks add, and what follows from the sums."""

    plan: Plan
    sizes: Mapping[str, int]
    routers: tuple[str, ...]  # blocks with a router

    @classmethod
    def of(cls, plan: Plan, graph: OpGraph) -> "RouterNotes":
        """Find the routers of a plan."""
        routers = tuple(name for name, block in graph.instances() if _routes(block))
        return cls(plan=plan, sizes=graph.sizes, routers=routers)

    @property
    def _widths(self) -> Mapping[str, int]:
        losses = dict.fromkeys(router_losses(self.plan.workload), 1)
        return {"choices": self.sizes["experts"] + 1, "dropped": 1, **losses} if self.routers else {}

    def row(self, notes: Mapping[tuple[str, str], Sequence[float]]) -> list[float]:
        """Lay the notes of a rank, by block and what is noted, in their places; all others are 0."""
        places = [(router, noted, width) for router in self.routers for noted, width in self._widths.items()]
        return [
            number
            for router, noted, width in places
            for number in notes.get((router, noted), [0.0] * width)
        ]  # fmt: skip

    def report(self, row: Sequence[float]) -> RouterReport | None:
        """Return what follows from the sums over all ranks; None without routers, and of ranks rehearsed alone."""
        width, experts = sum(self._widths.values()), self.sizes.get("experts", 0)
        by_router = [row[start : start + width] for start in range(0, len(row), width)] if width else []
        loads = [numbers[:experts] for numbers in by_router]
        if not loads or not all(map(any, loads)):
            return None
        num_choices = sum(map(sum, loads))
        losses = {
            name: loss.weight(self.sizes, self.plan.schedule.num_micro_batches)
            * sum(numbers[experts + 2 + place] for numbers in by_router)
            / len(by_router)
            for place, (name, loss) in enumerate(router_losses(self.plan.workload).items())
        }
        return RouterReport(
            busiest=max(experts * max(load) / sum(load) for load in loads),
            entropy=sum(numbers[experts] for numbers in by_router) * self.sizes["choices"] / num_choices,
            dropped=sum(numbers[experts + 1] for numbers in by_router) / num_choices,
            balance_loss=losses.get(BALANCE),
            z_loss=losses.get(Z),
        )


def _routes(block: Block) -> bool:
    return any(isinstance(op.kind, Choosing) for op in block.ops)
