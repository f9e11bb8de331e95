"""The backward pass and the step phase of a block, derived from each kind's own gradient rule."""

from collections import defaultdict
from collections.abc import Mapping

from autoshard.graph.builder import BlockBuilder
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.norm import Norm
from autoshard.graph.kinds.optimizer import UPDATES, Accumulate, SquareSum
from autoshard.graph.kinds.pointwise import Add, Cast
from autoshard.graph.op import Differentiable, GradientStep, Op, Pass


def add_backward(builder: BlockBuilder, carry_in: str | None, seeds: dict[str, str]) -> str | None:
    """Append the backward operations; ``seeds`` maps results of the block to their gradients.

    Returns the gradient of ``carry_in``. Weight gradients of products are pass W; everything else is pass I.
    """
    flows = _needing_gradient(builder, carry_in)
    arriving: dict[str, list[str]] = defaultdict(list)
    for result, gradient in seeds.items():
        arriving[result].append(gradient)
    for op in reversed(list(builder.ops)):
        if any(arriving[output] for output in op.outputs):
            _differentiate(builder, op, flows, arriving)
    for name, tensor in list(builder.tensors.items()):
        if tensor.role == "parameter":
            (gradient,) = arriving[name]
            _accumulate(builder, name, gradient)
    if carry_in is None:
        return None
    (gradient,) = arriving[carry_in]
    return gradient


def _needing_gradient(builder: BlockBuilder, carry_in: str | None) -> set[str]:
    flows = {name for name, tensor in builder.tensors.items() if tensor.role == "parameter" or name == carry_in}
    for op in builder.ops:
        if any(name in flows for name in op.inputs) and not _stops(op):
            flows.update(name for name in op.outputs if builder.tensors[name].dtype != "int64")
    return flows


def _stops(op: Op) -> bool:
    return isinstance(op.kind, Differentiable) and op.kind.stops_gradient


def _differentiate(builder: BlockBuilder, op: Op, flows: set[str], arriving: dict[str, list[str]]) -> None:
    assert isinstance(op.kind, Differentiable), f"{op.name}: {op.kind.label} stands in a forward pass"
    needed = [index for index, name in enumerate(op.inputs) if name in flows]
    steps = op.kind.gradient([builder.tensors[name] for name in op.inputs], needed)
    made: list[str] = []
    for step in steps:
        reads = [name for read in step.reads for name in _resolve(read, op, arriving, made)]
        if step.kind is None:
            given: tuple[str, ...] = (reads[0],)
        else:
            targets = "".join(str(index) for index in step.gives if index is not None) or "part"
            name = f"{op.name}.d{targets}"
            given = builder.append(name, step.kind, reads, source=op.name, pass_=_pass_of(builder, op, step))
        made.append(given[0])
        for target, gradient in zip(step.gives, given, strict=False):
            if target is not None and op.inputs[target] in flows:
                arriving[op.inputs[target]].append(gradient)


def _pass_of(builder: BlockBuilder, op: Op, step: GradientStep) -> Pass:
    """Only the weights of products can wait (pass W); the rest is cheap and is reduced at once."""
    targets = [op.inputs[index] for index in step.gives if index is not None]
    weight = any(builder.tensors[name].role == "parameter" for name in targets)
    return "W" if weight and isinstance(step.kind, Einsum) else "I"


def _resolve(read: str, op: Op, arriving: dict[str, list[str]], made: list[str]) -> list[str]:
    number = int(read.lstrip("dinoutsep"))
    if read.startswith("in"):
        return [op.inputs[number]]
    if read.startswith("out"):
        return [op.outputs[number]]
    if read.startswith("step"):
        return [made[number]]
    gradients = arriving[op.outputs[number]]
    assert isinstance(op.kind, Deliver) or len(gradients) == 1, f"{op.name} got {gradients} without a deliver"
    return gradients


def _accumulate(builder: BlockBuilder, parameter: str, gradient: str) -> None:
    dims = builder.tensors[parameter].dims
    reader = next(op for op in builder.ops if parameter in op.inputs)
    late = any(gradient in op.outputs and op.pass_ == "W" for op in builder.ops)
    pass_: Pass = "W" if late else "I"
    so_far = builder.add(f"{parameter}.grad", dims, builder.precision.gradients, "state")
    builder.append(f"{parameter}.sum", Accumulate(), [so_far, gradient], source=reader.name, pass_=pass_)


def add_update(builder: BlockBuilder, ties: Mapping[str, str | None]) -> None:
    """Append the step phase of every parameter: reduce, square, update, gather.

    ``ties`` maps a parameter to the gradient that another block made for the same values, or to None if that
    other block updates it.
    """
    for scalar in UPDATES[builder.optimizer].scalars:
        builder.add(scalar, (), "fp32", "input")
    for name, tensor in list(builder.tensors.items()):
        if tensor.role == "parameter" and ties.get(name, "") is not None:
            gradient = _reduced(builder, name, ties.get(name))
            builder.append(f"{name}.square", SquareSum(), [gradient], source=name, phase="step")
            _update(builder, name, gradient)


def _update(builder: BlockBuilder, name: str, gradient: str) -> None:
    precision, weight, usual = builder.precision, builder.tensors[name], UPDATES[builder.optimizer]
    kind = usual if _decays(builder, name) else usual.without_decay()
    current = builder.add(f"{name}.master", weight.dims, precision.masters, "state") if precision.masters else name
    numbers = range(1, kind.num_moments + 1)
    moments = [builder.add(f"{name}.moment{number}", weight.dims, precision.moments, "state") for number in numbers]
    reads = [current, *moments, gradient, *kind.scalars]
    updated = builder.append(f"{name}.update", kind, reads, source=name, phase="step")[0]
    if precision.masters:
        (updated,) = builder.append(f"{name}.cast", Cast(dtype=weight.dtype), [updated], source=name, phase="step")
    builder.append(f"{name}.gather", Deliver(), [updated], source=name, phase="step")


def _decays(builder: BlockBuilder, parameter: str) -> bool:
    """Hold for embeddings and products; a norm's scale and shift, and what is added as a bias, keep their size."""
    reader = next(op for op in builder.ops if parameter in op.inputs)
    return not isinstance(reader.kind, (Norm, Add))


def _reduced(builder: BlockBuilder, name: str, tie: str | None) -> str:
    total = f"{name}.sum"
    if tie:
        other = builder.add(tie, builder.tensors[name].dims, builder.precision.gradients, "input")
        (total,) = builder.append(f"{name}.tie", Accumulate(), [total, other], source=name, phase="step")
    (reduced,) = builder.append(f"{name}.reduce", Deliver(), [total], source=name, phase="step")
    return reduced
