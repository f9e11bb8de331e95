"""Which kinds of operations an engine computes, by the names of their classes in ``graph/kinds``.

The planner reads this list, because it does not load the engines; tests hold it against the engines' own tables.
"""

from collections.abc import Iterable, Mapping

from autoshard.errors import Fault, InputError
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.op import OpKind
from autoshard.plan.rules.columns import Engine

KERNELS: Mapping[Engine, frozenset[str]] = {
    "torch": frozenset((
        "Accumulate", "AdamW", "Add", "Attend", "AttendGradient", "Cast", "Combine", "CombineGradient", "Dispatch",
        "DispatchGradient", "Einsum", "Lookup", "Multiply", "Norm", "NormGradient", "NormWeightGradient", "Pick",
        "Place", "Reduce", "Repeat", "Rotary", "ScatterAdd", "Sgd", "Slot", "Softmax", "SoftmaxGradient", "SquareSum",
        "TopK", "TopKGradient", "Unary", "UnaryGradient",
    )),
    "nxd": frozenset((  # as single operations of torch, or inside a layer of NxD
        "Add", "Attend", "Cast", "Combine", "Dispatch", "Einsum", "Lookup", "Multiply", "Norm", "Pick", "Reduce",
        "Rotary", "Slot", "Softmax", "TopK", "Unary",
    )),
}  # fmt: skip


def check_kernels(blocks: Iterable[Block], engine: Engine) -> None:
    """Refuse operations of kinds that the engine cannot compute; autograd finds the backward pass of nxd."""
    faults = [
        Fault(where=f"{block.kind}.{op.name}", message=missing_kernel(op.kind, engine))
        for block in blocks
        for op in (block.ops if engine == "torch" else block.select("micro_batch", "F"))
        if not (isinstance(op.kind, Deliver | Collect) or has_kernel(op.kind, engine))
    ]
    if faults:
        raise InputError(faults)


def has_kernel(kind: OpKind, engine: Engine) -> bool:
    """Whether an engine computes a kind: it has a kernel itself, or the kind brings one for torch."""
    own = type(kind).__module__.startswith("autoshard.graph.kinds.") and type(kind).__name__ in KERNELS[engine]
    return own or (engine == "torch" and type(kind).torch_kernel is not OpKind.torch_kernel)


def missing_kernel(kind: OpKind, engine: Engine) -> str:
    """Say that an engine cannot compute a kind, and what to write."""
    name = type(kind).__name__
    if engine == "nxd":
        return f"the nxd engine has no layer or module for the kind {name}. Use --engine torch"
    return (
        f"the torch engine has no kernel for the kind {name}. Give the class a method torch_kernel(self, call) that "
        "returns a function from tensors of torch to a tuple of them (docs/extending.md)"
    )
