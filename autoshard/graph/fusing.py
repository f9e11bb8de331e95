"""Which forward operations run as one kernel, which tensors stay alive for backward, and what is computed again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from autoshard.errors import Fault, InputError, nearest
from autoshard.graph.block import Block, FusedOps, Saved
from autoshard.graph.kinds.attention import SCORES
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op, Tensor
from autoshard.spec.kernels import NEVER, Kernel, Kernels
from autoshard.spec.workload import Dtype


class Flow:
    """Who makes and who reads each forward tensor of a block, looking through delivers."""

    def __init__(self, tensors: dict[str, Tensor], ops: Sequence[Op]) -> None:
        self.tensors = tensors
        self.ops = ops
        self.forward = [op for op in ops if op.pass_ == "F" and op.phase == "micro_batch"]
        self._origin = {op.outputs[0]: op.inputs[0] for op in self.forward if isinstance(op.kind, Deliver)}
        self._maker = {name: op.name for op in self.forward for name in op.outputs}

    def root(self, tensor: str) -> str:
        """Return the tensor whose memory this one shares: delivers make no copy."""
        while tensor in self._origin:
            tensor = self._origin[tensor]
        return tensor

    def maker(self, tensor: str) -> str | None:
        """Return the operation that computes it; None for what comes from outside the block."""
        return self._maker.get(self.root(tensor))

    def is_kept(self, tensor: str) -> bool:
        """Whether keeping it costs memory: activations do; weights and the batch are there anyway."""
        return self.tensors[self.root(tensor)].role == "activation"

    def read_by_backward(self, sources: Sequence[str]) -> list[str]:
        """Return the forward tensors that the gradients of these operations read, without duplicates."""
        forward = {name for op in self.forward for name in (*op.inputs, *op.outputs)}
        reads = [
            name
            for op in self.ops
            if op.pass_ != "F" and op.phase == "micro_batch" and op.source in sources
            for name in op.inputs
            if name in forward and self.is_kept(name)
        ]
        return list(dict.fromkeys(reads))

    def external_inputs(self, ops: Sequence[str]) -> list[str]:
        """Return the activations that these operations read from others, each once, in order."""
        reads = [
            name
            for op in self.forward
            if op.name in ops
            for name in op.inputs
            if self.is_kept(name) and self.maker(name) not in ops
        ]
        return list({self.root(name): name for name in reversed(reads)}.values())[::-1]


def fuse(flow: Flow, kernels: Kernels) -> tuple[FusedOps, ...]:
    """Group the forward operations into kernels; an operation that no table entry names is a kernel by itself.

    An operation of a table's kernel that the model lacks is passed over.
    """
    computing = (op for op in flow.forward if not isinstance(op.kind, Deliver))
    owner = {
        op.name: kernels.entry(
            op.name,
            drops=op.kind.drops(),
            biased=op.kind.adds_bias(),
            unfused=op.kind.holds_scores(),
            capped=op.kind.caps_scores(),
        )
        for op in computing
    }
    groups: list[FusedOps] = []
    assigned: set[str] = set()
    for name, entry in owner.items():
        if name in assigned:
            continue
        kernel = entry or Kernel(ops=(name,), source="no entry of the table")
        mates = [] if kernel.apart else [mate for mate in kernel.ops if mate != name and owner.get(mate) is entry]
        run = (name, *mates)
        assigned.update(run)
        saves = [_saved(flow, tensor) for tensor in flow.read_by_backward(run)]
        if kernel.saves is not None:
            copies = [f"{run[0]}.copy{number}" for number in range(len(kernel.saves))]
            saves = [
                save
                for text, copy in zip(kernel.saves, copies, strict=True)
                for save in _named_saves(flow, run, text, copy)
            ]
        kernel = kernel if kernels.eager else replace(kernel, launches=NEVER)
        scratch = [save for text in kernel.scratch for save in _named_saves(flow, run, text, f"{run[0]}.scratch")]
        groups.append(FusedOps(ops=run, kernel=kernel, saves=tuple(saves), scratch=tuple(scratch)))
    return tuple(groups)


def saved_tensors(
    flow: Flow, fused: Sequence[FusedOps], recomputed: frozenset[str] = frozenset(), *, remakes: bool = False
) -> tuple[Saved, ...]:
    """Return all that stays from forward to backward when some operations are computed again.

    The tensors that the kernels of those operations save are dropped. Tensors that they read from elsewhere stay; so
    do their outputs for the backward of other operations, unless a platform ``remakes`` these outputs as well.
    """
    entries = [save for group in fused if not recomputed.intersection(group.ops) for save in group.saves]
    entries = [save for save in entries if not remakes or save.op not in recomputed]
    entries += [_saved(flow, name) for name in flow.external_inputs(sorted(recomputed))]
    return tuple({entry.storage: entry for entry in entries}.values())


def _saved(flow: Flow, name: str) -> Saved:
    return Saved(storage=flow.root(name), tensor=flow.tensors[name], op=flow.maker(name))


def _named_saves(flow: Flow, run: tuple[str, ...], text: str, memory: str) -> Iterator[Saved]:
    """Read an entry of the tensors that a kernel saves or needs besides; ``memory`` names a buffer of the kernel."""
    reference, _, dtype = text.partition("@")
    prefix, _, which = reference.rpartition(":")
    if which == "scores":
        query = next(op.inputs[0] for op in flow.forward if op.name == run[0])
        saved_dtype = cast(Dtype, dtype) if dtype else flow.tensors[query].dtype
        yield Saved(storage=memory, tensor=Tensor(name=memory, dims=SCORES, dtype=saved_dtype), op=run[0])
        return
    if which.startswith("in"):
        inputs = flow.external_inputs(run)
        names = inputs if which == "in*" else [inputs[int(which[2:])]]
    else:
        names = [next(op for op in flow.forward if op.name == run[-1]).outputs[int(which[3:])]]
    for index, name in enumerate(names):
        tensor = flow.tensors[name]
        saved_dtype = cast(Dtype, dtype) if dtype else tensor.dtype
        if not prefix and saved_dtype == tensor.dtype:
            yield _saved(flow, name)
        else:
            storage = memory if index == 0 else f"{memory}_{index}"
            over = flow.root(name) if prefix == "over" else None
            yield Saved(storage=storage, tensor=replace(tensor, name=storage, dtype=saved_dtype), op=run[0], over=over)


def recompute(block: Block, kernels: Kernels, names: tuple[str, ...] | None) -> Block:
    """Return the block with some operations computed again in backward; ``None`` means all of them (full).

    A kernel is computed again as a whole. Outputs that the backward of other operations reads stay, or are computed
    again, as the table says.
    """
    assert block.recompute == "none", f"{block.kind} is recomputed already"
    of_sets = (name for ops in kernels.stated.values() for name in ops)  # a layer may lack some, as one without experts
    known_names = sorted({*(name for group in block.fused for name in group.ops), *kernels.sets, *of_sets})
    unknown = [name for name in names or () if name not in known_names]
    if unknown:
        raise InputError(
            Fault(where="recompute", message=f"{block.kind} has no operation {name!r}. {nearest(name, known_names)}")
            for name in unknown
        )
    selected = set(known_names) if names is None else set(kernels.resolve(names))
    recomputed = frozenset(name for group in block.fused if selected.intersection(group.ops) for name in group.ops)
    if not recomputed:
        return block
    flow = Flow(dict(block.tensors), block.ops)
    saved = saved_tensors(flow, block.fused, recomputed, remakes=kernels.remakes_inputs)
    kept_storages = {entry.storage for entry in saved}
    clones = _clones(flow, kernels, recomputed, kept_storages)
    again = {name.removesuffix(".again"): name for op in clones for name in op.outputs}
    ops: list[Op] = [op for op in block.ops if op.pass_ == "F" and op.phase == "micro_batch"]
    ops += clones  # before the first backward operation; backward reads them for what was dropped
    for op in block.ops[len(ops) - len(clones) :]:
        lost = {
            name for name in op.inputs if op.phase != "step" and name in again and flow.root(name) not in kept_storages
        }
        ops.append(replace(op, inputs=tuple(again[name] if name in lost else name for name in op.inputs)))
    tensors = {name: replace(block.tensors[old], name=name) for old, name in again.items()}
    return replace(
        block, tensors={**block.tensors, **tensors}, ops=tuple(ops), saved=saved, recompute=recompute_label(names)
    )


def recompute_label(names: tuple[str, ...] | None) -> str:
    """Return how a kind of recompute is written in a Candidate.

    >>> recompute_label(("attend", "act")), recompute_label(None), recompute_label(())
    ('selective[attend,act]', 'full', 'none')
    """
    if names is None:
        return "full"
    return f"selective[{','.join(names)}]" if names else "none"


def _clones(flow: Flow, kernels: Kernels, recomputed: frozenset[str], kept_storages: set[str]) -> tuple[Op, ...]:
    """Return the clones in forward order: up to the last one that backward needs, or all, as the table says."""
    inside = [
        op
        for op in flow.forward
        if op.name in recomputed or (isinstance(op.kind, Deliver) and flow.maker(op.inputs[0]) in recomputed)
    ]
    if kernels.clones_end == "last_saved":
        readers = [op.name for op in flow.forward] if kernels.remakes_inputs else sorted(recomputed)
        needed_names = {name for name in flow.read_by_backward(readers) if flow.root(name) not in kept_storages}
        needed: list[Op] = []
        for op in reversed(inside):
            if needed_names.intersection(op.outputs):
                needed.insert(0, op)
                needed_names |= {name for name in op.inputs if flow.root(name) not in kept_storages}
        inside = needed
    remade = {output for op in inside for output in op.outputs if flow.root(output) not in kept_storages}
    return tuple(
        replace(
            op,
            name=f"{op.name}.again",
            inputs=tuple(f"{name}.again" if name in remade else name for name in op.inputs),
            outputs=tuple(f"{name}.again" for name in op.outputs),
            pass_="I",
            again=True,
        )
        for op in inside
        if remade.intersection(op.outputs)
    )
