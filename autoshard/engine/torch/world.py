"""The process groups of a mesh, messages between two ranks, and the bytes that all of them have sent."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from itertools import product

import torch
import torch.distributed as dist

from autoshard.engine.torch.formats import NOWHERE
from autoshard.engine.torch.ledger import BegunCollective, Ledger
from autoshard.run.activity import RankActivity
from autoshard.run.protocol import HOST
from autoshard.spec.mesh import COPIES, PARTS, Mesh, axis_of_atoms

Arrival = Callable[[], torch.Tensor]  # waits for what is under way, and returns it

_AT_THE_END = sys.maxsize  # of a step: nothing that a rank receives before shows that a message was taken


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentMessage:
    """A message under way, its memory, and which action of the receiver takes it."""

    work: dist.Work
    memory: torch.Tensor
    to_rank: int
    taken_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that communicate: ``ranks`` in the mesh's order of members, which torch does not keep."""

    ranks: tuple[int, ...]
    rank: int  # this process
    axis: str  # whose traffic this is
    handle: dist.ProcessGroup
    sent_bytes: Counter[str]  # by axis, as the cost model counts them
    activity: RankActivity
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def number(self) -> int:
        """Which of the members this process is."""
        return self.ranks.index(self.rank)

    @property
    def torch_order(self) -> tuple[int, ...]:
        """The members in the order in which torch takes and gives their parts."""
        return tuple(sorted(self.ranks))

    def all_reduce(self, total: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """Sum the tensors of all members, or take the maximum, in place."""
        return self.begin_all_reduce(total, largest=largest, overlaps=False)()

    def all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Put equal pieces together along their first dim, in the order of the members."""
        return self.begin_all_gather(piece, overlaps=False)()

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Sum a tensor whose first dim the members divide; return this member's piece."""
        return self.begin_reduce_scatter(whole, overlaps=False)()

    def begin_all_reduce(self, total: torch.Tensor, *, largest: bool = False, overlaps: bool = True) -> Arrival:
        """Begin to sum in place; unless it ``overlaps`` what follows, nothing is computed meanwhile.

        The same holds for the other collectives that begin.
        """
        self._note("all_reduce_max" if largest else "all_reduce", total)
        with self._waiting("all_reduce"):
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            work = dist.all_reduce(total, op=op, group=self.handle, async_op=overlaps)
        self._count(2 * total.nbytes)
        return self._arrival("all_reduce", work, (total,), lambda: total)

    def begin_all_gather(self, piece: torch.Tensor, *, overlaps: bool = True) -> Arrival:
        """Begin to put pieces together."""
        self._note("all_gather", piece)
        joined = piece.new_empty((len(self.ranks) * len(piece), *piece.shape[1:]))
        contiguous = piece.contiguous()
        with self._waiting("all_gather"):
            work = dist.all_gather_single(joined, contiguous, group=self.handle, async_op=overlaps)
        self._count(joined.nbytes)
        return self._arrival("all_gather", work, (contiguous,), lambda: _ordered(joined, self.torch_order, self.ranks))

    def begin_reduce_scatter(self, whole: torch.Tensor, *, overlaps: bool = True) -> Arrival:
        """Begin to sum, for every member its piece."""
        self._note("reduce_scatter", whole)
        pieces = _ordered(whole.contiguous(), self.ranks, self.torch_order)
        piece = pieces.new_empty((len(pieces) // len(self.ranks), *pieces.shape[1:]))
        with self._waiting("reduce_scatter"):
            work = dist.reduce_scatter_single(piece, pieces, group=self.handle, async_op=overlaps)
        self._count(pieces.nbytes)
        return self._arrival("reduce_scatter", work, (pieces,), lambda: piece)

    def _arrival(
        self, kind: str, work: dist.Work | None, arguments: Sequence[torch.Tensor], result: Arrival
    ) -> Arrival:
        """Return a function that waits for a collective; until then the arguments of the collective stay in memory."""
        held = list(arguments)

        def arrive() -> torch.Tensor:
            if work is not None:
                with self._waiting(kind):
                    work.wait()
            held.clear()
            return result()

        return arrive

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the first member's tensor to all members; it is no part of a step, so it is not counted."""
        dist.broadcast(tensor, self.ranks[0], group=self.handle)

    def all_to_all(self, flat: torch.Tensor, counts: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Exchange parts of flat tensors, which stand in torch's order of the members."""
        self._note("all_to_all", flat, equal_shapes=False)
        received = flat.new_empty(sum(counts))
        with self._waiting("all_to_all"):
            dist.all_to_all_single(received, flat, list(counts), list(sent), group=self.handle)
        unsent = sent[self.torch_order.index(self.rank)]
        self.sent_bytes[self.axis] += (len(flat) - unsent) * flat.itemsize
        return received

    def pass_on(
        self, tensors: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]
    ) -> Callable[[], Sequence[torch.Tensor]]:
        """Start sending tensors to the next member, and receiving as many from the one before into given memory.

        Return a function that waits until they are sent, and returns the received tensors.
        """
        for tensor in tensors:
            self._note("permute", tensor, equal_shapes=False)
        following, before = self.ranks[(self.number + 1) % len(self.ranks)], self.ranks[self.number - 1]
        messages = [dist.P2POp(dist.isend, tensor.contiguous(), following, self.handle) for tensor in tensors]
        messages += [dist.P2POp(dist.irecv, memory, before, self.handle) for memory in arriving]
        works = dist.batch_isend_irecv(messages)
        self.sent_bytes[self.axis] += sum(tensor.nbytes for tensor in tensors)

        def wait() -> Sequence[torch.Tensor]:
            with self._waiting("permute"):
                for work in works:
                    work.wait()
            messages.clear()  # which held the memory of what was sent
            return arriving

        return wait

    def _waiting(self, kind: str) -> AbstractContextManager[None]:
        """Record while it lasts which collective this rank is in."""
        return self.activity.waiting(f"{kind} over {self.axis} of ranks {self.torch_order}")

    def _note(self, kind: str, tensor: torch.Tensor, *, equal_shapes: bool = True) -> None:
        """Note that a collective begins; without ``equal_shapes`` members may send tensors of different shapes."""
        if self.ledger.is_kept:
            form = str(tensor.dtype).removeprefix("torch.") + (str(list(tensor.shape)) if equal_shapes else "")
            self.ledger.entries.append(BegunCollective(kind=kind, ranks=self.torch_order, form=form))

    def _count(self, whole_bytes: int) -> None:
        self.sent_bytes[self.axis] += round(whole_bytes * (len(self.ranks) - 1) / len(self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentGroup(RankGroup):
    """A group of the same ranks that sends nothing: received tensors are zero."""

    def begin_all_reduce(self, total: torch.Tensor, *, largest: bool = False, overlaps: bool = True) -> Arrival:
        """Return the tensor unchanged."""
        self._note("all_reduce_max" if largest else "all_reduce", total)
        return lambda: total

    def begin_all_gather(self, piece: torch.Tensor, *, overlaps: bool = True) -> Arrival:
        """Return zeros with the shape of all pieces together."""
        self._note("all_gather", piece)
        return lambda: piece.new_zeros((len(self.ranks) * len(piece), *piece.shape[1:]))

    def begin_reduce_scatter(self, whole: torch.Tensor, *, overlaps: bool = True) -> Arrival:
        """Return zeros with the shape of a piece."""
        self._note("reduce_scatter", whole)
        return lambda: whole.new_zeros((len(whole) // len(self.ranks), *whole.shape[1:]))

    def all_to_all(self, flat: torch.Tensor, counts: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Return memory with the size of the parts that would arrive."""
        self._note("all_to_all", flat, equal_shapes=False)
        return flat.new_empty(sum(counts))

    def pass_on(
        self, tensors: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]
    ) -> Callable[[], Sequence[torch.Tensor]]:
        """Return memory with the shapes of the tensors that would arrive."""
        for tensor in tensors:
            self._note("permute", tensor, equal_shapes=False)
        return lambda: arriving


def _ordered(joined: torch.Tensor, now: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Bring equal pieces, one of each rank, from one order of ranks into another."""
    if now == order:
        return joined
    pieces = joined.chunk(len(now)) if len(joined) else [joined] * len(now)
    return torch.cat([pieces[now.index(rank)] for rank in order])


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All groups of a mesh that one rank belongs to, by the atoms along which their members differ.

    ``channels`` are those of messages between two ranks: forward or back, to a higher rank or a lower one. Device
    libraries know no tags, and wait for the receiver. With one channel only, two ranks that send each other something
    at once would wait forever, and what one takes later would arrive first.
    """

    mesh: Mesh
    rank: int
    groups: Mapping[tuple[str, ...], RankGroup]
    sent_bytes: Counter[str]
    activity: RankActivity
    channels: Mapping[tuple[bool, bool], dist.ProcessGroup]
    under_way: list[SentMessage] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        atoms: Iterable[tuple[str, ...]],
        backend: str | None,
        activity: RankActivity,
        groups_before: Mapping[tuple[str, ...], RankGroup] | None = None,
        ledger: Ledger | None = None,
    ) -> "World":
        """Make the groups of these atoms beside ``groups_before``, and channels if messages have a ``backend`` alone.

        Every rank of the running torch world calls this with the same arguments.
        """
        assert dist.get_world_size() == mesh.num_ranks, f"{dist.get_world_size()} processes for {mesh}"
        rank, sent_bytes, ledger = dist.get_rank(), Counter[str](), ledger or Ledger()
        handles: dict[tuple[int, ...], object] = {}  # torch gives a number to who is no member
        groups = dict(groups_before or {})
        new = sorted(set(atoms) - {(), *groups})
        for names, ranks in ((axes, ranks) for axes in new for ranks in mesh.groups(axes)):
            members = tuple(sorted(ranks))
            if len(members) > 1 and members not in handles:
                handles[members] = dist.new_group(list(members))
            handle = handles.get(members)
            if rank in members and isinstance(handle, dist.ProcessGroup):
                groups[names] = RankGroup(
                    ranks=ranks, rank=rank, axis=axis_of_atoms(names), handle=handle, sent_bytes=sent_bytes,
                    activity=activity, ledger=ledger,
                )  # fmt: skip
        channels: dict[tuple[bool, bool], dist.ProcessGroup] = {}
        for ranks, back, up in product(mesh.groups(("pp",)) if backend else (), (False, True), (False, True)):
            channel: object = dist.new_group(sorted(ranks), backend=backend) if len(ranks) > 1 else None
            if isinstance(channel, dist.ProcessGroup) and rank in ranks:
                channels[back, up] = channel
        return cls(
            mesh=mesh, rank=rank, groups=groups, sent_bytes=sent_bytes, activity=activity, channels=channels,
            ledger=ledger,
        )  # fmt: skip

    def group(self, atoms: Sequence[str], axis: str | None = None) -> RankGroup | None:
        """Return this rank's group along atoms; None where it would be alone. ``axis`` renames its traffic."""
        if self.num_ranks(atoms) == 1:
            return None
        group = self.groups[tuple(atoms)]
        return group if axis is None else replace(group, axis=axis)

    def divided(self, copies: int, parts: int, spreads: Iterable[tuple[str, ...]]) -> "World":
        """Add groups whose ranks share one of the copies of the states, or of the weights, and those of equal pieces.

        Members that share states follow each other by their piece of the weights, so that this falls into theirs.
        """
        if copies * parts == 1:
            return self
        mesh, over_parts = self.mesh.divided(copies, parts), {(*atoms, *PARTS) for atoms in spreads if "edp" in atoms}
        inner = World.build(mesh, {COPIES, PARTS, *spreads, *over_parts}, None, self.activity, ledger=self.ledger)
        counted = {
            ("divided", *atoms): replace(group, axis="dp", sent_bytes=self.sent_bytes)
            for atoms, group in inner.groups.items()
        }
        return replace(self, groups={**self.groups, **counted})

    def silent(self, *, keeps: bool = False) -> "SilentWorld":
        """Return the same world where nothing is sent; it ``keeps`` a ledger of what would be begun."""
        names = [entry.name for entry in fields(RankGroup)]
        unseen = {"sent_bytes": Counter[str](), "activity": RankActivity(), "ledger": Ledger(is_kept=keeps)}
        groups = {
            atoms: SilentGroup(**({name: getattr(group, name) for name in names} | unseen))
            for atoms, group in self.groups.items()
        }
        return SilentWorld(mesh=self.mesh, rank=self.rank, groups=groups, channels=self.channels, **unseen)

    def num_ranks(self, atoms: Sequence[str]) -> int:
        """Return how many ranks differ only along these atoms."""
        return math.prod(self.mesh.size(atom) for atom in atoms)

    def connect(self, links: Iterable[tuple[bool, int, int]], device: torch.device) -> None:
        """Let the two ends of links (back or not, from, to) meet, in the same order on every rank.

        Device libraries connect two ranks at their first message, and whoever comes first waits: a rank that receives
        ahead would wait for what depends on its own next message.
        """
        for back, from_rank, to_rank in sorted(links):
            call, peer = (dist.isend, to_rank) if self.rank == from_rank else (dist.irecv, from_rank)
            if self.rank in (from_rank, to_rank):
                channel = self._channel(back, from_rank, to_rank)
                work = call(torch.zeros(1, device=device), peer, tag=int(back), group=channel)
                assert work is not None, "both are members"
                work.wait()

    def send(self, tensor: torch.Tensor, to_rank: int, tag: int, taken_at: int = _AT_THE_END) -> None:
        """Start sending what an action of the receiver takes; the tensor may be overwritten meanwhile."""
        self.ledger.message(self.rank, to_rank, tag, tensor.dtype)
        memory = tensor.clone(memory_format=torch.contiguous_format)
        work = dist.isend(memory, to_rank, tag=tag, group=self._channel(tag, self.rank, to_rank))
        assert work is not None, "a message to another rank is under way"
        self.under_way.append(SentMessage(work=work, memory=memory, to_rank=to_rank, taken_at=taken_at))
        self.sent_bytes["pp"] += memory.nbytes

    def begin_receiving(self, into: torch.Tensor, from_rank: int, tag: int, made_at: int = -1) -> Arrival:
        """Begin to receive the result of a sender's action, which has taken all messages sent to it before."""
        self.ledger.message(from_rank, self.rank, tag, into.dtype)
        work = dist.irecv(into, from_rank, tag=tag, group=self._channel(tag, from_rank, self.rank))
        assert work is not None, "a message of another rank is under way"

        def arrive() -> torch.Tensor:
            with self.activity.waiting(f"what rank {from_rank} hands on"):
                work.wait()
            self._finish([sent for sent in self.under_way if sent.to_rank == from_rank and sent.taken_at <= made_at])
            return into

        return arrive

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum numbers of the host over all ranks, in place."""
        if dist.get_world_size() > 1:
            with self.activity.waiting("the norm of all ranks"):
                dist.all_reduce(numbers)
        return numbers

    def _channel(self, tag: int, from_rank: int, to_rank: int) -> dist.ProcessGroup | None:
        """Return the channel of a message, which goes back if its tag is odd; None for the group that all share."""
        return self.channels.get((tag % 2 == 1, from_rank < to_rank))

    def finish_sending(self) -> None:
        """Wait until everything sent has left."""
        self._finish(list(self.under_way))

    def _finish(self, messages: Sequence[SentMessage]) -> None:
        for sent in messages:
            with self.activity.waiting(f"rank {sent.to_rank} to take a message"):
                sent.work.wait()
            self.under_way.remove(sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentWorld(World):
    """A world in which nothing is sent, and received tensors have no numbers."""

    def connect(self, links: Iterable[tuple[bool, int, int]], device: torch.device) -> None:
        """Connect nothing."""

    def send(self, tensor: torch.Tensor, to_rank: int, tag: int, taken_at: int = _AT_THE_END) -> None:
        """Note the message."""
        self.ledger.message(self.rank, to_rank, tag, tensor.dtype)

    def begin_receiving(self, into: torch.Tensor, from_rank: int, tag: int, made_at: int = -1) -> Arrival:
        """Note the message."""
        self.ledger.message(from_rank, self.rank, tag, into.dtype)
        return lambda: into

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged."""
        return numbers


def channel_backend(device: torch.device) -> str | None:
    """Return the library for messages between devices; None where the receiver selects messages by tags."""
    return None if device.type in (HOST, NOWHERE.type) else dist.get_default_backend_for_device(device)
