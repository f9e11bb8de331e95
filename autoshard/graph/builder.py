"""Writing a block down: its forward operations one by one; backward and step phase follow from the kinds' own rules."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from autoshard.graph.block import Block
from autoshard.graph.fusing import Flow, fuse, saved_tensors
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.optimizer import UPDATES, Accumulate, SquareSum
from autoshard.graph.kinds.pointwise import Cast
from autoshard.graph.op import Differentiable, Dims, Op, OpKind, Pass, Phase, Role, Tensor, Update
from autoshard.spec.kernels import Kernels
from autoshard.spec.workload import Dtype, Optimizer, Precision

_NO_TIES: Mapping[str, str | None] = MappingProxyType({})


def usual_delivery(tensor: str) -> str:
    """Return the name under which a tensor reaches its readers if nobody says otherwise."""
    return f"{tensor.replace('.', '_')}_out"


class BlockBuilder:
    """Collects tensors and operations; inserts the deliver of a tensor when it is first read.

    The one mutable value of the graph floor.
    """

    def __init__(self, precision: Precision, optimizer: Optimizer = "adamw") -> None:
        self.precision = precision
        self.optimizer: Optimizer = optimizer
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.updates: dict[str, Update] = {}  # of weights that the optimizer does not update
        self.undecayed: set[str] = set()  # weights that keep their size, beside those whose kinds say so
        self.decayed: set[str] = set()  # weights that do not, whatever their kinds say
        self._delivered: dict[str, str] = {}
        self._wanted: dict[str, tuple[str, Deliver]] = {}

    def add(self, name: str, dims: Dims, dtype: Dtype | None = None, role: Role = "activation") -> str:
        """Declare a tensor and return its name."""
        assert name not in self.tensors, f"tensor {name} is declared twice"
        self.tensors[name] = Tensor(name=name, dims=dims, dtype=dtype or self.precision.activations, role=role)
        return name

    def input(self, name: str, dims: Dims, dtype: Dtype) -> str:
        """Return the name of a tensor that a batch or the plan brings; it is declared where it is first asked for."""
        return name if name in self.tensors else self.add(name, dims, dtype, "input")

    def weight(self, name: str, *dims: str) -> str:
        """Declare a parameter and return its name."""
        return self.add(name, dims, self.precision.weights, "parameter")

    def exact_weight(self, name: str, dims: Dims, update: Update) -> str:
        """Declare a parameter in FP32, without a copy in another format, that has an update of its own."""
        self.updates[name] = update
        return self.add(name, dims, "fp32", "parameter")

    def deliver_as(
        self, tensor: str, name: str, rename: tuple[tuple[str, str], ...] = (), *, settles: bool = False
    ) -> str:
        """Name the deliver of a tensor, which else gets its usual name when it is first read; return the tensor."""
        self._wanted[tensor] = (name, Deliver(rename=rename, settles=settles))
        return tensor

    def emit(self, name: str, kind: OpKind, *inputs: str) -> str:
        """Append a forward operation that reads delivered tensors; return the name of its first output."""
        reads: list[str] = []
        for tensor in inputs:
            if self.tensors[tensor].role == "activation" and tensor not in self._delivered:
                usual = (usual_delivery(tensor), Deliver())
                delivered, deliver = self._wanted.get(tensor, usual)
                (self._delivered[tensor],) = self.append(delivered, deliver, [tensor], source=delivered)
            reads.append(self._delivered.get(tensor, tensor))
        self.append(name, kind, reads, source=name)
        return name

    def append(
        self, name: str, kind: OpKind, inputs: Sequence[str], *, source: str, phase: Phase = "micro_batch",
        pass_: Pass = "F",
    ) -> tuple[str, ...]:  # fmt: skip
        """Append any operation as it is; return the names of its outputs."""
        role: Role = "activation" if pass_ == "F" and phase == "micro_batch" else "gradient"
        outputs = tuple(
            self.add(f"{name}.{output.suffix}" if number or output.suffix else name, output.dims, output.dtype, role)
            for number, output in enumerate(kind.infer([self.tensors[tensor] for tensor in inputs]))
        )
        op = Op(name=name, kind=kind, inputs=tuple(inputs), outputs=outputs, phase=phase, pass_=pass_, source=source)
        self.ops.append(op)
        return outputs

    def reader(self, tensor: str) -> Op:
        """Return the first operation that reads a tensor."""
        return next(op for op in self.ops if tensor in op.inputs)


def finish(  # noqa: PLR0913
    b: BlockBuilder, kind: str, kernels: Kernels, *, gives: tuple[str, ...], takes: tuple[str, ...] = (),
    repeat: int = 1, ties: Mapping[str, str | None] = _NO_TIES, constant: Collection[str] = (),
) -> Block:  # fmt: skip
    """Derive backward and step phase, decide what is kept, and freeze.

    Gradients begin at all results in ``gives`` but the ``constant`` ones, and end at what it ``takes``. ``ties`` maps a
    parameter to the gradient that another block made for the same values, or to None if that other block updates it.
    """
    seeds = {
        name: b.add(f"d.{name}", b.tensors[name].dims, b.tensors[name].dtype, "gradient")
        for name in gives
        if name not in constant
    }
    add_backward(b, takes, seeds)
    for scalar in UPDATES[b.optimizer].scalars:
        b.add(scalar, (), "fp32", "input")
    for name, tensor in list(b.tensors.items()):
        if tensor.role == "parameter" and ties.get(name, "") is not None:
            _add_update(b, name, ties.get(name))
    flow = Flow(b.tensors, b.ops)
    fused = fuse(flow, kernels)
    return Block(
        kind=kind, repeat=repeat, tensors=b.tensors, ops=tuple(b.ops), fused=fused,
        saved=saved_tensors(flow, fused), takes=takes, gives=gives,
    )  # fmt: skip


def add_backward(b: BlockBuilder, takes: Collection[str], seeds: Mapping[str, str]) -> None:
    """Append the backward operations; ``seeds`` maps results of the block to their gradients.

    They end at weights and at what the block ``takes``. Weight gradients of products are pass W, because only they can
    wait; all else is cheap, and pass I.
    """
    needing = {name for name, tensor in b.tensors.items() if tensor.role == "parameter" or name in takes}
    for op in b.ops:
        inputs = [b.tensors[name] for name in op.inputs]
        constant = isinstance(op.kind, Differentiable) and not op.kind.gradient(inputs, range(len(inputs)))
        if not constant and needing.intersection(op.inputs):
            needing.update(name for name in op.outputs if b.tensors[name].dtype != "int64")
    arriving: dict[str, list[str]] = defaultdict(list, {result: [gradient] for result, gradient in seeds.items()})
    for op in reversed(list(b.ops)):
        if any(arriving[output] for output in op.outputs):
            _differentiate(b, op, needing, arriving)
    for name, tensor in list(b.tensors.items()):
        if tensor.role == "parameter":
            (gradient,) = arriving[name]
            waits = any(gradient in op.outputs and op.pass_ == "W" for op in b.ops)
            sums: Dtype = "fp32" if name in b.updates else b.precision.gradients
            so_far = b.add(f"{name}.grad", tensor.dims, sums, "state")
            source = b.reader(name).name
            b.append(f"{name}.sum", Accumulate(), [so_far, gradient], source=source, pass_="W" if waits else "I")


def _differentiate(b: BlockBuilder, op: Op, needing: set[str], arriving: Mapping[str, list[str]]) -> None:
    """Append the steps of an operation's gradient rule; note whose gradient each result is."""
    assert isinstance(op.kind, Differentiable), f"{op.name}: {op.kind.label} stands in a forward pass"
    needed = [index for index, name in enumerate(op.inputs) if name in needing]
    named = {f"in{number}": [name] for number, name in enumerate(op.inputs)}  # what GradientStep.reads may name
    for number, name in enumerate(op.outputs):
        named |= {f"out{number}": [name], f"d{number}": arriving[name]}
    for number, step in enumerate(op.kind.gradient([b.tensors[name] for name in op.inputs], needed)):
        many = [read for read in step.reads if len(named[read]) != 1]
        assert isinstance(op.kind, Deliver) or not many, f"{op.name} got several {many} without a deliver"
        reads = [name for read in step.reads for name in named[read]]
        outputs: tuple[str, ...] = (reads[0],)
        if step.kind is not None:
            targets = [index for index in step.gives if index is not None]
            weight = any(b.tensors[op.inputs[index]].role == "parameter" for index in targets)
            name = f"{op.name}.d{''.join(map(str, targets)) or 'part'}"
            waits: Pass = "W" if weight and isinstance(step.kind, Einsum) else "I"
            outputs = b.append(name, step.kind, reads, source=op.name, pass_=waits)
        named[f"step{number}"] = [outputs[0]]
        for target, gradient in zip(step.gives, outputs, strict=False):
            if target is not None and op.inputs[target] in needing:
                arriving[op.inputs[target]].append(gradient)


def _add_update(b: BlockBuilder, name: str, tie: str | None) -> None:
    """Append the step phase of a parameter: reduce, square, update, gather."""
    precision, weight, kind = b.precision, b.tensors[name], b.updates.get(name, UPDATES[b.optimizer])
    masters = None if name in b.updates else precision.masters
    reader = b.reader(name)
    stays = name in b.undecayed or reader.kind.starts_at(reader.inputs.index(name)) is not None
    if stays and name not in b.decayed:
        kind = kind.without_decay()  # a norm's scale and shift, and biases, keep their size
    total = f"{name}.sum"
    if tie:
        tied_gradient = b.add(tie, weight.dims, precision.gradients, "input")
        (total,) = b.append(f"{name}.tie", Accumulate(), [total, tied_gradient], source=name, phase="step")
    (gradient,) = b.append(f"{name}.reduce", Deliver(), [total], source=name, phase="step")
    if kind.clipped:
        b.append(f"{name}.square", SquareSum(), [gradient], source=name, phase="step")
    current = b.add(f"{name}.master", weight.dims, masters, "state") if masters else name
    numbers = range(1, kind.num_moments + 1)
    moments = [b.add(f"{name}.moment{number}", weight.dims, precision.moments, "state") for number in numbers]
    reads = [current, *moments, gradient, *kind.scalars]
    updated = b.append(f"{name}.update", kind, reads, source=name, phase="step")[0]
    if masters:
        (updated,) = b.append(f"{name}.cast", Cast(dtype=weight.dtype), [updated], source=name, phase="step")
    b.append(f"{name}.gather", Deliver(), [updated], source=name, phase="step")
