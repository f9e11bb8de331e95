"""The one mutable value of the graph floor: a block while it is being written down."""

from collections.abc import Sequence

from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Dims, Op, OpKind, Pass, Phase, Role, Tensor
from autoshard.spec.workload import Dtype, Optimizer, Precision


class BlockBuilder:
    """Collects tensors and operations; inserts the deliver of a tensor when it is first read."""

    def __init__(self, precision: Precision, optimizer: Optimizer = "adamw") -> None:
        self.precision = precision
        self.optimizer: Optimizer = optimizer
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self._delivered: dict[str, str] = {}
        self._wanted: dict[str, tuple[str, Deliver]] = {}

    def add(self, name: str, dims: Dims, dtype: Dtype | None = None, role: Role = "activation") -> str:
        """Declare a tensor and return its name."""
        assert name not in self.tensors, f"tensor {name} is declared twice"
        self.tensors[name] = Tensor(name=name, dims=dims, dtype=dtype or self.precision.activations, role=role)
        return name

    def weight(self, name: str, *dims: str) -> str:
        """Declare a parameter and return its name."""
        return self.add(name, dims, self.precision.weights, "parameter")

    def deliver_as(
        self, tensor: str, name: str, rename: tuple[tuple[str, str], ...] = (), *, settles: bool = False
    ) -> str:
        """Say under which name a tensor reaches its readers; without this the name is ``<tensor>_out``."""
        self._wanted[tensor] = (name, Deliver(rename=rename, settles=settles))
        return tensor

    def emit(self, name: str, kind: OpKind, *inputs: str) -> str:
        """Append a forward operation that reads delivered tensors; return the name of its first output."""
        self.append(name, kind, [self._deliver(tensor) for tensor in inputs], source=name)
        return name

    def append(
        self, name: str, kind: OpKind, inputs: Sequence[str], *, source: str, phase: Phase = "micro_batch",
        pass_: Pass = "F",
    ) -> tuple[str, ...]:  # fmt: skip
        """Append any operation as it is; return the names of its outputs."""
        role: Role = "activation" if pass_ == "F" and phase == "micro_batch" else "gradient"
        outputs: list[str] = []
        for index, output in enumerate(kind.infer([self.tensors[tensor] for tensor in inputs])):
            full = name if index == 0 and not output.suffix else f"{name}.{output.suffix}"
            outputs.append(self.add(full, output.dims, output.dtype, role))
        op = Op(
            name=name,
            kind=kind,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            phase=phase,
            pass_=pass_,
            source=source,
        )
        self.ops.append(op)
        return op.outputs

    def _deliver(self, tensor: str) -> str:
        role = self.tensors[tensor].role
        if role != "activation":
            return tensor
        if tensor not in self._delivered:
            name, kind = self._wanted.get(tensor, (f"{tensor.replace('.', '_')}_out", Deliver()))
            (self._delivered[tensor],) = self.append(name, kind, [tensor], source=name)
        return self._delivered[tensor]
