"""Recompute as a transform: drop what some forward operations keep, and run clones of them in backward."""

from collections.abc import Mapping
from dataclasses import replace

from autoshard.errors import Fault, InputError, nearest
from autoshard.graph.block import Block, Saved
from autoshard.graph.fusing import Flow, saved_tensors
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op
from autoshard.spec.kernels import Kernels


def recompute(block: Block, kernels: Kernels, names: tuple[str, ...] | None) -> Block:
    """Return the block with some operations computed again in backward; ``None`` means all of them (full).

    A kernel is computed again as a whole. What these operations make and the backward of others reads, stays.
    """
    assert block.recompute == "none", f"{block.kind} is recomputed already"
    flow = Flow(dict(block.tensors), block.ops)
    chosen = _to_recompute(block, kernels, names)
    if not chosen:
        return block
    kept = saved_tensors(flow, block.fused, chosen)
    clones = _clones(block, flow, kernels, chosen, kept)
    made = {output for op in clones for output in op.outputs}
    origin = {name.removesuffix(".again"): name for name in made}
    tensors = {name: replace(block.tensors[old], name=name) for old, name in origin.items()}
    return replace(
        block,
        tensors={**block.tensors, **tensors},
        ops=_with_clones(block, clones, origin, {entry.storage for entry in kept}, flow),
        saved=kept,
        recompute=recompute_label(names),
    )


def recompute_label(names: tuple[str, ...] | None) -> str:
    """Return how a kind of recompute is written in a Candidate.

    >>> recompute_label(("attend", "act")), recompute_label(None), recompute_label(())
    ('selective[attend,act]', 'full', 'none')
    """
    if names is None:
        return "full"
    return f"selective[{','.join(names)}]" if names else "none"


def _to_recompute(block: Block, kernels: Kernels, names: tuple[str, ...] | None) -> frozenset[str]:
    forward = [op.name for group in block.fused for op in (block.op(name) for name in group.ops)]
    if names is None:
        return frozenset(forward)
    resolved = kernels.resolve(names)
    known = sorted({*forward, *kernels.selective})
    faults = [
        Fault(where="recompute", message=f"{block.kind} has no operation {name!r}. {nearest(name, known)}")
        for name in names
        if name not in known
    ]
    if faults:
        raise InputError(faults)
    return frozenset(name for group in block.fused if set(group.ops) & set(resolved) for name in group.ops)


def _clones(
    block: Block, flow: Flow, kernels: Kernels, chosen: frozenset[str], kept: tuple[Saved, ...]
) -> tuple[Op, ...]:
    """Return the clones in forward order: up to the last that backward needs or all, as the table says."""
    inside = [
        op
        for op in flow.forward
        if op.name in chosen or (isinstance(op.kind, Deliver) and flow.maker(op.inputs[0]) in chosen)
    ]
    storages = {entry.storage for entry in kept}
    if kernels.clones_end == "last_saved":
        wanted = {name for name in flow.read_by_backward(sorted(chosen)) if flow.root(name) not in storages}
        needed: list[Op] = []
        for op in reversed(inside):
            if wanted.intersection(op.outputs):
                needed.insert(0, op)
                wanted |= {name for name in op.inputs if flow.root(name) not in storages}
        inside = needed
    made = {output for op in inside for output in op.outputs if flow.root(output) not in storages}
    return tuple(
        replace(
            op,
            name=f"{op.name}.again",
            inputs=tuple(f"{name}.again" if name in made else name for name in op.inputs),
            outputs=tuple(f"{name}.again" for name in op.outputs),
            pass_="I",
            again=True,
        )
        for op in inside
        if made.intersection(op.outputs)
    )


def _with_clones(
    block: Block, clones: tuple[Op, ...], origin: Mapping[str, str], kept: set[str], flow: Flow
) -> tuple[Op, ...]:
    """Insert the clones before the first backward operation; let backward read them for what was dropped."""
    ops: list[Op] = []
    pending = list(clones)
    for op in block.ops:
        if op.pass_ == "F" or op.phase == "step":
            ops.append(op)
            continue
        ops.extend(pending)
        pending.clear()
        lost = {name for name in op.inputs if name in origin and flow.root(name) not in kept}
        ops.append(replace(op, inputs=tuple(origin[name] if name in lost else name for name in op.inputs)))
    return tuple(ops)
