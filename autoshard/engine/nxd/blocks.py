"""A block of the plan's graph as a module: each step is an operation of the graph, or a layer of NxD for several.

Nothing here is said of the model a second time: operations, their order and their weights are those of the graph. What
the graph delivers from one operation to the next is handed over as it is, since NxD's layers send by themselves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend, Rotary
from autoshard.graph.kinds.indexing import Lookup, Pick
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.norm import Norm
from autoshard.graph.kinds.pointwise import Add, Cast, Multiply, Reduce, Unary
from autoshard.graph.op import Call, Op

Compute = Callable[..., Tensor]  # takes activations, then weights
ANGLES = "angles"  # what rotary operations read in the place of positions


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor in FP32, or unchanged if it is wider: so statistics and losses are computed."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Leaf(nn.Module):
    """An operation of the graph, with a rank's part of its weights."""

    def __init__(self, compute: Compute, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.compute = compute
        for name, weight in weights.items():
            self.register_parameter(name, weight)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Apply the operation to activations and to the weights of this leaf."""
        return self.compute(*inputs, *self._parameters.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStep:
    """The operations of one module, in order, the values that it reads of other modules, and those they read."""

    ops: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The module's name."""
        return "_".join(self.ops)


class BlockModule(nn.Module):
    """Modules one after the other. Its inputs are what they read of others, ``reads``; its results are ``writes``."""

    def __init__(self, steps: Sequence[tuple[ModuleStep, nn.Module]], writes: tuple[str, ...]) -> None:
        super().__init__()
        self.steps = [step for step, _ in steps]
        for step, module in steps:
            self.add_module(step.name, module)
        written = {name for step in self.steps for name in step.writes}
        self.reads = tuple(dict.fromkeys(name for step in self.steps for name in step.reads if name not in written))
        self.writes = writes
        self._last_reader = {name: step for step in self.steps for name in step.reads if name not in writes}

    def forward(self, *inputs: Tensor) -> Any:
        """Run the modules in order; free each value after its last reader."""
        values = dict(zip(self.reads, inputs, strict=True))
        for step in self.steps:
            arguments = [values[name] for name in step.reads]
            for name in step.reads:
                if self._last_reader.get(name) is step:
                    del values[name]
            result = self.get_submodule(step.name)(*arguments)
            del arguments
            values.update(zip(step.writes, result if isinstance(result, tuple) else (result,), strict=True))
        results = [values[name] for name in self.writes]
        return tuple(results) if len(results) > 1 else results[0]

    def grouped(self, ops: Sequence[str], mark: Callable[[nn.Module], nn.Module]) -> "BlockModule":
        """Return the same block with these operations, and those between them, as one module, which ``mark`` wraps."""
        pairs = [(step, self.get_submodule(step.name)) for step in self.steps]
        places = [number for number, step in enumerate(self.steps) if set(step.ops) & set(ops)]
        before, inside, after = pairs[: places[0]], pairs[places[0] : places[-1] + 1], pairs[places[-1] + 1 :]
        read = {*self.writes, *(name for step, _ in after for name in step.reads)}
        group = BlockModule(inside, tuple(name for step, _ in inside for name in step.writes if name in read))
        joined = ModuleStep(
            ops=tuple(name for step, _ in inside for name in step.ops), reads=group.reads, writes=group.writes
        )
        return BlockModule([*before, (joined, mark(group)), *after], self.writes)


def module_steps(block: Block, runs: Sequence[tuple[str, ...]]) -> Iterator[ModuleStep]:
    """Yield the steps of a block's forward pass; a run of operations, which one layer of NxD replaces, is one step."""
    run_of = {name: run for run in runs for name in run}
    source: dict[str, str] = {}  # of what is delivered
    reads: dict[str, list[str]] = {}  # what a module reads beside its weights
    ops: list[Op] = []
    for op in block.select("micro_batch", "F"):
        if isinstance(op.kind, Deliver):
            source[op.outputs[0]] = source.get(op.inputs[0], op.inputs[0])
            continue
        inputs = op.inputs[:3] if isinstance(op.kind, Attend) else op.inputs  # attention of NxD knows no positions
        inputs = [op.inputs[0], ANGLES] if isinstance(op.kind, Rotary) else inputs
        tensors = [name for name in inputs if name == ANGLES or block.tensors[name].role != "parameter"]
        reads[op.name] = [source.get(name, name) for name in tensors]
        ops.append(op)
    results = {source.get(block.gives[0], block.gives[0])}
    for op in ops:
        run = run_of.get(op.name, (op.name,))
        if op.name != run[0]:
            continue
        inside = [member for member in ops if member.name in run]
        outputs = [name for member in inside for name in member.outputs]
        read_elsewhere = results.union(*(names for name, names in reads.items() if name not in run))
        yield ModuleStep(
            ops=run,
            reads=tuple(dict.fromkeys(name for member in inside for name in reads[member.name] if name not in outputs)),
            writes=tuple(name for name in outputs if name in read_elsewhere),
        )


def compute_of(block: Block, op: Op) -> Compute:
    """Return the function of an operation that no layer of NxD replaces."""
    make = COMPUTE.get(type(op.kind))
    if make is None:
        where = f"{block.kind}.{op.name}"
        raise InputError.of(where, f"the nxd engine has no module for the kind {op.kind.label}. Use --engine torch")
    return make(op.kind, block.call(op, {}))


def _einsum(kind: Einsum, call: Call) -> Compute:
    x, weight = call.inputs
    num_read = sum(dim not in kind.dims for dim in x.dims)
    num_made = len(weight.dims) - num_read

    def product(x: Tensor, weight: Tensor) -> Tensor:
        flat = functional.linear(x.flatten(-num_read), weight.flatten(num_made).flatten(0, num_made - 1))
        return flat.unflatten(-1, weight.shape[:num_made])  # of the weight, which may be a part

    return product


def _norm(kind: Norm, call: Call) -> Compute:
    """Single operations, whose backward keeps FP32 statistics on every device: torch's own keeps BF16 on a CPU."""
    assert not kind.offset, "Rule nxd-options refuses it"

    def norm(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        if kind.function == "layer":
            wide = wide - wide.mean(dim=-1, keepdim=True)
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + kind.eps)).to(x.dtype) * weight
        return scaled + bias[0] if bias else scaled

    return norm


def _add(kind: Add, call: Call) -> Compute:
    """The second is repeated along the dims that it lacks, before and behind its own."""
    left, right = (tensor.dims for tensor in call.inputs)
    num_behind = len(left) - 1 - left.index(right[-1])
    return lambda x, y: torch.add(x, y[(..., *[None] * num_behind)], alpha=kind.sign)


def _reduce(kind: Reduce, call: Call) -> Compute:
    axes = [call.inputs[0].dims.index(dim) for dim in kind.over]
    return (lambda x: x.sum(axes)) if kind.function == "sum" else (lambda x: x.detach().amax(axes))


class RotaryTable:
    """Cosines and sines of the angles of this rank's positions, [2, position, pair]: made once, for all layers.

    ``positions`` are those of this rank's part of every sequence. A table that is not made before the first step
    becomes part of that step's graph, and the next step, which finds it made, has another.
    """

    def __init__(self, kind: Rotary, head_dim: int, positions: range) -> None:
        self._kind, self._head_dim, self._positions = kind, head_dim, positions
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, x: Tensor) -> Tensor:
        """Return the table on the device and in the format of a tensor."""
        return self.made(x.device, x.dtype)

    def made(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the table on a device and in a format, made of numbers in FP32 at least."""
        key = device, dtype
        if key not in self._made:
            wide = torch.promote_types(dtype, torch.float32)
            frequencies = torch.tensor(self._kind.frequencies(self._head_dim).tolist(), dtype=wide, device=device)
            angles = torch.arange(self._positions.start, self._positions.stop, dtype=wide, device=device)
            angles = angles[:, None] * frequencies
            self._made[key] = torch.stack([angles.cos(), angles.sin()]).to(dtype)
        return self._made[key]


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the halves of the first part of each head: [batch, seq, heads ..., head_dim]."""
    half = angles.shape[-1]
    cos, sin = angles.reshape(2, x.shape[1], *[1] * (x.ndim - 3), half).unbind(0)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention in single operations: [batch, seq, kv_heads, q_group, head_dim].

    What is hidden follows from positions, not from a stored mask.
    """
    queries = rearrange(query, "batch seq kv_heads q_group head_dim -> batch kv_heads q_group seq head_dim")
    keys = rearrange(key, "batch kv_seq kv_heads head_dim -> batch kv_heads 1 head_dim kv_seq")
    values = rearrange(value, "batch kv_seq kv_heads head_dim -> batch kv_heads 1 kv_seq head_dim")
    scores = queries @ keys / query.shape[-1] ** 0.5
    along = torch.arange(query.shape[1], device=query.device)
    scores = at_least_fp32(scores).masked_fill(along[:, None] < along[None, :], float("-inf"))
    weights = functional.softmax(scores, dim=-1).to(value.dtype)
    return rearrange(weights @ values, "batch kv_heads q_group seq head_dim -> batch seq kv_heads q_group head_dim")


_FUNCTIONS: Mapping[str, Compute] = {
    "silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu, "relu2": lambda x: functional.relu(x).square(), "exp": torch.exp, "log": torch.log,
}  # fmt: skip
COMPUTE: Mapping[type, Callable[[Any, Call], Compute]] = {
    Lookup: lambda kind, call: functional.embedding,
    Einsum: _einsum,
    Norm: _norm,
    Add: _add,
    Reduce: _reduce,
    Rotary: lambda kind, call: _rotate,
    Attend: lambda kind, call: attend,
    Unary: lambda kind, call: _FUNCTIONS[kind.function],
    Multiply: lambda kind, call: torch.mul,
    Cast: lambda kind, call: at_least_fp32,
    Pick: lambda kind, call: lambda x, index: x.gather(-1, index.unsqueeze(-1)).squeeze(-1),
}


class FirstStage(nn.Module):
    """The embedding. It makes its positions itself, so that nothing but tokens goes in.

    ``positions`` are those of this rank's part of every sequence, which is all of it without cp.
    """

    def __init__(self, block: BlockModule, positions: range) -> None:
        super().__init__()
        self.block, self._positions = block, positions

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden state."""
        positions = torch.arange(self._positions.start, self._positions.stop, device=tokens.device)
        return self.block(*[tokens, positions][: len(self.block.reads)])


class MiddleStage(nn.Module):
    """A layer. It looks up the angles of its positions itself: else they would travel from stage to stage."""

    def __init__(self, block: nn.Module, rotary: RotaryTable | None) -> None:
        super().__init__()
        self.block, self._rotary = block, rotary

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden state."""
        return self.block(x, self._rotary.like(x)) if self._rotary else self.block(x)


class LastStage(nn.Module):
    """The head, whose loss is scaled so that NxD's means give the plan's sum."""

    def __init__(self, block: BlockModule, scale: int) -> None:
        super().__init__()
        self.block, self._scale = block, scale

    def forward(self, x: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return self.block(x, labels, token_weight) * self._scale


class NxdDecoder(nn.Module):
    """The whole model, of which NxD takes a rank's stages."""

    def __init__(self, embed: FirstStage, layers: Sequence[MiddleStage], head: LastStage) -> None:
        super().__init__()
        self.embed, self.layers, self.head = embed, nn.ModuleList(layers), head

    def forward(self, tokens: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, labels, token_weight)
