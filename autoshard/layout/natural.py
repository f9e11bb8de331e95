"""A first sharding by one rule: every dim is cut over the atoms that bear its meaning, whatever the operation.

Batch over dp, sequence over cp, heads, ffn and vocabulary over tp, experts over ep; and where an operation has nothing
to cut over tp, its sequence. The Collectives follow from where neighbouring operations disagree.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autoshard.graph.block import Block, Saved
from autoshard.graph.kinds.attention import Attend, AttendGradient
from autoshard.graph.kinds.experts import Combine, CombineGradient, Dispatch, DispatchGradient
from autoshard.graph.kinds.indexing import ScatterAdd
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import Dims, Op, Pass
from autoshard.layout.collective import Collective, CollectiveKind
from autoshard.layout.layout import Cuts
from autoshard.spec.mesh import ATOMS

TP = ("kv", "rep")
BOUNDARY: Dims = ("batch", "seq", "hidden")
_MEANING: Mapping[str, tuple[str, ...]] = {
    "batch": ("edp", "ep"),
    "seq": ("cp",),
    "kv_seq": ("cp",),
    "kv_heads": ("kv",),
    "q_group": ("rep",),
    "ffn": TP,
    "vocab": TP,
    "slots": ("edp", "cp"),
    "experts": ("ep",),
}
_MOVES_TOKENS = (Dispatch, DispatchGradient, Combine, CombineGradient)
_ATTENDS = (Attend, AttendGradient)
_LINEAR = (Accumulate, Combine, DispatchGradient, Reduce, ScatterAdd)  # a pending sum may pass through these

_PASSES: tuple[Pass, ...] = ("F", "I", "W")

Pending = tuple[str, ...]
Flowing = tuple[tuple[tuple[tuple[str, tuple[str, ...]], ...], Pending], ...]  # (cuts, pending) per part of a sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A Collective that an operation's data needs: which tensor, and how it is cut where the message is largest."""

    op: str
    pass_: Pass
    tensor: str
    cuts: Cuts
    collective: Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class NaturalSharding:
    """The rule applied to a block: cuts of every operation and tensor, messages, and what weights' gradients await."""

    op_cuts: Mapping[str, Cuts]
    tensor_cuts: Mapping[str, Cuts]
    messages: tuple[Message, ...]
    parameter_cuts: Mapping[str, Cuts]
    parameter_pending: Mapping[str, Pending]

    def read_cuts(self, op: str, dims: Dims) -> Cuts:
        """Return how a tensor of these dims is cut where an operation reads or makes it; only dims that are cut."""
        return {dim: atoms for dim, atoms in _of_dims(self.op_cuts[op], dims).items() if atoms}

    def saved_cuts(self, entry: Saved) -> Cuts:
        """Return how a rank keeps a tensor from forward to backward; only dims that are cut."""
        name = entry.tensor.name
        if name not in self.tensor_cuts:
            assert entry.op, f"{name} is kept, but nothing says how it is cut"
            return self.read_cuts(entry.op, entry.tensor.dims)
        return {dim: atoms for dim, atoms in self.tensor_cuts[name].items() if atoms}


def natural_sharding(block: Block, *, sequence_parallel: bool, keeps_gathered: bool) -> NaturalSharding:
    """Apply the rule to a block; without ``keeps_gathered`` every pass that reads a gathered tensor gathers anew."""
    ops = block.select("micro_batch")
    cuts = {op.name: _op_cuts(block, op, sequence_parallel) for op in ops}
    boundary = _cut_dims(BOUNDARY, sequence_parallel)
    arriving = {name: boundary for name in (block.carry_in, f"d.{block.carry_out}") if name}
    wanted = _wanted(block, ops, cuts, boundary)
    flowing = _flowing(block, ops, cuts, arriving, {name for name, asked in wanted.items() if not _all_linear(asked)})
    messages = [message for op in ops for message in _changes(op, flowing, wanted)]
    messages += [message for op in ops for message in _inner(block, op)]
    readers = [_gathered_readers(block, ops, cuts, message) for message in messages]
    kept = {found.tensor: found.cuts for found, passes in zip(messages, readers, strict=True) if passes - {"F"}}
    takers = {name: op.name for op in reversed(ops) for name in op.inputs if block.tensors[name].role == "parameter"}
    return NaturalSharding(
        op_cuts=cuts,
        tensor_cuts={name: dict(parts[0][0]) for name, parts in flowing.items()} | (kept if keeps_gathered else {}),
        messages=tuple(messages if keeps_gathered else _repeated(messages, readers)),
        parameter_cuts={name: _of_dims(cuts[op], block.tensors[name].dims) for name, op in takers.items()},
        parameter_pending={name: _in_order(_pending_of(flowing[f"{name}.sum"])) for name in takers},
    )


def _gathered_readers(block: Block, ops: Sequence[Op], cuts: Mapping[str, Cuts], message: Message) -> set[Pass]:
    """Return the passes that read what a message gathers of an activation; none for other messages."""
    tensor = block.tensors[message.tensor]
    if message.collective.kind != "all_gather" or tensor.role != "activation":
        return set()
    read = {op.name: _freeze(_of_dims(cuts[op.name], tensor.dims)) for op in ops if message.tensor in op.inputs}
    return {op.pass_ for op in ops if read.get(op.name) == _freeze(message.cuts)}


def _repeated(messages: Sequence[Message], readers: Sequence[set[Pass]]) -> Iterable[Message]:
    """Yield each message once, or once in every pass that reads what it gathers."""
    for message, passes in zip(messages, readers, strict=True):
        for name in [name for name in _PASSES if name in passes] or [message.pass_]:
            yield replace(message, pass_=name)


def _cut_dims(dims: Iterable[str], sequence_parallel: bool, *, moves_tokens: bool = False) -> Cuts:
    """Cut dims by meaning, each atom once; the sequence takes tp where nothing else does."""
    cuts: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for dim, atoms in _MEANING.items():
        if dim in dims:
            cuts[dim] = tuple(atom for atom in atoms if atom not in used)
            used.update(cuts[dim])
    if sequence_parallel and "seq" in cuts and not used.intersection(TP) and not moves_tokens:
        cuts["seq"] = (*cuts["seq"], *TP)
    return cuts


def _op_cuts(block: Block, op: Op, sequence_parallel: bool) -> Cuts:
    """Cut the dims of an operation: a ring meets every key, a dispatch sees tokens and slots each in its own cut."""
    tensors = [block.tensors[name] for name in (*op.inputs, *op.outputs)]
    dims = {dim for tensor in tensors for dim in tensor.dims}
    if isinstance(op.kind, _ATTENDS):
        return _cut_dims(dims - {"kv_seq"}, sequence_parallel)
    if isinstance(op.kind, _MOVES_TOKENS):
        tokens = _cut_dims(dims & {"batch", "seq"}, sequence_parallel, moves_tokens=True)
        return {**tokens, **_cut_dims(dims & {"slots", "experts"}, sequence_parallel)}
    return _cut_dims(dims, sequence_parallel)


def _of_dims(cuts: Cuts, dims: Dims) -> Cuts:
    return {dim: cuts.get(dim, _MEANING["kv_seq"] if dim == "kv_seq" else ()) for dim in dims}


def _freeze(cuts: Cuts) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(sorted((dim, atoms) for dim, atoms in cuts.items() if atoms))


def _pending_of(flowing: Flowing) -> Pending:
    return tuple(dict.fromkeys(atom for _, pending in flowing for atom in pending))


def _in_order(atoms: Iterable[str]) -> Pending:
    """Return atoms in one order, so that weights whose gradients await the same are told as one group."""
    return tuple(sorted(atoms, key=ATOMS.index))


def _all_linear(readings: Iterable[tuple[Cuts, bool]]) -> bool:
    return all(linear for _, linear in readings)


def _flowing(
    block: Block, ops: Sequence[Op], cuts: Mapping[str, Cuts], arriving: Mapping[str, Cuts], settled: Set[str]
) -> dict[str, Flowing]:
    """Return how each tensor leaves its maker: cuts, and sums still pending over atoms that cut what was summed.

    What is ``settled`` is summed for one of its readers, so that no other passes the pending sum on.
    """
    flowing: dict[str, Flowing] = {name: ((_freeze(cut), ()),) for name, cut in arriving.items()}
    for op in ops:
        for index, name in enumerate(op.outputs):
            if isinstance(op.kind, Deliver | Collect):
                flowing[name] = _merged(block, op, flowing)
            else:
                own = _freeze(_of_dims(cuts[op.name], block.tensors[name].dims))
                unsettled = {tensor: flowing[tensor] for tensor in op.inputs if tensor in flowing.keys() - settled}
                flowing[name] = ((own, _output_pending(block, op, index, cuts[op.name], unsettled)),)
    return flowing


def _merged(block: Block, op: Op, flowing: Mapping[str, Flowing]) -> Flowing:
    """Sum contributions that are cut alike; a part that is whole over an atom pending in another counts once there."""
    assert isinstance(op.kind, Deliver | Collect), f"{op.name} hands nothing on"
    names = dict(op.kind.rename)
    parts: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = defaultdict(list)
    for tensor in op.inputs:
        for cuts, pending in flowing[tensor]:
            renamed = tuple(sorted((names.get(dim, dim), atoms) for dim, atoms in cuts))
            parts[renamed].extend(atom for atom in pending if atom not in parts[renamed])
    return tuple((cuts, tuple(pending)) for cuts, pending in parts.items())


def _output_pending(block: Block, op: Op, index: int, cuts: Cuts, flowing: Mapping[str, Flowing]) -> Pending:
    """Return the atoms that cut a dim which this output no longer has, and what passes through a linear operation."""
    dims = block.tensors[op.outputs[index]].dims
    if isinstance(op.kind, _MOVES_TOKENS):
        lost: list[str] = []
    else:
        lost = [atom for dim, atoms in cuts.items() if dim not in dims for atom in atoms]
        if isinstance(op.kind, AttendGradient):
            lost = [atom for atom in lost if atom in TP]
    through = isinstance(op.kind, _LINEAR) or (isinstance(op.kind, CombineGradient) and index == 1)
    passed = [atom for name in op.inputs if through and name in flowing for atom in _pending_of(flowing[name])]
    return tuple(dict.fromkeys((*lost, *passed)))


def _wanted(
    block: Block, ops: Sequence[Op], cuts: Mapping[str, Cuts], boundary: Cuts
) -> Mapping[str, Sequence[tuple[Cuts, bool]]]:
    """Return for each tensor the cuts in which it is read, and whether pending sums are welcome.

    A clone that nobody reads runs to its end all the same: it is wanted as what it is a clone of.
    """
    wanted: dict[str, list[tuple[Cuts, bool]]] = defaultdict(list)
    for op in ops:
        if not isinstance(op.kind, Deliver | Collect):
            linear = isinstance(op.kind, (*_LINEAR, CombineGradient))
            for name in op.inputs:
                wanted[name].append((_of_dims(cuts[op.name], block.tensors[name].dims), linear))
    if block.carry_out:
        wanted[block.carry_out].append((boundary, False))
    if block.carry_in:
        reader = next(op.name for op in ops if block.carry_in in op.inputs)
        wanted[f"{reader}.d0"].append((boundary, False))
    for op in ops:
        for name in op.outputs if op.again else ():
            wanted[name] = wanted[name] or wanted[name.removesuffix(".again")]
    return wanted


def _changes(
    op: Op, flowing: Mapping[str, Flowing], wanted: Mapping[str, Sequence[tuple[Cuts, bool]]]
) -> Iterable[Message]:
    """Yield the Collectives that bring an operation's outputs into the cuts of their readers, each cut once."""
    outside = [name for name in op.inputs if name.startswith("d.") and name in flowing]
    for tensor in (*op.outputs, *outside):
        readings = wanted.get(tensor, ())
        for asked in {_freeze(cuts): cuts for cuts, _ in readings}.values():
            linear = _all_linear(reading for reading in readings if reading[0] == asked)
            for held, pending in flowing.get(tensor, ()):
                for collective, largest in _steps(dict(held), () if linear else pending, asked):
                    yield Message(op=op.name, pass_=op.pass_, tensor=tensor, cuts=largest, collective=collective)


def _steps(held: Cuts, pending: Pending, wanted: Cuts) -> Iterable[tuple[Collective, Cuts]]:
    """Yield the Collectives from one layout to another, with the cuts at which each message is largest."""
    left = list(pending)
    for dim, atoms in wanted.items():
        scattered = tuple(atom for atom in atoms if atom not in held.get(dim, ()) and atom in left)
        if scattered:
            yield _collective("reduce_scatter", dim, scattered), held
            left = [atom for atom in left if atom not in scattered]
    if left:
        yield _collective("all_reduce", None, tuple(left)), held
    for dim, atoms in held.items():
        gathered = tuple(atom for atom in atoms if atom not in wanted.get(dim, ()))
        if gathered:
            yield _collective("all_gather", dim, gathered), wanted


def _collective(kind: CollectiveKind, dim: str | None, atoms: tuple[str, ...], repeat: int = 1) -> Collective:
    return Collective(kind=kind, dim=dim, atoms=atoms, repeat=repeat)


def _inner(block: Block, op: Op) -> Iterable[Message]:
    """Yield what an operation sends inside itself: the ring of attention, the all-to-all of a dispatch.

    Keys and values go around the ring, backward with their gradients; as large as the queries where a kernel copies
    them for every query head first.
    """
    if isinstance(op.kind, _ATTENDS):
        forward = isinstance(op.kind, Attend)
        rounds = [op.inputs[1], op.inputs[2]] if forward else [*op.inputs[2:4], *op.outputs[1:]]
        if any(group.expands_keys for group in block.fused if op.source in group.ops):
            rounds = [op.inputs[0 if forward else 1]] * len(rounds)
        for name in rounds:
            cuts = _of_dims(_cut_dims(block.tensors[name].dims, False), block.tensors[name].dims)
            ring = _collective("permute", "kv_seq", ("cp",))
            yield Message(op=op.name, pass_=op.pass_, tensor=name, cuts=cuts, collective=ring)
    if isinstance(op.kind, _MOVES_TOKENS):
        slots = next(name for name in (*op.inputs, *op.outputs) if "slots" in block.tensors[name].dims)
        cuts = _of_dims(_cut_dims(block.tensors[slots].dims, False), block.tensors[slots].dims)
        swap = _collective("all_to_all", "experts", ("ep",))
        yield Message(op=op.name, pass_=op.pass_, tensor=slots, cuts=cuts, collective=swap)
