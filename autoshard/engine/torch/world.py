"""The process groups of a mesh, and messages between two ranks."""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from autoshard.engine.position import Position
from autoshard.engine.torch.lanes import Lanes, goes_back, lanes_of
from autoshard.spec.mesh import Mesh, axis_of_atoms

_AT_THE_END = sys.maxsize  # of a step: nothing that a rank receives before tells that a message was taken


class Traffic:
    """What a rank has sent: calls by axis and kind, and bytes by axis, as the cost model counts them."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def add(self, axis: str, kind: str, sent_bytes: float) -> None:
        """Count a call."""
        self.calls[axis, kind] += 1
        self.sent_bytes[axis] += round(sent_bytes)

    def clear(self) -> None:
        """Begin anew."""
        self.calls.clear()
        self.sent_bytes.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """A message under way, its memory, and which action of the receiver's takes it."""

    work: dist.Work
    memory: torch.Tensor
    to_rank: int
    taken_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """Tensors on their way around a ring; who waits for those that arrive has also handed on its own."""

    works: tuple[dist.Work, ...]
    sent: tuple[torch.Tensor, ...]  # kept until they have left
    arriving: tuple[torch.Tensor, ...]
    label: str
    position: Position

    def arrived(self) -> tuple[torch.Tensor, ...]:
        """Wait for what the member before hands on."""
        self.position.wait(self.label)
        for work in self.works:
            work.wait()
        self.position.wait("")
        return self.arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: ``ranks`` in the mesh's order of members, which torch does not keep."""

    ranks: tuple[int, ...]
    rank: int  # this process
    axis: str  # whose traffic this is
    handle: dist.ProcessGroup
    traffic: Traffic
    position: Position

    @property
    def number(self) -> int:
        """Which of the members this process is."""
        return self.ranks.index(self.rank)

    @property
    def torch_order(self) -> tuple[int, ...]:
        """The members in the order in which torch takes and gives their parts."""
        return tuple(sorted(self.ranks))

    def all_reduce(self, total: torch.Tensor, *, largest: bool = False) -> None:
        """Sum everybody's tensor, or take the maximum, in place."""
        with self._waiting("all_reduce"):
            dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.handle)
        self._count("all_reduce_max" if largest else "all_reduce", 2 * total.nbytes)

    def all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Put equal pieces together along their first dim, in the order of the members."""
        joined = piece.new_empty((len(self.ranks) * len(piece), *piece.shape[1:]))
        with self._waiting("all_gather"):
            dist.all_gather_single(joined, piece.contiguous(), group=self.handle)
        self._count("all_gather", joined.nbytes)
        return _ordered(joined, self.torch_order, self.ranks)

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Sum what divides along its first dim by the members; return this member's piece."""
        given = _ordered(whole.contiguous(), self.ranks, self.torch_order)
        mine = given.new_empty((len(given) // len(self.ranks), *given.shape[1:]))
        with self._waiting("reduce_scatter"):
            dist.reduce_scatter_single(mine, given, group=self.handle)
        self._count("reduce_scatter", given.nbytes)
        return mine

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give everybody what the first member has, in place; nothing of a step, so not counted."""
        dist.broadcast(tensor, self.ranks[0], group=self.handle)

    def all_to_all(self, given: torch.Tensor, counts: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Exchange parts of flat tensors, which stand in torch's order of the members."""
        received = given.new_empty(sum(counts))
        with self._waiting("all_to_all"):
            dist.all_to_all_single(received, given, list(counts), list(sent), group=self.handle)
        self._count("all_to_all", given.nbytes)
        return received

    def pass_on(self, tensors: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Passing:
        """Start handing tensors to the next member, and taking as many from the one before into given memory."""
        count, here = len(self.ranks), self.number
        sent = tuple(tensor.contiguous() for tensor in tensors)
        messages = [dist.P2POp(dist.isend, one, self.ranks[(here + 1) % count], self.handle) for one in sent]
        messages += [dist.P2POp(dist.irecv, one, self.ranks[here - 1], self.handle) for one in arriving]
        works = dist.batch_isend_irecv(messages)
        for tensor in sent:
            self.traffic.add(self.axis, "send", tensor.nbytes)
        label = f"permute over {self.axis} of ranks {self.torch_order}"
        return Passing(works=tuple(works), sent=sent, arriving=tuple(arriving), label=label, position=self.position)

    @contextmanager
    def _waiting(self, kind: str) -> Iterator[None]:
        """Say while it lasts which collective this rank is in."""
        self.position.wait(f"{kind} over {self.axis} of ranks {self.torch_order}")
        yield
        self.position.wait("")

    def _count(self, kind: str, whole_bytes: int) -> None:
        self.traffic.add(self.axis, kind, whole_bytes * (len(self.ranks) - 1) / len(self.ranks))


def _ordered(joined: torch.Tensor, now: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Bring equal pieces, one of each rank, from one order of ranks into another."""
    if now == wanted:
        return joined
    pieces = joined.chunk(len(now)) if len(joined) else [joined] * len(now)
    return torch.cat([pieces[now.index(rank)] for rank in wanted])


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All groups of a mesh that one rank belongs to, by the atoms along which their members differ."""

    mesh: Mesh
    rank: int
    groups: Mapping[tuple[str, ...], Group]
    traffic: Traffic
    position: Position
    lanes: Lanes
    under_way: list[Sent] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        atoms: Iterable[tuple[str, ...]],
        lane_backend: str | None = None,
        position: Position | None = None,
    ) -> "World":
        """Make the groups of these atoms, and lanes if messages have a backend of their own.

        Every rank of the running torch world calls this with the same ones.
        """
        assert dist.get_world_size() == mesh.num_ranks, f"{dist.get_world_size()} processes for {mesh}"
        rank = dist.get_rank()
        handles: dict[tuple[int, ...], object] = {}  # torch gives a number to who is no member
        groups: dict[tuple[str, ...], Group] = {}
        traffic, position = Traffic(), position or Position()
        for names in sorted(set(atoms) - {()}):
            for ranks in mesh.groups(names):
                members = tuple(sorted(ranks))
                if len(members) > 1 and members not in handles:
                    handles[members] = dist.new_group(list(members))
                handle = handles.get(members)
                if rank in members and isinstance(handle, dist.ProcessGroup):
                    axis = axis_of_atoms(names)
                    groups[names] = Group(
                        ranks=ranks, rank=rank, axis=axis, handle=handle, traffic=traffic, position=position
                    )
        lanes = lanes_of(mesh.groups(("pp",)), lane_backend)
        return cls(mesh=mesh, rank=rank, groups=groups, traffic=traffic, position=position, lanes=lanes)

    def group(self, atoms: Sequence[str], axis: str | None = None) -> Group | None:
        """Return this rank's group along atoms; None where it would be alone. ``axis`` names its traffic otherwise."""
        if self.num_ranks(atoms) == 1:
            return None
        found = self.groups[tuple(atoms)]
        return found if axis is None else replace(found, axis=axis)

    def num_ranks(self, atoms: Sequence[str]) -> int:
        """Return how many ranks differ only along these atoms."""
        return math.prod(self.mesh.size(atom) for atom in atoms)

    def send(self, tensor: torch.Tensor, to_rank: int, tag: int, taken_at: int = _AT_THE_END) -> None:
        """Start sending what an action of the receiver's takes; the tensor may be overwritten meanwhile."""
        memory = tensor.clone(memory_format=torch.contiguous_format)
        work = dist.isend(memory, to_rank, tag=tag, group=self._lane(tag, self.rank, to_rank))
        assert work is not None, "a message to another rank is under way"
        self.under_way.append(Sent(work=work, memory=memory, to_rank=to_rank, taken_at=taken_at))
        self.traffic.add("pp", "send", memory.nbytes)

    def receive(self, into: torch.Tensor, from_rank: int, tag: int, made_at: int = -1) -> torch.Tensor:
        """Wait for what an action of the sender's made: by then it had taken whatever came for it so far."""
        self.position.wait(f"what rank {from_rank} hands on")
        dist.recv(into, from_rank, tag=tag, group=self._lane(tag, from_rank, self.rank))
        self.position.wait("")
        self._finish([sent for sent in self.under_way if sent.to_rank == from_rank and sent.taken_at <= made_at])
        return into

    def _lane(self, tag: int, from_rank: int, to_rank: int) -> dist.ProcessGroup | None:
        """Return the way of a message; None for the one that all share."""
        return self.lanes.get((goes_back(tag), from_rank < to_rank))

    def finish_sending(self) -> None:
        """Wait until everything sent has left."""
        self._finish(list(self.under_way))

    def _finish(self, left: Sequence[Sent]) -> None:
        for sent in left:
            self.position.wait(f"rank {sent.to_rank} to take a message")
            sent.work.wait()
            self.position.wait("")
            self.under_way.remove(sent)
