"""Tensors with named dims, operations on them, and what every kind of operation must be able to say."""

import math
import re
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy.typing as npt

from autoshard.spec.training import AdamWConstants
from autoshard.spec.workload import DTYPE_BYTES, Dtype

Array: TypeAlias = npt.NDArray[Any]
Dims: TypeAlias = tuple[str, ...]
Role = Literal["input", "parameter", "activation", "gradient", "state"]
Phase = Literal["micro_batch", "step"]
Pass = Literal["F", "I", "W"]

DIMS = (
    "batch", "seq", "kv_seq", "kv_heads", "q_group", "head_dim", "hidden", "ffn",
    "experts", "slots", "choices", "positions", "vocab", "latent_q", "latent_kv", "plain_dim", "rotary_dim",
    "value_dim", "delta_heads", "delta_group", "delta_key", "delta_value", "taps",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named array before sharding; each of its dims has a name, never only a position."""

    name: str
    dims: Dims
    dtype: Dtype
    role: Role = "activation"

    def num_elements(self, sizes: Mapping[str, int]) -> int:
        """Return how many numbers it holds when its dims have these sizes."""
        return math.prod(sizes[dim] for dim in self.dims)

    def num_bytes(self, sizes: Mapping[str, int]) -> int:
        """Return its bytes when its dims have these sizes."""
        return self.num_elements(sizes) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        """Print as ``name[dims]``."""
        return f"{self.name}[{' '.join(self.dims)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a kind says about one of its results; ``suffix`` completes the op's name."""

    dims: Dims
    dtype: Dtype
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A kind applied to tensors whose dims have sizes: all of them, or one rank's share."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    sizes: Mapping[str, int]

    def elements(self, dims: Sequence[str]) -> int:
        """Return the product of the sizes of these dims."""
        return math.prod(self.sizes[dim] for dim in dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """One operation of a gradient rule: its kind, what it reads, and whose gradient each output is.

    ``reads`` names ``in0``, ``in1``, ... and ``out0``, ... (tensors of the forward op), ``d0``, ...
    (gradients of its outputs) or ``step0``, ... (first output of an earlier step). ``gives`` holds an input's
    index per output, or None. Without a kind the step hands on what it reads.
    """

    kind: "OpKind | None"
    reads: tuple[str, ...]
    gives: tuple[int | None, ...]


class _KindMeta(ABCMeta):
    # Python asks abstract classes for subclasses that are registered. No kind registers any, and a search asks a
    # million times whether an operation is of a kind.
    __instancecheck__ = type.__instancecheck__


class OpKind(metaclass=_KindMeta):
    """What every kind of operation can say about itself."""

    flops_per_element: ClassVar[int] = 1  # on the vector unit, for each element of the input or output with most dims
    label_form: ClassVar[str] = ""  # of the label, where it is not the words of the class: "{0.function}_norm"
    engines: ClassVar[tuple[str, ...]] = ()  # those of autoshard that have a kernel for this very class
    by_token: ClassVar[bool | None] = None  # whether it computes every token from that token alone; None: not stated
    owns_result: ClassVar[bool] = False  # whether a result has memory of its own, and is never a view of an input
    by_expert: ClassVar[bool] = False  # whether it computes the rows of each expert with numbers of that expert alone
    ring_dim: ClassVar[str] = ""  # the dim whose parts a ring of ranks can bring to it in turns
    in_turns: ClassVar[bool] = False  # whether its kernel here takes the parts of a sequence one after the other

    @property
    def label(self) -> str:
        """The name that is printed: einsum, rms_norm, top_k ..."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__)
        return self.label_form.format(self) or words.lower()

    def infer(self, inputs: Sequence[Tensor]) -> tuple[Output, ...]:
        """Return dims and dtype of every output; by default there is one, and it has those of the first input."""
        return (Output(dims=inputs[0].dims, dtype=inputs[0].dtype),)

    @abstractmethod
    def evaluate(self, call: Call, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs with numpy; the definition that every engine must agree with."""

    def torch_kernel(self, call: Call) -> Callable[..., Any] | None:
        """Return what computes the outputs on torch tensors; None for a kind whose kernel is in the torch engine.

        It may stand here where methods of tensors suffice. If the class names its ``engines`` as well, it computes the
        same for every batch and talks to no other rank, and is compiled with its neighbours.
        """
        return None

    def drops(self) -> bool:
        """Say whether it drops numbers at random."""
        return False

    def adds_bias(self) -> bool:
        """Say whether it adds numbers to its scores, as no flash kernel does."""
        return False

    def holds_scores(self) -> bool:
        """Say whether it writes all of its scores, as code does that is no flash kernel."""
        return False

    def caps_scores(self) -> bool:
        """Say whether it squeezes its scores by a tanh, as no flash kernel of torch does."""
        return False

    def starts_at(self, index: int) -> float | tuple[float, float] | None:
        """Return the number at which a weight in this input starts, and does not decay; None for one that is drawn.

        Of two numbers, those of the weight lie evenly from the first to the second.
        """
        return None

    def index_dim(self, call: Call) -> str:
        """Return the dim along which the numbers in its second input count; "" where it reads no such numbers."""
        return ""

    def whole_dims(self) -> Dims:
        """Return the dims that must not be cut, because every result needs all of them."""
        return ()

    def tied_dims(self) -> tuple[tuple[str, Dims], ...]:
        """Return ``(dim, (d1, d2, ...))`` for every dim that is cut exactly as d1, d2, ... together are."""
        return ()

    def linear_through(self) -> Mapping[int, tuple[int, ...]]:
        """Return through which inputs a pending sum may pass, and to which outputs."""
        return {}

    def matrix_flops(self, call: Call) -> int:
        """Return multiplications and additions done on the matrix unit."""
        return 0

    def vector_flops(self, call: Call) -> int:
        """Return element-wise operations."""
        largest = max((*call.inputs, *call.outputs), key=lambda tensor: len(tensor.dims))
        return self.flops_per_element * call.elements(largest.dims)

    def traffic_bytes(self, call: Call) -> int:
        """Return the bytes that it moves from and to memory when it runs on its own."""
        distinct = {tensor.name: tensor for tensor in (*call.inputs, *call.outputs)}
        return sum(tensor.num_bytes(call.sizes) for tensor in distinct.values())


class Differentiable(OpKind):
    """A kind that may stand in a forward pass."""

    @abstractmethod
    def gradient(self, inputs: Sequence[Tensor], needed: Sequence[int]) -> tuple[GradientStep, ...]:
        """Return the steps that give the gradients of the ``needed`` inputs; none if its results are constants."""


class Update(OpKind):
    """A kind that takes a step: it reads a weight, its moments, its gradient and scalars, and gives weight and moments.

    ``scalars`` names its scalar inputs: of clip (the factor of the whole gradient), learning_rate, step_number
    (from 1).
    """

    num_moments: ClassVar[int]
    scalars: ClassVar[tuple[str, ...]]
    clipped: ClassVar[bool] = True  # whether its gradient counts in the norm of the whole, and is clipped with it

    def without_decay(self) -> "Update":
        """Return the update of a weight that does not decay: one of a norm, or a bias."""
        return self

    def with_constants(self, constants: AdamWConstants) -> "Update":
        """Return this update with the constants of a run, if the kind has any."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of the training step."""

    name: str
    kind: OpKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    phase: Phase = "micro_batch"
    pass_: Pass = "F"
    source: str  # the forward op it belongs to (its own name in the forward pass)
    again: bool = False  # a clone made by recompute


def aligned(array: Array, dims: Dims, target: Dims) -> Array:
    """Lay an array out along ``target`` dims, with length-1 axes for the dims it lacks.

    >>> import numpy as np
    >>> aligned(np.zeros((3, 2)), ("seq", "batch"), ("batch", "seq", "hidden")).shape
    (2, 3, 1)
    """
    present = [dim for dim in target if dim in dims]
    moved = array.transpose([dims.index(dim) for dim in present])
    return moved.reshape([moved.shape[present.index(dim)] if dim in dims else 1 for dim in target])
