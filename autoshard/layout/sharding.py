"""The messages of a lowered block, and the cuts of all that it computes and keeps: the input of the cost model."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.graph.block import Block, Saved
from autoshard.graph.op import Pass, Role
from autoshard.layout.layout import Collective, Cuts, Layout
from autoshard.layout.program import Compute, Given, Program, Value
from autoshard.spec.mesh import in_mesh_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A Collective of a program with its tensor, and the cuts of the tensor where the message is largest."""

    entry: str
    pass_: Pass
    tensor: str
    cuts: Cuts
    collective: Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A block's cuts by operation, by tensor that is kept, and by weight; its messages; what gradients await.

    A ring shows every key to every rank, so that an attention's keys count whole. A tensor may be kept twice: as it
    was made, and as it was delivered; an input of the batch is kept only where it was changed. ``waiting`` names
    the kept tensors and the gradients that W reads.
    """

    op_cuts: Mapping[str, Cuts]
    kept_cuts: Mapping[str, tuple[Cuts, ...]]
    input_cuts: Mapping[str, tuple[Cuts, ...]]
    waiting_cuts: Mapping[str, tuple[Cuts, ...]]
    messages: tuple[Message, ...]
    parameter_cuts: Mapping[str, Cuts]
    parameter_pending: Mapping[str, tuple[str, ...]]
    boundary: Cuts

    @classmethod
    def of(cls, block: Block, program: Program) -> "Sharding":
        """Read it off a program of a block."""
        computes = {entry.op.name: entry for entry in program.instructions if isinstance(entry, Compute)}
        sums = {tensor.name: program.results[f"{tensor.name}.sum"].layout for tensor in block.parameters}
        op_cuts: dict[str, Cuts] = {}
        for name, entry in computes.items():
            ring = entry.op.kind.ring_dim
            op_cuts[name] = {dim: cut for dim, cut in entry.cuts.items() if cut and dim != ring}
        for_backward, read = program.kept(), defaultdict[str, list[Layout]](list)
        for value in for_backward:
            read[value.tensor].append(value.layout)
        # These layouts count where only the kernel that saves a tensor knows which tensors it reads.
        read_layouts: dict[str, list[Layout]] = defaultdict(list)
        for value in {
            read_value.name: read_value for entry in computes.values() for read_value in entry.reads
        }.values():
            read_layouts[value.tensor].append(value.layout)
        waiting = program.waiting(block.gives[0])
        given_names = {entry.value.name for entry in program.instructions if isinstance(entry, Given)}
        changed = [value for value in for_backward if value.name not in given_names]
        sent: list[Message] = []
        for change in program.collectives():  # a message is largest where fewest atoms cut it, or experts are busy
            made_larger = change.collective.kind == "all_gather" or change.collective.to_dim == "experts"
            largest = change.writes if made_larger else change.reads
            sent.append(
                Message(
                    entry=change.entry, pass_=change.pass_, tensor=change.reads.tensor, cuts=largest.layout.cuts,
                    collective=change.collective,
                )
            )  # fmt: skip
        return cls(
            op_cuts=op_cuts,
            kept_cuts={
                entry.storage: _kept(entry, read[entry.storage] or read_layouts[entry.storage], op_cuts)
                for entry in block.saved
            },
            input_cuts=_by_tensor(block, changed, ("input",)),
            waiting_cuts=_by_tensor(block, waiting, ("activation", "gradient")),
            messages=(*sent, *_rings(block, computes)),
            parameter_cuts={name: layout.cuts for name, layout in sums.items()},
            parameter_pending={name: in_mesh_order(layout.sums) for name, layout in sums.items()},
            boundary=program.results[block.gives[0]].layout.cuts,
        )


def _kept(entry: Saved, read: Sequence[Layout], op_cuts: Mapping[str, Cuts]) -> tuple[Cuts, ...]:
    """Return the layouts in which a tensor is kept for backward: those of its readers, or else that of its maker.

    A kernel may keep a tensor under its readers' names of the dims; positions correspond.
    """
    if read:
        return tuple(layout.named(entry.tensor.dims).cuts for layout in read)
    assert entry.op, f"{entry.storage} is kept, but nothing says how it is cut"
    return ({dim: cut for dim, cut in op_cuts[entry.op].items() if dim in entry.tensor.dims},)


def _by_tensor(block: Block, values: Sequence[Value], roles: tuple[Role, ...]) -> Mapping[str, tuple[Cuts, ...]]:
    """Return the layouts of values by tensor, for tensors of some roles."""
    cuts_by_tensor: dict[str, tuple[Cuts, ...]] = {}
    for value in values:
        tensor = block.tensors[value.tensor]
        if tensor.role in roles:
            cuts_by_tensor[tensor.name] = (*cuts_by_tensor.get(tensor.name, ()), value.layout.named(tensor.dims).cuts)
    return cuts_by_tensor


def _rings(block: Block, computes: Mapping[str, Compute]) -> Iterator[Message]:
    """Yield the messages of rings: keys and values of an attention, backward with their gradients.

    They are as large as the queries where a kernel copies them for every query head first.
    """
    for entry in computes.values():
        if entry.ring:
            op, collective = entry.op, Collective(kind="permute", dim=entry.op.kind.ring_dim, atoms=entry.ring[0].atoms)
            heads = [name for name in (*op.inputs, *op.outputs) if "kv_heads" in block.tensors[name].dims]
            keys = [name for name in heads if op.kind.ring_dim in block.tensors[name].dims]
            if any(group.kernel.expands_keys for group in block.fused if op.source in group.ops):
                keys = [next(name for name in heads if name not in keys)] * len(keys)
            for name in keys:
                dims = block.tensors[name].dims
                cuts = {dim: cut for dim, cut in entry.cuts.items() if cut and dim in dims}
                yield Message(entry=op.source, pass_=op.pass_, tensor=name, cuts=cuts, collective=collective)
