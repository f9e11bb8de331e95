"""The process groups of a mesh, and messages between two ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autoshard.spec.mesh import Mesh

Sent = tuple[dist.Work, torch.Tensor]  # a message under way, and its memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: ``ranks`` in the mesh's order of members, which torch does not keep."""

    ranks: tuple[int, ...]
    rank: int  # this process
    handle: dist.ProcessGroup

    @property
    def number(self) -> int:
        """Which of the members this process is."""
        return self.ranks.index(self.rank)

    @property
    def torch_order(self) -> tuple[int, ...]:
        """The members in the order in which torch takes and gives their parts."""
        return tuple(sorted(self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All groups of a mesh that one rank belongs to, by the atoms along which their members differ."""

    mesh: Mesh
    rank: int
    groups: Mapping[tuple[str, ...], Group]
    under_way: list[Sent] = field(default_factory=list)

    @classmethod
    def build(cls, mesh: Mesh, atoms: Iterable[tuple[str, ...]]) -> "World":
        """Make the groups of these atoms; every rank of the running torch world calls this with the same ones."""
        assert dist.get_world_size() == mesh.num_ranks, f"{dist.get_world_size()} processes for {mesh}"
        rank = dist.get_rank()
        handles: dict[tuple[int, ...], object] = {}  # torch gives a number to who is no member
        groups: dict[tuple[str, ...], Group] = {}
        for names in sorted(set(atoms) - {()}):
            for ranks in mesh.groups(names):
                members = tuple(sorted(ranks))
                if len(members) > 1 and members not in handles:
                    handles[members] = dist.new_group(list(members))
                handle = handles.get(members)
                if rank in members and isinstance(handle, dist.ProcessGroup):
                    groups[names] = Group(ranks=ranks, rank=rank, handle=handle)
        return cls(mesh=mesh, rank=rank, groups=groups)

    def group(self, atoms: Sequence[str]) -> Group | None:
        """Return this rank's group along atoms; None where it would be alone."""
        return self.groups[tuple(atoms)] if self.num_ranks(atoms) > 1 else None

    def num_ranks(self, atoms: Sequence[str]) -> int:
        """Return how many ranks differ only along these atoms."""
        return math.prod(self.mesh.size(atom) for atom in atoms)

    def send(self, tensor: torch.Tensor, to_rank: int, tag: int) -> None:
        """Start sending; the receiver may take its time, and the tensor may be overwritten meanwhile."""
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        work = dist.isend(tensor, to_rank, tag=tag)
        assert work is not None, "a message to another rank is under way"
        self.under_way.append((work, tensor))

    def receive(self, into: torch.Tensor, from_rank: int, tag: int) -> torch.Tensor:
        """Wait for a message."""
        dist.recv(into, from_rank, tag=tag)
        return into

    def finish_sending(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()
