"""One weight on one rank: how it lies, which ranks sum its gradient, who updates it and who saves it."""

from dataclasses import dataclass
from typing import Literal

import torch

from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.states.rounding import RoundingBits
from autoshard.graph.block import Block
from autoshard.graph.op import Update
from autoshard.layout.layout import Layout
from autoshard.plan.candidate import Zero
from autoshard.run.placement import Bounds, MeshRank, StatePart, saves_alone
from autoshard.spec.training import Training

# The role of a weight that shares its values with a weight of another stage: "" if it shares them with none.
Tied = Literal["", "owner", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight on this rank: its block, and the atoms over whose ranks its gradient waits to be summed."""

    instance: str  # as in ``OpGraph.instances``: ``layer.3.up.weight``
    owner: str  # the instance whose values it has: itself, or the weight of another stage to which it is tied
    name: str  # in the block that says how it is updated: ``up.weight``
    block: Block
    layout: Layout  # of the weight, and of its gradient's sum
    mesh_rank: MeshRank
    summed: tuple[str, ...]  # atoms whose ranks hold copies that see only a part of the batch's keys or values
    spread: tuple[str, ...]  # atoms over which the batch is spread
    zero: Zero  # what each of those ranks has a piece of: nothing, the optimizer's state, or all of it
    training: Training
    copies: int = 1  # of the states over the ranks of ``spread``, each divided among as many of them
    parts: int = 1  # of a rank's piece of the weight, if it rests in pieces over fewer ranks than its states
    late: bool = False  # whether W computes its gradient, after I
    follows: bool = False  # whether it lies right behind the weight before it
    tied: Tied = ""

    @property
    def bounds(self) -> Bounds:
        """Which block of the weight this rank holds."""
        return self.mesh_rank.bounds(self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of that block."""
        return self.mesh_rank.shape(self.layout)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the weight over all ranks."""
        return tuple(self.mesh_rank.sizes[dim] for dim, _ in self.layout.dims)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Atoms along which the ranks of a stage update the same numbers: its replicas."""
        cut = {atom for _, atoms in self.layout.dims for atom in atoms} | set(self.spread if self.zero else ())
        return tuple(atom for atom, _ in self.mesh_rank.mesh.axes if atom not in {"pp", *cut})

    @property
    def replica(self) -> tuple[int, int]:
        """Which of the ranks that update the same numbers this one is, and how many they are."""
        number, count = 0, 1
        if self.copies > 1:
            ranks_of_a_copy = self.mesh_rank.mesh.size("edp") // self.copies
            number, count = self.mesh_rank.coordinate("edp") // ranks_of_a_copy, self.copies
        for atom in self.replicated:
            number, count = number + count * self.mesh_rank.coordinate(atom), count * self.mesh_rank.mesh.size(atom)
        return number, count

    @property
    def saves(self) -> bool:
        """Whether this rank writes the weight to checkpoints; each replica of a stage writes an equal share."""
        return self.tied != "copy" and saves_alone(self.owner, *self.replica)

    @property
    def optimizer(self) -> Update:
        """The update of the weight, with the constants of the training."""
        kind = self.block.op(f"{self.name}.update").kind
        assert isinstance(kind, Update), f"{self.name} is updated by {kind}"
        return kind.with_constants(self.training.adamw)

    def rounding(self, part: StatePart, update: int) -> RoundingBits:
        """Return the random bits by which an update rounds the weight, or one of its moments."""
        name = self.owner if part == "weight" else f"{self.owner}.{part}"
        return RoundingBits(seed=self.training.seed, update=update, weight=name, whole=self.whole)

    def dtype(self, part: str, formats: Formats) -> torch.dtype | None:
        """Return the format of the weight, its ``sum``, ``master`` or moments; None for those that it does not have."""
        tensor = self.block.tensors.get(f"{self.name}.{part}" if part else self.name)
        return None if tensor is None else formats.of(tensor.dtype)
