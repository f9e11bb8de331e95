"""A batch of which each rank brings its part: put together before a program, and cut again behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autoshard.errors import nearest, require
from autoshard.run.protocol import HOST

LOCAL = "local"


def example_inputs(inputs: object) -> Sequence[Any] | Mapping[str, Any]:
    """Return example inputs in order or by name; a tensor alone is the only one, and no sequence of its rows."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    message = f"must be what forward takes, in order or by name, not a value of {type(inputs).__name__}"
    require((isinstance(inputs, Sequence | Mapping) and not isinstance(inputs, str), "inputs", message))
    return cast(Any, inputs)


def local_axes(batch: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the axes along which ranks bring parts of a batch: those named behind ``local:``, or the first one.

    >>> local_axes("local", ["data", "model"]), local_axes("local:model.data", ["data", "model"])
    (('data',), ('data', 'model'))
    """
    asked = batch.removeprefix(LOCAL).removeprefix(":").split(".") if batch != LOCAL else [names[0]]
    require(
        *((axis in names, "batch", f"{axis!r} is no axis of the mesh. {nearest(axis, list(names))}") for axis in asked)
    )
    return tuple(name for name in names if name in asked)


def is_local(batch: Any) -> bool:
    """Say whether an option asks for batches in parts."""
    return isinstance(batch, str) and (batch == LOCAL or batch.startswith(f"{LOCAL}:"))


@dataclass(frozen=True, kw_only=True)
class LocalBatch:
    """The ranks that bring parts of a batch, and how they exchange them."""

    axes: tuple[str, ...]
    mesh: DeviceMesh
    number: int  # of this rank's part
    ranks: tuple[int, ...]  # that bring all parts, in their order
    sharing: tuple[tuple[int, ...], ...]  # ranks that bring the same part
    host: dist.ProcessGroup | None
    device: dist.ProcessGroup | None

    @classmethod
    def of(cls, mesh: DeviceMesh, axes: tuple[str, ...]) -> "LocalBatch":
        """Prepare the groups of ranks; every rank asks for them at once."""
        names: Any = mesh.mesh_dim_names
        order = [names.index(axis) for axis in (*(name for name in names if name not in axes), *axes)]
        count = 1
        for axis in axes:
            count *= mesh.size(names.index(axis))
        batches: list[list[int]] = mesh.mesh.permute(order).reshape(-1, count).tolist()
        sharing = tuple(map(tuple, zip(*batches, strict=True)))
        members = next(ranks for ranks in batches if dist.get_rank() in ranks)
        is_all = len(batches) == 1

        def group(backend: str | None) -> dist.ProcessGroup | None:
            if is_all and backend is None:
                return None
            return dist.new_subgroups_by_enumeration(batches, backend=backend)[0]  # pyright: ignore

        device = group(None)
        host = device if mesh.device_type == HOST else group("gloo")
        return cls(
            axes=axes,
            mesh=mesh,
            number=members.index(dist.get_rank()),
            ranks=tuple(members),
            sharing=sharing,
            host=host,
            device=device,
        )

    def size(self, flat: Sequence[Any]) -> int:
        """Return how many rows a part has: the first dim of the first tensor that has dims."""
        first = next((value for value in flat if isinstance(value, torch.Tensor) and value.dim()), None)
        require((first is not None, "inputs", "have no tensor with a batch; leave batch='local' out"))
        assert first is not None
        require((len(first) > 0, "inputs", "have no rows on some rank; leave this batch out on all ranks"))
        return len(first)

    def remedy(self) -> str:
        """Say what ranks bring that differ along no axis of the batch."""
        names: Sequence[str] = self.mesh.mesh_dim_names or ()
        equal = ", ".join(name for name in names if name not in self.axes)
        remedy = f"batch='{LOCAL}:{'.'.join(names)}'"
        return f"parts of the batch lie along {', '.join(self.axes)} and are equal along {equal}, unless {remedy}"

    def parts(self, flat: Sequence[Any], count: int) -> list[int]:
        """Return which inputs are cut: tensors whose first dim is as long as that of the first one."""
        return [
            number
            for number, value in enumerate(flat)
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == count
        ]

    def placements(self) -> list[Placement]:
        """Return how parts lie on the mesh, where they are equal."""
        return [Shard(0) if name in self.axes else Replicate() for name in self.mesh.mesh_dim_names or ()]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """Which rows of a batch each part has, in one call."""

    batch: LocalBatch
    parts: tuple[int, ...]  # which arguments are parts
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """All rows."""
        return sum(self.counts)

    @property
    def start(self) -> int:
        """The first row of this rank."""
        return sum(self.counts[: self.batch.number])

    @property
    def count(self) -> int:
        """The rows of this rank."""
        return self.counts[self.batch.number]

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor, whose first dim holds as many equal blocks as the batch has rows."""
        block = len(whole) // self.total
        return whole.narrow(0, self.start * block, self.count * block)

    def whole(self, flat: Sequence[Any]) -> list[Any]:
        """Put the parts of all inputs together; gradients of the whole go back to the part."""
        result = [*flat]
        for on_host in (True, False):
            chosen = [number for number in self.parts if (flat[number].device.type == HOST) is on_host]
            parts = [flat[number] for number in chosen]
            for number, part, whole in zip(chosen, parts, self.gathered(parts), strict=True):
                if part.requires_grad and torch.is_grad_enabled():
                    whole = _Joined.apply(part, whole, self)  # pyright: ignore
                result[number] = whole
        return result

    def gathered(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole tensors, whose first dims hold equal blocks for each row, by one collective."""
        shapes = [(len(part) // self.count, part.shape[1:]) for part in parts]
        if not parts or parts[0].is_meta:
            return [
                part.new_empty((block * self.total, *rest)) for part, (block, rest) in zip(parts, shapes, strict=True)
            ]
        packed = [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in parts]
        row_bytes = [len(piece) // self.count for piece in packed]
        piece = torch.cat(packed)
        longest = max(self.counts) * sum(row_bytes)
        piece = torch.nn.functional.pad(piece, (0, longest - len(piece)))
        group = self.batch.host if piece.device.type == HOST else self.batch.device
        gathered = piece.new_empty(len(self.counts) * longest)
        dist.all_gather_single(gathered, piece, group=group)
        wholes: list[torch.Tensor] = []
        pieces = gathered.reshape(len(self.counts), longest)
        start = [0] * len(self.counts)
        for part, size, (block, rest) in zip(parts, row_bytes, shapes, strict=True):
            spans = [
                pieces[number, start[number] : start[number] + count * size] for number, count in enumerate(self.counts)
            ]
            start = [at + count * size for at, count in zip(start, self.counts, strict=True)]
            wholes.append(torch.cat(spans).view(part.dtype).reshape(block * self.total, *rest))
        return wholes


class _Joined(torch.autograd.Function):
    """Inputs put together: the gradient of a part is its rows of the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, whole: torch.Tensor, rows: BatchRows) -> torch.Tensor:  # pyright: ignore
        ctx.rows = rows
        return whole

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.rows.within(upstream), None, None


class OwnRows(torch.autograd.Function):
    """A rank's rows of a result, from the part that its program has, which lies on the mesh in some way.

    Backward takes the mean over all parts of the losses, as torch's DistributedDataParallel does.
    """

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, part: torch.Tensor, rows: BatchRows, where: Sequence[Placement], shape: torch.Size
    ) -> torch.Tensor:
        """Return the rows of this rank."""
        ctx.rows, ctx.where, ctx.shape = rows, where, shape
        ctx.is_even = len({*rows.counts}) == 1
        target = rows.batch.placements() if ctx.is_even else [Replicate()] * len(where)
        local = _moved(part, rows.batch.mesh, (where, target), shape)
        return local if ctx.is_even else rows.within(local).clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the program's part."""
        rows: BatchRows = ctx.rows
        mesh = rows.batch.mesh
        mean = upstream / len(rows.counts)
        if ctx.is_even:
            return _moved(mean, mesh, (rows.batch.placements(), ctx.where), ctx.shape), None, None, None
        (whole,) = rows.gathered([mean])
        return _moved(whole, mesh, ([Replicate()] * len(ctx.where), ctx.where), ctx.shape), None, None, None


def _moved(
    local: torch.Tensor, mesh: DeviceMesh, between: tuple[Sequence[Placement], Sequence[Placement]], shape: torch.Size
) -> torch.Tensor:
    """Move a tensor of a shape between two layouts on a mesh; take and return this rank's part."""
    before, after = between
    if tuple(before) == tuple(after):
        return local
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, mesh, before, run_check=False, shape=shape, stride=stride)
    return whole.redistribute(placements=after).to_local()
