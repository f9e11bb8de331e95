"""A block of the model with its forward, backward and step operations; the graph of one training step."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.graph.op import Array, Call, Dims, Op, Tensor, Update
from autoshard.spec.kernels import Kernel
from autoshard.spec.model import LAYER, OTHER_BLOCKS

TOKENS: Dims = ("batch", "seq")
WIDE: Dims = (*TOKENS, "vocab")  # of logits, and of what a loss computes from them


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor kept from forward to backward; two entries with the same storage are the same memory.

    A rank keeps the share of it that ``op`` holds; ``op`` is None for the result of the block before. ``over``
    names the tensor that it overwrites: it takes no memory beside that tensor, nor does that tensor's gradient
    beside it.
    """

    storage: str
    tensor: Tensor
    op: str | None
    over: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOps:
    """Forward operations that run as one kernel, the table's entry of the kernel, and the tensors that it keeps."""

    ops: tuple[str, ...]
    kernel: Kernel
    saves: tuple[Saved, ...]
    scratch: tuple[Saved, ...] = ()  # that its backward has besides


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Operations that occur together, ``repeat`` times in a row, each time with weights of their own.

    ``takes`` names the tensors that come from elsewhere and get a gradient, ``gives`` its results: between the blocks
    of a decoder the hidden state, and a loss at the end.
    """

    kind: str
    repeat: int
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    fused: tuple[FusedOps, ...]
    saved: tuple[Saved, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    recompute: str = "none"

    def __post_init__(self) -> None:
        """Verify: names, order, shapes, one gradient per parameter, all reads delivered."""
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        named = {name for op in self.ops for name in (*op.inputs, *op.outputs)}
        missing = (named | {*self.takes, *self.gives}) - set(self.tensors)
        assert not missing, f"{self.kind} speaks of {sorted(missing)}, which it does not declare"
        names = [op.name for op in self.ops]
        assert len(names) == len(set(names)), f"{self.kind} has two operations of one name"
        defined = set(self.tensors) - {output for op in self.ops for output in op.outputs}
        for op in self.ops:
            late = [name for name in op.inputs if name not in defined]
            assert not late, f"{self.kind}.{op.name} reads {late} before they exist"
            doubled = [name for name in op.outputs if name in defined]
            assert not doubled, f"{self.kind}.{op.name} defines {doubled} again"
            inferred = [(out.dims, out.dtype) for out in op.kind.infer([self.tensors[name] for name in op.inputs])]
            stated = [(self.tensors[name].dims, self.tensors[name].dtype) for name in op.outputs]
            assert inferred == stated, f"{self.kind}.{op.name} gives {inferred}, not {stated}"
            defined.update(op.outputs)
        self._check_gradients_and_deliveries()

    def __hash__(self) -> int:
        """Return a number by which what was worked out about a block is known again; equal blocks have the same."""
        return hash((self.kind, self.recompute, len(self.ops), len(self.saved), len(self.tensors)))

    @property
    def is_layer(self) -> bool:
        """Whether it is one of the layers of a decoder."""
        return self.kind not in OTHER_BLOCKS

    @property
    def weight_products(self) -> frozenset[str]:
        """The products of activations with the weights of a layer, which may have a number format of their own.

        Those of routers never have: in Megatron-LM a router is no module of Transformer Engine, torchtitan leaves
        ``router.gate`` out (models/deepseek_v3), and so does DeepSeek-V3 (arXiv:2412.19437, 3.3.1).
        """
        products = (op for op in self.ops if isinstance(op.kind, Einsum) and self.is_layer)
        return frozenset(
            op.name
            for op in products
            if any(self.tensors[name].role == "parameter" for name in op.inputs) and not self._routes(op)
        )

    @property
    def expert_products(self) -> frozenset[str]:
        """Of these, the products of rows with the weights of their experts."""
        rows = {name: self.tensors[self.op(name).inputs[0]].dims for name in self.weight_products}
        return frozenset(name for name, dims in rows.items() if {"experts", "slots"} <= {*dims})

    def _routes(self, op: Op) -> bool:
        """Whether a product gives a token one number for each expert, or the share with which the shared MLP counts."""
        return {*self.tensors[op.outputs[0]].dims} - {*self.tensors[op.inputs[0]].dims} <= {"experts"}

    @property
    def carry_in(self) -> str | None:
        """The hidden state that it takes from the block before, if there is one."""
        return next(iter(self.takes), None)

    @property
    def carry_out(self) -> str | None:
        """The hidden state that it hands on, unless it ends in a loss."""
        return next((name for name in self.gives if self.tensors[name].dims), None)

    def given_back(self, name: str) -> str:
        """Return the gradient of a tensor that it takes."""
        return next(f"{op.name}.d0" for op in self.ops if op.inputs == (name,))

    def call(self, op: Op, sizes: Mapping[str, int]) -> Call:
        """Return an operation applied to its tensors, with these sizes of the dims."""
        inputs = tuple(self.tensors[name] for name in op.inputs)
        return Call(inputs=inputs, outputs=tuple(self.tensors[name] for name in op.outputs), sizes=sizes)

    def op(self, name: str) -> Op:
        """Return the operation of that name."""
        return next(op for op in self.ops if op.name == name)

    def select(self, phase: str, passes: str = "") -> tuple[Op, ...]:
        """Return the operations of a phase (``micro_batch`` or ``step``) and of passes (``F``, ``IW``)."""
        return tuple(op for op in self.ops if op.phase == phase and (not passes or op.pass_ in passes))

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Its weights."""
        return tuple(tensor for tensor in self.tensors.values() if tensor.role == "parameter")

    def trains(self, weight: str) -> bool:
        """Say whether a gradient trains a weight; what corrects routers is moved otherwise."""
        update = next((op.kind for op in self.ops if op.name == f"{weight}.update"), None)
        return not isinstance(update, Update) or update.clipped

    def matrix_flops(self, passes: str, sizes: Mapping[str, int], *, again: bool = True) -> int:
        """Return the matrix FLOPs of one run of passes (``F``, ``IW``, ...), with or without clones."""
        ops = [op for op in self.select("micro_batch", passes) if again or not op.again]
        return sum(op.kind.matrix_flops(self.call(op, sizes)) for op in ops)

    def run(self, ops: Sequence[Op], sizes: Mapping[str, int], values: dict[str, Array]) -> None:
        """Evaluate operations in order, adding their outputs to the values of tensors."""
        for op in ops:
            call = self.call(op, sizes)
            results = op.kind.evaluate(call, *(values[name] for name in op.inputs))
            for tensor, result in zip(call.outputs, results, strict=True):
                expected = tuple(sizes[dim] for dim in tensor.dims)
                assert result.shape == expected, f"{self.kind}.{op.name}: {tensor} has shape {result.shape}"
                values[tensor.name] = result

    def _check_gradients_and_deliveries(self) -> None:
        sums = [op for op in self.select("micro_batch") if isinstance(op.kind, Accumulate)]
        sums_given = sorted((op.outputs[0], self.tensors[op.outputs[0]].dims) for op in sums)
        expected = sorted((f"{tensor.name}.sum", tensor.dims) for tensor in self.parameters)
        assert sums_given == expected, f"{self.kind}: gradients {sums_given} for parameters {expected}"
        delivered = {name for op in self.ops if isinstance(op.kind, Deliver) for name in op.outputs}
        for op in self.select("micro_batch", "F"):
            activations = [name for name in op.inputs if self.tensors[name].role == "activation"]
            direct = [name for name in activations if name not in delivered]
            assert isinstance(op.kind, Deliver) or not direct, f"{self.kind}.{op.name} reads {direct} undelivered"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """One training step: its blocks, then ``update``, which makes the clip factor of all gradients.

    Blocks are the embedding, the kinds of layers, which follow each other as ``order`` lists them, and the head.
    ``tied`` maps a parameter (``head.unembed.weight``) to the one that it shares its values with
    (``embed.embed.weight``).
    """

    sizes: Mapping[str, int]
    blocks: tuple[Block, ...]
    order: tuple[str, ...]
    update: Block
    tied: Mapping[str, str]

    def __post_init__(self) -> None:
        """Verify that neighbouring blocks agree on the hidden state."""
        for before, after in zip(self.blocks, self.blocks[1:], strict=False):
            assert before.carry_out and after.carry_in, f"nothing goes from {before.kind} to {after.kind}"
            handed_on, received = before.tensors[before.carry_out], after.tensors[after.carry_in]
            assert (handed_on.dims, handed_on.dtype) == (received.dims, received.dtype), (
                f"{handed_on} is not {received}"
            )
        counts = {block.kind: block.repeat for block in self.blocks[1:-1]}
        assert Counter(self.order) == counts, f"the layers {self.order} are not {counts}"

    def block(self, kind: str) -> Block:
        """Return the block of that kind."""
        return next(block for block in self.blocks if block.kind == kind)

    def block_of(self, instance: str) -> Block:
        """Return the block that ``instances`` names so; ``instance`` may go on with the name of a weight."""
        kind, number, *_ = instance.split(".")
        return self.block(self.order[int(number)] if kind == LAYER else kind)

    @property
    def num_layers(self) -> int:
        """How many layers lie between the embedding and the head."""
        return len(self.order)

    def instances(self) -> Iterator[tuple[str, Block]]:
        """Yield every block as often as it occurs, in order, named ``embed.0``, ``layer.0``, ``layer.1``, ..."""
        yield "embed.0", self.blocks[0]
        yield from ((f"{LAYER}.{number}", self.block(kind)) for number, kind in enumerate(self.order))
        yield "head.0", self.blocks[-1]

    def num_parameters(self) -> int:
        """Return the number of weights that gradients train, tied ones once."""
        return sum(
            block.repeat * tensor.num_elements(self.sizes)
            for block in self.blocks
            for tensor in block.parameters
            if f"{block.kind}.{tensor.name}" not in self.tied and block.trains(tensor.name)
        )

    def model_flops_per_token(self) -> float:
        """Return the matrix FLOPs that one token of training needs, without recompute: what utilisation is measured by.

        All (query, key) pairs count, also those that the mask hides, as in published figures.
        """
        flops = sum(block.repeat * block.matrix_flops("FIW", self.sizes, again=False) for block in self.blocks)
        return flops / (self.sizes["batch"] * self.sizes["seq"])
